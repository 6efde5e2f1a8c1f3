"""The suite `long`: the measurements of `long_context` for one or several checkpoints, as a table and a plot."""

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any
from zlib import crc32

import numpy as np
from transformers import PreTrainedConfig, PreTrainedTokenizerBase

from dynattn.modeling.positions.context_length import context_length, longest_readable

from ..common.builtin_corpus import builtin_documents
from ..common.errors import UserError
from ..common.markdown import joined_table, table
from ..common.option_values import parse_mapping
from ..common.paired import interval_in_words, paired_difference
from .arguments import EvaluateArguments
from .loading import load_named
from .long_context import MULTIPLES, cut_windows, describe, find_keys, loss_by_position, own_start, score_windows
from .result_files import PLOT, check_output, report
from .results import describe_environment, describe_model
from .text_files import read_documents

PROMPTS = 10


def evaluate_long(arguments: EvaluateArguments) -> None:
    """Measures the checkpoints, prints the table, and writes results and plot if asked to.

    Raises:
        UserError: a checkpoint or the text cannot be read, or is too short.
    """
    if arguments.output is not None:
        check_output(arguments.output, arguments.overwrite)
    checkpoints = [measure_checkpoint(name, arguments) for name in [arguments.model, *arguments.others]]
    results: dict[str, Any] = {
        "suite": "long",
        "text": arguments.dataset or "held-out part of the built-in corpus",
        "seed": arguments.seed,
        "checkpoints": checkpoints,
        "comparison": [compare(one, checkpoints[0]) for one in checkpoints[1:]],
    }
    report(arguments, results, format_results(results), partial(_draw_plot, results))


def _draw_plot(results: Mapping[str, Any], folder: Path) -> None:
    from .long_figure import draw  # slow to import

    draw(results, folder / PLOT)


def measure_checkpoint(name: str, arguments: EvaluateArguments) -> dict[str, Any]:
    """All measurements of one checkpoint, up to 8 times the trained length or what the model can read."""
    rope = parse_mapping("rope_parameters", arguments.rope_parameters)
    model, tokenizer = load_named(name, arguments, None if rope is None else partial(change_rope, rope))
    trained = arguments.max_length or context_length(model.config)
    if trained is None:
        raise UserError(f"{name} does not say how long the texts were that it was trained on; give --max_length")
    longest = longest_readable(model.config) or trained * MULTIPLES[-1]
    lengths = [trained * multiple for multiple in MULTIPLES if trained * multiple <= longest]
    if not lengths:
        raise UserError(f"{name} can read {longest} tokens and not {trained}; give a smaller --max_length")
    environment = describe_environment(model.device)  # now, because the checkout may have changed when scoring ends
    windows = longest_windows(tokenizer, lengths, arguments)
    if not windows:
        raise UserError(f"the text is shorter than {lengths[0]} tokens; give a longer one with --dataset")
    nats, tokens = score_windows(model, windows, own_start(tokenizer)), np.array(windows)
    ranges = loss_by_position(nats, trained)
    for one in ranges:
        # It tells what was read up to the end of the range in all windows.
        one["tokens_crc32"] = crc32(tokens[:, : one["to"] + 1].tobytes())
    return {
        "model": describe_model(model),
        "trained_length": trained,
        "rope_parameters": getattr(model.config, "rope_parameters", None),
        "position_scheme": getattr(model.config, "position_scheme", None),
        "by_position": ranges,
        "pass_key": find_keys(model, tokenizer, lengths, arguments.limit or PROMPTS, arguments.seed),
        **environment,
    }


def longest_windows(
    tokenizer: PreTrainedTokenizerBase, lengths: Sequence[int], arguments: EvaluateArguments
) -> list[list[int]]:
    """Windows of the greatest of these `lengths` that the text can fill; empty if the text is shorter than all."""
    documents = builtin_documents("validation")
    if arguments.dataset is not None:
        documents = read_documents(arguments.dataset, arguments.text_column).texts
    cuts = (cut_windows(tokenizer, documents, length, arguments.limit) for length in sorted(lengths, reverse=True))
    return next(filter(None, cuts), [])


