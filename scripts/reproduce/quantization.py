"""Perplexity of a trained model with quantized weights, with the composition in full precision and quantized.

Run: `dynattn reproduce quantization --run FOLDER --output FOLDER [--option value]`, where the run is one of
`dynattn pretrain`: its model is scored on its own held-out tokens. Needs `pip install 'dynattn[quantization]'`.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from ..common.arguments import option, parse_arguments
from ..common.errors import UserError

if TYPE_CHECKING:  # --help waits for none of these
    from torch import Tensor
    from transformers import PreTrainedModel

# The axis of each weight of `DynamicComposition` that a product sums over; each of its columns gets one scale.
SUMMED_AXES = {"hidden_weight": 0, "factor_weight": 2, "gate_weight": 0, "static_weight": 2}
INT4_GROUP = 32


@dataclass
class QuantizationArguments:
    """Arguments of the study; a YAML file holds the same names."""

    run: str = field(metadata={"help": "folder of a finished run of dynattn pretrain"})
    output: str = field(metadata={"help": "folder to write record.json and table.md into"})
    length: int = option(128, "tokens of each window that is scored")

    def __post_init__(self) -> None:
        if self.length < 2:
            raise UserError(f"length={self.length} must be 2 or more, so that a window has a token to predict")


def main(argv: Sequence[str]) -> int:
    """Scores every variant, and writes and prints the table."""
    arguments = parse_arguments(QuantizationArguments, argv, prog="dynattn reproduce quantization", description=__doc__)
    from .study_files import check_readable, claim_folder, describe_run, held_out_windows, write_study

    check_readable(arguments.run, arguments.length, f"length={arguments.length}")
    windows = held_out_windows(arguments.run, arguments.length)
    if len(windows) < 2:
        raise UserError(
            f"length={arguments.length}, but {arguments.run} holds out tokens for one such window only, and a standard "
            "error needs two; lower it"
        )
    settings = {"run": describe_run(arguments.run), "length": arguments.length, "windows": len(windows)}
    settings["study"] = "quantization"
    folder = claim_folder(arguments.output, settings)
    rows = list(score_variants(Path(arguments.run) / "model", windows))
    print(write_study(folder, settings, rows))
    return 0


def score_variants(folder: Path, windows: "Tensor") -> Iterator[dict[str, Any]]:
    """One row for each variant of the model in `folder`: bytes, perplexity on `windows` `[N, L]`, change of the loss.

    The change is the mean over windows with its standard error, against the same windows in full precision.
    """
    full: Tensor | None = None
    for name, (options, bits) in variants().items():
        model, size = load_variant(folder, options, bits)
        losses = window_losses(model, windows)
        full = losses if full is None else full
        change = losses - full
        yield {
            "weights": name,
            "composition": f"int{bits}" if bits else "float32",
            "bytes": size,
            "perplexity": round(math.exp(losses.mean().item()), 3),
            "loss_change": round(change.mean().item(), 5),
            "standard_error": round((change.std() / len(change) ** 0.5).item(), 5),
        }


def variants() -> dict[str, tuple[dict[str, Any], int]]:
    """By name, what `from_pretrained` is given and the bits of composition weights, 0 where they stay as they are.

    Raises:
        UserError: torchao or bitsandbytes is missing.
    """
    try:
        import bitsandbytes  # noqa: F401
        import torchao.quantization as ao
        from torchao.quantization.granularity import PerGroup
    except ImportError as error:
        raise UserError(f"{error}; `pip install 'dynattn[quantization]'`") from error
    import torch
    from transformers import BitsAndBytesConfig, TorchAoConfig

    int8 = {"quantization_config": TorchAoConfig(ao.Int8WeightOnlyConfig())}
    dynamic = {"quantization_config": TorchAoConfig(ao.Int8DynamicActivationInt8WeightConfig())}
    four_bits: Any = torch.int4  # type: ignore[attr-defined]
    weight_only = ao.IntxWeightOnlyConfig(weight_dtype=four_bits, granularity=PerGroup(INT4_GROUP))
    int4 = {"quantization_config": TorchAoConfig(weight_only)}
    int8_bnb = {"quantization_config": BitsAndBytesConfig(load_in_8bit=True), "device_map": "cpu"}
    nf4 = {"quantization_config": BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4"), "device_map": "cpu"}
    return {
        "float32": ({}, 0),
        "float32, composition int8": ({}, 8),
        "float32, composition int4": ({}, 4),
        "torchao int8": (int8, 0),
        "torchao int8, composition too": (int8, 8),
        "torchao int8, activations too": (dynamic, 0),
        f"torchao int4, groups of {INT4_GROUP}": (int4, 0),
        "torchao int4, composition too": (int4, 4),
        "bitsandbytes int8": (int8_bnb, 0),
        "bitsandbytes nf4": (nf4, 0),
    }


def load_variant(folder: Path, options: dict[str, Any], bits: int) -> tuple["PreTrainedModel", int]:
    """Loads a variant, saves it and loads it again; returns the reloaded model and the bytes of its weights."""
    from transformers import AutoModelForCausalLM

    with TemporaryDirectory() as saved:
        AutoModelForCausalLM.from_pretrained(folder, **options).save_pretrained(saved)
        size = sum(path.stat().st_size for path in Path(saved).glob("*.safetensors"))
        device = {"device_map": options["device_map"]} if "device_map" in options else {}
        model = AutoModelForCausalLM.from_pretrained(saved, **device).eval()
    if bits:
        quantize_composition(model, bits)
    return model, size


def quantize_composition(model: "PreTrainedModel", bits: int) -> None:
    """Rounds the weights that generate composition factors, and the static matrices, to `bits` bits in place."""
    from dynattn.modeling.layers.head_composition import DynamicComposition

    for module in model.modules():
        if isinstance(module, DynamicComposition):
            for name, axis in SUMMED_AXES.items():
                if (weight := getattr(module, name)) is not None:
                    weight.data = rounded(weight.data, bits, axis)


def rounded(weight: "Tensor", bits: int, axis: int) -> "Tensor":
    """`weight` in `2^bits - 1` symmetric steps, whose size is one for all elements along `axis`."""
    largest = 2 ** (bits - 1) - 1
    step = weight.abs().amax(dim=axis, keepdim=True).clamp(min=1e-12) / largest
    return (weight / step).round() * step


def window_losses(model: Callable[..., Any], windows: "Tensor") -> "Tensor":
    """The mean loss of each window `[N, L]` in nats per token, `[N]`."""
    import torch
    from torch.nn.functional import cross_entropy

    losses = []
    with torch.no_grad():
        for batch in windows.split(8):
            logits = model(batch, use_cache=False).logits[:, :-1].float()
            losses.append(cross_entropy(logits.transpose(1, 2), batch[:, 1:], reduction="none").mean(dim=1))
    return torch.cat(losses)
