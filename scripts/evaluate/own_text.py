"""Scores checkpoints on texts of the user's: bits per byte of all text and of each document, and loss by position."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from dynattn.modeling.positions.context_length import context_length

from ..common.checkpoint_loading import NAN_LOGITS
from ..common.errors import UserError
from ..common.markdown import joined_table, table
from ..common.memory_limits import check_memory, longest_segment
from ..common.paired import add_holm, mean_in_words, p_in_words, paired_difference
from ..common.special_tokens import warn_of_unknown
from .arguments import EvaluateArguments
from .loading import load_named
from .result_files import check_output, report
from .results import describe_environment, describe_model
from .text_files import read_documents
from .windows import check_context, encode_document, read

WINDOW = 1024


@dataclass(frozen=True)
class Scores:
    """The scores of a model on documents.

    Attributes:
        nats: for each document, the negative log-probability of each token.
        depths: for each document, how many tokens each token was predicted from.
    """

    nats: Sequence[NDArray[np.float64]]
    depths: Sequence[NDArray[np.int64]]


def evaluate_text(arguments: EvaluateArguments) -> None:
    """Scores the checkpoints on the documents, prints the table, and writes the results if asked to.

    Raises:
        UserError: the documents or a checkpoint cannot be read, or a checkpoint does not have the context or the memory
            that the arguments ask for.
    """
    if arguments.output is not None:
        check_output(arguments.output, arguments.overwrite)
    found = read_documents(str(arguments.dataset), arguments.text_column)
    documents = found.texts[: arguments.limit]
    checkpoints = [_evaluate_checkpoint(name, arguments, documents) for name in [arguments.model, *arguments.others]]
    results: dict[str, Any] = {
        "dataset": Path(str(arguments.dataset)).name,
        "documents": len(documents),
        "bytes": sum(len(document.encode()) for document in documents),
        "rows": found.rows[: arguments.limit],
        "rows_without_text": found.without_text,
        "carry_memory": arguments.carry_memory,
        "checkpoints": checkpoints,
        "comparison": compare([one["bits_per_byte_of_documents"] for one in checkpoints]),
    }
    report(arguments, results, format_results(results))


def _evaluate_checkpoint(name: str, arguments: EvaluateArguments, documents: Sequence[str]) -> dict[str, Any]:
    model, tokenizer = load_named(name, arguments)
    check_context(model, arguments.max_length)
    length = arguments.max_length or context_length(model.config) or WINDOW
    if arguments.carry_memory:
        check_memory(model.config)
        length = min(length, longest_segment(model.config))
    environment = describe_environment(model.device)  # now, because the checkout may have changed when scoring ends
    scores = score_texts(model, tokenizer, documents, max_length=length, carry_memory=arguments.carry_memory)
    return {
        "model": describe_model(model),
        "max_length": length,
        **environment,
        **summarize(scores, [len(document.encode()) for document in documents]),
    }


def score_texts(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    documents: Sequence[str],
    *,
    max_length: int,
    carry_memory: bool = False,
) -> Scores:
    """Scores every token of the documents once, in windows of up to `max_length` tokens.

    Windows overlap by half, so that from a document's second window on a token is predicted from half a window at
    least. With `carry_memory` they do not overlap, and the model's cache carries its memory along.

    Raises:
        UserError: a document has no tokens, or the scores are NaN.
    """
    nats, depths = [], []
    for tokens in encode_documents(tokenizer, documents):
        stride = max(1, max_length // 2)
        scores: list[float] = []
        seen: list[int] = []
        for part in read(model, tokens, max_length=max_length, stride=stride, carry_memory=carry_memory):
            before = len(scores) if carry_memory else len(part.inputs) - len(part.targets)
            seen += range(before + 1, before + len(part.targets) + 1)
            scores += [-value for value in part.log_probs]
        nats.append(np.array(scores))
        depths.append(np.array(seen))
        if np.isnan(nats[-1]).any():
            raise UserError(NAN_LOGITS)
    return Scores(nats, depths)


def encode_documents(tokenizer: PreTrainedTokenizerBase, documents: Sequence[str]) -> list[list[int]]:
    """The start token and the tokens of each document; warns where some of them stand for whatever is unknown.

    Raises:
        UserError: the tokenizer finds nothing in a document, whose bits per byte would be zero.
    """
    encoded = [encode_document(tokenizer, document) for document in documents]
    for document, tokens in zip(documents, encoded, strict=True):
        if len(tokens) == 1:
            raise UserError(f"the tokenizer finds no tokens in the document {document[:40]!r}; remove it")
    warn_of_unknown(tokenizer, [token for tokens in encoded for token in tokens[1:]])
    return encoded


def summarize(scores: Scores, sizes: Sequence[int]) -> dict[str, Any]:
    """Bits per byte of all documents and of each, and the mean loss by position.

    Args:
        sizes: bytes of each document.
    """
    sums = np.array([nats.sum() for nats in scores.nats]) / math.log(2)
    nats, depths = np.concatenate(scores.nats), np.concatenate(scores.depths)
    bounds = [2**power for power in range(int(depths.max()).bit_length() + 1)]
    positions = []
    for low, high in pairwise(bounds):
        chosen = nats[(depths >= low) & (depths < high)]  # not empty: the deepest document has all depths
        positions.append({"from": low, "to": high - 1, "tokens": len(chosen), "loss": float(chosen.mean())})
    return {
        "tokens": len(nats),
        "bits_per_byte": float(sums.sum() / sum(sizes)),
        "loss": float(nats.mean()),
        "bits_per_byte_of_documents": (sums / np.array(sizes)).tolist(),
        "by_position": positions,
    }


def compare(bits: Sequence[Sequence[float]]) -> list[dict[str, Any]]:
    """Bits per byte of each document minus the first checkpoint's, with two-sided paired t-tests over documents."""
    tests = [paired_difference(one, bits[0]) for one in bits[1:]]
    for test in tests:
        del test["values"]
    add_holm(tests)
    return tests


