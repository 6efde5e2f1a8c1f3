"""The job: reads a text, runs the model on it, measures its compositions, and writes a page of numbers and pictures."""

import time
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from dynattn.modeling.positions.context_length import context_length

from ..common.atomic_file import write_json
from ..common.atomic_folder import check_nothing_else, recover, staged_folder
from ..common.builtin_corpus import builtin_corpus_name, builtin_documents
from ..common.checkpoint_loading import check_vocabulary, load_checkpoint, refuse_nan
from ..common.composition_observation import LayerObservation, count_layers
from ..common.environment import provenance, versions
from ..common.errors import UserError
from ..common.folder_names import resolve_destination
from .arguments import InspectArguments
from .measures import ablate, measure_layer, observe
from .report import PAGE, PICTURES, write_report

RESULT = "measures.json"


def inspect(arguments: InspectArguments) -> Path:
    """Observes the model and writes the folder; returns the path of the page.

    Raises:
        UserError: the folder is taken or being written, the checkpoint does not load, or the model composes no heads.
    """
    output = resolve_destination(arguments.output)
    recover(output)
    check_free = partial(check_output, output, arguments.overwrite)
    check_free()
    model, tokenizer = load_checkpoint(arguments.model, tokenizer=arguments.tokenizer, dtype="float32", device="cpu")
    check_composes(model, arguments.model)
    check_vocabulary(model, tokenizer)
    model.config.output_attentions = False  # maps are taken from the layers, whose implementation returns none
    tokens, source = read_tokens(tokenizer, model, arguments)
    check_layer(arguments.layer, count_layers(model))
    record, layers = look(model, tokens, arguments.model, source)
    check_layer(arguments.layer, len(layers))
    shown = len(layers) // 2 if arguments.layer is None else arguments.layer
    with staged_folder(output, check_free) as staging:
        write_report(record, layers[shown], shown, staging)
        write_json(staging / RESULT, record)
    return output / PAGE


def look(
    model: PreTrainedModel, tokens: Tensor, name: str, source: str
) -> tuple[dict[str, Any], list[LayerObservation]]:
    """Runs the model on `tokens` `[1, T]`, as it is and without each of its terms.

    Returns:
        All numbers, for `measures.json`, and what each layer computed.
    """
    started, origin = time.perf_counter(), provenance()  # now, because the checkout may change before the end
    layers, loss = observe(model, tokens)
    if not layers:
        raise UserError(f"{name} ({model.config.model_type}) composes heads only in layers that read no text")
    refuse_nan(torch.tensor(loss))
    record = {
        "model": name,
        "model_type": model.config.model_type,
        "text": source,
        "tokens": tokens.shape[1],
        "loss": loss,
        "layers": [measure_layer(layer) for layer in layers],
        "ablations": ablate(model, tokens, layers, loss),
        "versions": versions(),
        **origin,
    }
    return {**record, "seconds": time.perf_counter() - started}, layers


def check_output(output: Path, overwrite: bool) -> None:
    """Raises UserError if the folder is not empty, unless `overwrite` is given and it holds an inspection alone."""
    if output.exists() and not output.is_dir():
        raise UserError(f"output={output} is a file; give a folder")
    if output.is_dir() and any(output.iterdir()):
        if not overwrite:
            raise UserError(f"output={output} is not empty; give another folder, or --overwrite")
        if not (output / RESULT).is_file():
            raise UserError(f"output={output} holds no inspection, so it is not overwritten; remove it yourself")
        check_nothing_else(output, (RESULT, PAGE, *PICTURES))


def check_composes(model: PreTrainedModel, name: str) -> None:
    """Raises UserError for a model without composed heads."""
    if not count_layers(model):
        raise UserError(
            f"{name} ({model.config.model_type}) composes no heads; inspect shows composition, so give a DCFormer, a "
            "DCPythia or a model of with_composed_heads that composes them"
        )


def check_layer(layer: int | None, layers: int) -> None:
    """Raises UserError for a layer that a model with so many `layers` does not have."""
    if layer is not None and not 0 <= layer < layers:
        raise UserError(f"layer={layer} must be from 0 to {layers - 1}")


def read_tokens(
    tokenizer: PreTrainedTokenizerBase, model: PreTrainedModel, arguments: InspectArguments
) -> tuple[Tensor, str]:
    """The tokens `[1, T]` of the text and where it comes from.

    Raises:
        UserError: the file is not text, or the text has fewer than two tokens.
    """
    text, source = arguments.text, "--text"
    if arguments.file is not None:
        text, source = _read(Path(arguments.file)), arguments.file
    elif text is None:
        text, source = builtin_documents("validation")[0], f"{builtin_corpus_name()}, validation"
    limit = min(arguments.max_tokens, context_length(model.config) or arguments.max_tokens)
    tokens = tokenizer(text, return_tensors="pt", truncation=True, max_length=limit)["input_ids"]
    if tokens.shape[1] < 2:
        raise UserError(f"the text has {tokens.shape[1]} tokens; give at least 2")
    return tokens.to(torch.long), source


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"file={path} cannot be read as UTF-8 text: {error}") from error
