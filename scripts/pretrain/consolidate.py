"""Turns a checkpoint of a pretraining run into a model in Hugging Face format, and checks that both are equal.

Run: `dynattn convert consolidate SRC DST [--option value]`

SRC is a checkpoint folder (`step-NNNNNN`), or the folder of a run, whose newest checkpoint is then taken. A single
process reads the shards of all processes that wrote it. The model has to fit into the memory of the CPU twice.
"""

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from ..common.arguments import option, parse_arguments
from ..common.errors import UserError
from ..common.folder_names import resolve_destination

if TYPE_CHECKING:  # only for annotations: help and mistyped options need to be fast
    from torch import Tensor
    from transformers import PreTrainedConfig, PreTrainedModel

PROBE_TOKENS = 64


@dataclass
class ConsolidateArguments:
    """Arguments of one consolidation."""

    source: str = field(metadata={"help": "checkpoint or run (SRC, the first argument)"})
    destination: str = field(metadata={"help": "folder to write (DST, the second argument)"})
    dtype: Literal["float32", "bfloat16"] = option("float32", "dtype of the saved weights")
    average: bool = option(False, "take the moving average of the weights, which a run with ema_decay keeps")
    overwrite: bool = option(False, "replace the checkpoint that DST holds")


def main(argv: Sequence[str]) -> int:
    """Consolidates, reports, and returns the exit status."""
    arguments = parse_arguments(
        ConsolidateArguments, argv, words=2, prog="dynattn convert consolidate SRC DST", description=__doc__
    )
    print("\n".join(consolidate(arguments)))
    return 0


def consolidate(arguments: ConsolidateArguments) -> list[str]:
    """Writes the model with its tokenizer, reads it back and compares it; returns what was done, line by line.

    Raises:
        UserError: there is no checkpoint, it is damaged, the destination may not be written, or the saved model differs
            from the checkpoint.
    """
    import torch

    from ..common.atomic_folder import claim_destination, staged_folder
    from .model import reset_generation
    from .outputs import checkpoint

    source, destination = find_checkpoint(Path(arguments.source)), resolve_destination(arguments.destination)
    check_free = claim_destination(destination, source.resolve(), arguments.overwrite)
    checkpoint.verify(source)
    model = read_model(source, averaged=arguments.average)
    for weight in model.parameters():
        weight.data = weight.to(getattr(torch, arguments.dtype))
    reset_generation(model)
    with staged_folder(destination, check_free) as staging:
        model.save_pretrained(staging)
        copy_tokenizer(source, staging, model.config)
        compare(model, staging)
    tensors, length = sum(1 for _ in model.parameters()), probe_length(model)
    return [
        f"read        {source}, update {checkpoint.read_state(source)['progress']['step']}",
        f"wrote       {destination}, {model.num_parameters():,} parameters, {arguments.dtype}",
        f"verified    {tensors} tensors and the logits of {length} tokens equal bit for bit",
    ]


def find_checkpoint(path: Path) -> Path:
    """The checkpoint that a path names, or the newest one of the run that it names."""
    from .outputs import checkpoint
    from .outputs.run_folder import RunFolder

    found = checkpoint.list_checkpoints(RunFolder(path).checkpoints)
    if found:
        return found[-1]
    if not (path / checkpoint.STATE_FILE).is_file():
        raise UserError(f"{path} is neither a checkpoint (step-NNNNNN) nor a run that holds one; give one of them")
    return path


def read_model(source: Path, *, averaged: bool = False) -> "PreTrainedModel":
    """The model of a checkpoint on the CPU, in float32 and in evaluation mode.

    Args:
        averaged: read the moving average of the weights instead of the weights.

    Raises:
        UserError: `averaged` is asked for, and the run has kept no average.
    """
    import torch
    from transformers import CONFIG_MAPPING

    from .model_config import AUTO_CLASSES
    from .outputs import checkpoint
    from .outputs.earlier_format import is_earlier_format, load_earlier_weights
    from .outputs.training_state import hide_warning_of_one_process, load_weights

    hide_warning_of_one_process()
    fingerprint: dict[str, Any] = checkpoint.read_state(source)["fingerprint"]
    fields = {name.removeprefix("model."): value for name, value in fingerprint.items() if name.startswith("model.")}
    config = CONFIG_MAPPING[fields.pop("model_type")](**fields)
    auto_class = AUTO_CLASSES[fingerprint.get("objective", "causal_lm")]
    model = auto_class.from_config(config, dtype=torch.float32)
    if averaged and fingerprint.get("ema_decay") is None:
        raise UserError(f"{source} is of a run without ema_decay, which keeps no average; leave out --average")
    if is_earlier_format(source):
        load_earlier_weights(source, model)
    else:
        load_weights(source / checkpoint.TENSORS, model, averaged=averaged)
    return model.eval()


def copy_tokenizer(source: Path, destination: Path, config: "PreTrainedConfig") -> None:
    """Copies the tokenizer of the run that the checkpoint belongs to; prints a warning if there is none."""
    from transformers import AutoTokenizer

    from .data.tokenizer import save_tokenizer
    from .outputs.checkpoint import read_state
    from .outputs.run_folder import RunFolder

    # A checkpoint is RUN/checkpoints/step-N or, if the run has gone back behind it, RUN/checkpoints/abandoned-N/step-N.
    folders = [RunFolder(path).tokenizer for path in source.resolve().parents[1:3]]
    if found := [folder for folder in folders if folder.is_dir()]:
        length = read_state(source)["fingerprint"]["sequence_length"]
        save_tokenizer(AutoTokenizer.from_pretrained(found[0]), destination, config, length)
    else:
        print(f"warning: no tokenizer at {folders[0]}, so none is written", file=sys.stderr)


def probe_length(model: "PreTrainedModel") -> int:
    """How many tokens the logits are compared on: no more than the model may have positions."""
    from dynattn.modeling.positions.context_length import context_length

    return min(PROBE_TOKENS, context_length(model.config) or PROBE_TOKENS)


def compare(model: "PreTrainedModel", folder: Path) -> None:
    """Raises UserError unless the model in `folder` has the tensors and the logits of `model`."""
    import torch

    saved = type(model).from_pretrained(folder, dtype="auto").eval()
    read: dict[str, Tensor] = saved.state_dict()
    different = [name for name, tensor in model.state_dict().items() if not torch.equal(tensor, read[name])]
    ids = torch.randint(model.config.vocab_size, (1, probe_length(model)), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        difference = (model(ids, use_cache=False).logits - saved(ids, use_cache=False).logits).abs().max().item()
    if different or difference != 0:
        raise UserError(
            f"the saved model differs from the checkpoint: tensors {json.dumps(different)}, logits by {difference}; "
            "report this, and keep the checkpoint"
        )