def format_results(results: Mapping[str, Any]) -> str:
    """The results in Markdown: a row for each checkpoint, then the loss by position."""
    head = ["checkpoint", "parameters", "tokens", "context", "bits per byte", "loss per token"]
    head += ["difference, documents", "p"]
    rows = []
    for index, one in enumerate(results["checkpoints"]):
        difference = ["", ""]
        if index:
            compared = results["comparison"][index - 1]
            difference = [mean_in_words(compared, "+.4f"), p_in_words(compared["p_holm"])]
        sizes = [f"{number:,}" for number in (one["model"]["parameters"], one["tokens"], one["max_length"])]
        measured = [f"{one['bits_per_byte']:.4f}", f"{one['loss']:.4f}"]
        rows.append([str(one["model"]["path"]), *sizes, *measured, *difference])
    return "\n\n".join([table(head, rows), _note(results), _positions(results["checkpoints"])])


def _note(results: Mapping[str, Any]) -> str:
    memory = ", read in segments with memory carried from each to the next" if results["carry_memory"] else ""
    return (
        f"{results['documents']:,} documents of {results['bytes']:,} bytes in {results['dataset']}{memory}. "
        "Difference: mean over documents of bits per byte minus the first checkpoint's, 95 % interval, p of a "
        "two-sided paired t-test, corrected for the comparisons here (Holm). Context: the most tokens that one is "
        "predicted from, without memory; give --max_length where it differs. Loss in nats; tokens of different "
        "tokenizers do not compare, bits per byte do."
    )


def _positions(checkpoints: Sequence[Mapping[str, Any]]) -> str:
    """A table of the mean loss of tokens, by the number of tokens that they were predicted from."""
    columns = [
        {(line["from"], line["to"]): f"{line['loss']:.4f}" for line in one["by_position"]} for one in checkpoints
    ]
    head = ["predicted from", *(str(one["model"]["path"]) for one in checkpoints)]
    return joined_table(head, columns, lambda low, high: ["1 token" if high == 1 else f"{low:,} to {high:,} tokens"])
