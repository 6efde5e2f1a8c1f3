"""Measures a model on texts longer than its training sequences: loss by position, and retrieval of a pass key."""

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from operator import eq
from typing import Any

import numpy as np
from numpy.typing import NDArray
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..common.checkpoint_loading import NAN_LOGITS
from ..common.errors import UserError
from ..common.special_tokens import start_token_id
from .windows import encode_document, predict

# Lengths of texts as multiples of the trained length.
MULTIPLES = (1, 2, 4, 8)
# Places of the key, as a fraction of the filler text.
DEPTHS = (0.0, 0.25, 0.5, 0.75, 1.0)
DIGITS = 5
# After the task of Mohtashami and Jaggi (arXiv 2305.16300).
OPENING = "Find the pass key. "
FILLER = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again. "
NEEDLE = "The pass key is {key}. "
QUESTION = "The pass key is "


@dataclass(frozen=True)
class Prompt:
    """A text with a key in it that ends with the question for the key, and the answer, both as tokens.

    The tokens of the answer are those that the key has in the text.
    """

    tokens: list[int]
    answer: list[int]


def make_prompt(tokenizer: PreTrainedTokenizerBase, key: str, length: int, depth: float) -> Prompt:
    """A prompt that has, with its answer, `length` tokens; the fraction `depth` of its filler stands before the key.

    Raises:
        UserError: `length` has no room for the key and the question.
    """
    pieces = (OPENING, NEEDLE.format(key=key), QUESTION, QUESTION + key, FILLER)
    opening, needle, question, said, filler = (tokenizer.encode(piece, add_special_tokens=False) for piece in pieces)
    # Some tokenizers join the space before a key to its first digits, and the answer begins with what they join.
    shared = sum(takewhile(bool, map(eq, question, said)))
    question, answer = said[:shared], said[shared:]
    room = length - 1 - sum(map(len, (opening, needle, said)))
    if room < 0:
        raise UserError(f"a pass key needs {length - room} tokens, and max_length is {length}; give a longer one")
    before = round(depth * room)
    endless = filler * (room // len(filler) + 1)
    tokens = [start_token_id(tokenizer), *opening, *endless[:before], *needle, *endless[: room - before], *question]
    return Prompt(tokens, answer)


def find_keys(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, lengths: Sequence[int], prompts: int, seed: int
) -> list[dict[str, Any]]:
    """How well the model repeats the key, for each length and depth.

    Returns:
        A mapping for each: `exact`, the share of keys whose tokens are all the likeliest ones, so that greedy decoding
        would give the key; and `nats`, the mean negative log-probability of a key. A model that only knows that digits
        follow has `DIGITS * log(10)`.
    """
    cells = []
    for length in lengths:
        for depth in DEPTHS:
            # Keys depend only on seed, length and depth, so all checkpoints and all runs have the same ones.
            keys = random.Random(f"{seed} {length} {depth}")
            found = [
                _ask(model, make_prompt(tokenizer, f"{keys.randrange(10**DIGITS):0{DIGITS}d}", length, depth))
                for _ in range(prompts)
            ]
            exact, nats = (float(np.mean(values)) for values in zip(*found, strict=True))
            cells.append({"length": length, "depth": depth, "prompts": prompts, "exact": exact, "nats": nats})
    return cells


def _ask(model: PreTrainedModel, prompt: Prompt) -> tuple[bool, float]:
    """Whether the likeliest tokens are the answer, and the negative log-probability of the answer."""
    inputs = prompt.tokens + prompt.answer[:-1]
    likeliest, log_probs = predict(model, inputs, prompt.answer, logits_to_keep=len(prompt.answer))
    return likeliest == prompt.answer, -sum(log_probs)


def cut_windows(
    tokenizer: PreTrainedTokenizerBase, documents: Sequence[str], length: int, most: int | None
) -> list[list[int]]:
    """Cuts all documents, end to end, into up to `most` windows of `length + 1` tokens that overlap by one.

    Documents end and start as in training, with one token for both if the tokenizer has no other.
    """
    own = own_start(tokenizer)
    end = [] if own is None else [tokenizer.eos_token_id]
    tokens = [token for text in documents for token in (*encode_document(tokenizer, text), *end)]
    count = (len(tokens) - 1) // length
    return [tokens[index * length : (index + 1) * length + 1] for index in range(min(count, most or count))]


def own_start(tokenizer: PreTrainedTokenizerBase) -> int | None:
    """The token that starts documents, if another one ends them; no model learns to predict it."""
    start, end = start_token_id(tokenizer), tokenizer.eos_token_id
    return None if end in (start, None) else start


def score_windows(
    model: PreTrainedModel, windows: Sequence[Sequence[int]], unscored: int | None = None
) -> NDArray[np.float64]:
    """The negative log-probability of each token `[windows, length]`, given all tokens of its window before it.

    Args:
        unscored: a token that has NaN for a score.

    Raises:
        UserError: the scores of other tokens are NaN.
    """
    tokens = np.array(windows)
    nats = np.array([predict(model, row[:-1], row[1:])[1] for row in tokens.tolist()])
    if np.isnan(nats).any():
        raise UserError(NAN_LOGITS)
    return np.where(tokens[:, 1:] == unscored, np.nan, -nats)


def loss_by_position(nats: NDArray[np.float64], trained: int) -> list[dict[str, Any]]:
    """Losses of `nats` `[windows, length]` in ranges of positions that end at multiples of the trained length.

    Means are over what was scored, which is not NaN.

    Returns:
        A mapping for each: positions `from` and `to`, counted from 1, `loss`, `perplexity`, and `windows`, the mean
        loss of each.
    """
    ends = [trained * multiple for multiple in MULTIPLES if trained * multiple <= nats.shape[1]]
    ranges = []
    for low, high in zip([0, *ends], ends, strict=False):
        windows = np.nanmean(nats[:, low:high], axis=1)
        loss = float(windows.mean())
        ranges.append({
            "from": low + 1, "to": high, "loss": loss, "perplexity": float(np.exp(min(loss, 700.0))),
            "windows": windows.tolist(),
        })  # fmt: skip
    return ranges


def describe(checkpoint: Mapping[str, Any]) -> str:
    """The name of a checkpoint, with the rotary variant if it is not the default one."""
    rope = checkpoint["rope_parameters"] or {}
    kind = rope.get("rope_type", "by layer type" if rope else "default")
    return str(checkpoint["model"]["path"]) + ("" if kind == "default" else f" ({kind})")