def compare(one: Mapping[str, Any], first: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Losses by position minus the first checkpoint's, paired by window.

    Ranges of positions are left out up to whose end the two did not read the same tokens: texts are cut into windows of
    what a model can read, and tokenizers differ.
    """
    differences = []
    for ours, theirs in zip(one["by_position"], first["by_position"], strict=False):
        if all(ours[name] == theirs[name] for name in ("from", "to", "tokens_crc32")):
            difference = paired_difference(ours["windows"], theirs["windows"])
            del difference["values"]
            differences.append({"from": ours["from"], "to": ours["to"], **difference})
    return differences


def format_results(results: Mapping[str, Any]) -> str:
    """The results in Markdown: perplexity by position, differences from the first checkpoint, pass keys."""
    names = [describe(one) for one in results["checkpoints"]]
    parts = [_perplexities(results["checkpoints"], names), _note(results), _keys(results["checkpoints"], names)]
    for name, rows in zip(names[1:], results["comparison"], strict=True):
        head = ["positions", f"loss of {name} minus the first checkpoint's", "95 % interval"]
        lines = [
            [f"{row['from']:,} to {row['to']:,}", f"{row['mean']:+.4f}", interval_in_words(row, "+.4f")] for row in rows
        ]
        apart = f"{name} and the first checkpoint read different windows, so their losses are not compared."
        parts.append(table(head, lines) if lines else apart)
    return "\n\n".join(parts)


def _perplexities(checkpoints: Sequence[Mapping[str, Any]], names: Sequence[str]) -> str:
    columns = [
        {(line["from"], line["to"]): f"{line['perplexity']:.4g}" for line in one["by_position"]} for one in checkpoints
    ]
    return joined_table(["perplexity at positions", *names], columns, lambda low, high: [f"{low:,} to {high:,}"])


def _keys(checkpoints: Sequence[Mapping[str, Any]], names: Sequence[str]) -> str:
    columns = [
        {(cell["length"], cell["depth"]): f"{cell['exact']:.2f} ({cell['nats']:.2f})" for cell in one["pass_key"]}
        for one in checkpoints
    ]
    head = ["tokens", "depth of the key", *names]
    return joined_table(head, columns, lambda length, depth: [f"{length:,}", f"{depth:.0%}"])


def _note(results: Mapping[str, Any]) -> str:
    first = results["checkpoints"][0]
    return (
        f"Text: {Path(results['text']).name}, {len(first['by_position'][0]['windows'])} windows, each read whole. "
        f"Trained length of the first checkpoint: {first['trained_length']:,} tokens. Below: share of the pass keys "
        f"that are repeated, {first['pass_key'][0]['prompts']} for each cell, and in brackets nats per key (11.51 "
        "for a model that only knows that five digits come)."
    )


def change_rope(changes: Mapping[str, Any], config: PreTrainedConfig) -> dict[str, Any]:
    """The fields of a configuration with these rotary parameters, for every layer type that rotates by position.

    The base and the share of a head that is rotated stay as they were trained, unless `changes` names them.

    Raises:
        UserError: the model does not rotate by position.
    """
    rope: Any = getattr(config, "rope_parameters", None) or {}
    scheme = getattr(config, "position_scheme", "rope")
    by_layer_type = bool(rope) and all(isinstance(value, Mapping) for value in rope.values())
    schemes = scheme if isinstance(scheme, Mapping) else dict.fromkeys(rope, scheme)
    if "rope" not in schemes.values():
        raise UserError(
            f"rope_parameters={dict(changes)} changes how positions rotate queries and keys, but those of this "
            f"{config.model_type} (position_scheme={scheme!r}) rotate nothing; leave it out"
        )
    if not by_layer_type:
        return {"rope_parameters": {**_trained(rope), **changes}}
    scaled = {name: {**_trained(own), **changes} for name, own in rope.items() if schemes[name] == "rope"}
    return {"rope_parameters": {**rope, **scaled}}


def _trained(rope: Mapping[str, Any]) -> dict[str, Any]:
    """Of the parameters of one rotary embedding, those that every kind of scaling has."""
    return {name: rope[name] for name in ("rope_theta", "partial_rotary_factor") if rope.get(name) is not None}
