"""What a model makes of texts longer than those it was trained on: loss by position, and a pass key found again."""

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..common.errors import UserError
from .windows import encode_document, first_token, predict

# Lengths as multiples of the trained one.
MULTIPLES = (1, 2, 4, 8)
# Where the key stands, as a part of the text before the question.
DEPTHS = (0.0, 0.25, 0.5, 0.75, 1.0)
DIGITS = 5
# After the task of Mohtashami and Jaggi (arXiv 2305.16300).
OPENING = "Find the pass key. "
FILLER = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again. "
NEEDLE = "The pass key is {key}. "
QUESTION = "The pass key is "


@dataclass(frozen=True)
class Prompt:
    """A text with a key in it that ends where the key is to be said again, and the key, as tokens."""

    tokens: list[int]
    answer: list[int]


def make_prompt(tokenizer: PreTrainedTokenizerBase, key: str, length: int, depth: float) -> Prompt:
    """A prompt that has, with its answer, `length` tokens; filler stands before and behind the key.

    Raises:
        UserError: `length` has no room for the key and the question.
    """
    pieces = (OPENING, NEEDLE.format(key=key), QUESTION, key, FILLER)
    opening, needle, question, answer, filler = (tokenizer.encode(piece, add_special_tokens=False) for piece in pieces)
    room = length - 1 - sum(map(len, (opening, needle, question, answer)))
    if room < 0:
        raise UserError(f"a pass key needs {length - room} tokens, and max_length is {length}; give a longer one")
    before = round(depth * room)
    endless = filler * (room // len(filler) + 1)
    tokens = [first_token(tokenizer), *opening, *endless[:before], *needle, *endless[: room - before], *question]
    return Prompt(tokens, answer)


def find_keys(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, lengths: Sequence[int], prompts: int, seed: int
) -> list[dict[str, Any]]:
    """How often the model says the key again, for each length and depth.

    Returns:
        A mapping for each: `exact`, the part of keys whose tokens are all the likeliest ones, which greedy decoding
        would say; and `nats`, minus the mean log-probability of a key. A model that only knows that digits come has
        `DIGITS * log(10)`.
    """
    cells = []
    for length in lengths:
        for depth in DEPTHS:
            # Keys depend on the cell alone, so that checkpoints and lengths of other runs have the same ones.
            keys = random.Random(f"{seed} {length} {depth}")
            found = [
                _ask(model, make_prompt(tokenizer, f"{keys.randrange(10**DIGITS):0{DIGITS}d}", length, depth))
                for _ in range(prompts)
            ]
            exact, nats = (float(np.mean(values)) for values in zip(*found, strict=True))
            cells.append({"length": length, "depth": depth, "prompts": prompts, "exact": exact, "nats": nats})
    return cells


def _ask(model: PreTrainedModel, prompt: Prompt) -> tuple[bool, float]:
    """Whether the likeliest tokens are the answer, and minus the answer's log-probability."""
    inputs = prompt.tokens + prompt.answer[:-1]
    likeliest, log_probs = predict(model, inputs, prompt.answer, logits_to_keep=len(prompt.answer))
    return likeliest == prompt.answer, -sum(log_probs)


def cut_windows(
    tokenizer: PreTrainedTokenizerBase, documents: Sequence[str], length: int, most: int | None
) -> list[list[int]]:
    """Up to `most` windows of `length` tokens and one more, side by side, of all documents end to end."""
    tokens = [token for text in documents for token in encode_document(tokenizer, text)]
    count = (len(tokens) - 1) // length
    return [tokens[index * length : (index + 1) * length + 1] for index in range(min(count, most or count))]


def score_windows(model: PreTrainedModel, windows: Sequence[Sequence[int]]) -> NDArray[np.float64]:
    """Minus the log-probability of each token, `[windows, length]`, all of its window before it.

    Raises:
        UserError: the scores are NaN.
    """
    nats = np.array([predict(model, list(tokens[:-1]), list(tokens[1:]))[1] for tokens in windows])
    if np.isnan(nats).any():
        raise UserError("the model's logits are NaN: its weights are damaged, or overflow in this dtype (--dtype)")
    return -nats


def loss_by_position(nats: NDArray[np.float64], trained: int) -> list[dict[str, Any]]:
    """Losses of `nats` `[windows, length]` in ranges of positions that end at multiples of the trained length.

    Returns:
        A mapping for each: positions `from` and `to`, counted from 1, `loss`, `perplexity`, and `windows`, the mean
        loss of each.
    """
    ends = [trained * multiple for multiple in MULTIPLES if trained * multiple <= nats.shape[1]]
    ranges = []
    for low, high in zip([0, *ends], ends, strict=False):
        windows = nats[:, low:high].mean(1)
        loss = float(windows.mean())
        ranges.append({
            "from": low + 1, "to": high, "loss": loss, "perplexity": float(np.exp(min(loss, 700.0))),
            "windows": windows.tolist(),
        })  # fmt: skip
    return ranges


def longest_readable(model: PreTrainedModel) -> int | None:
    """The tokens that a model can read at most; None where nothing but memory limits them."""
    config: Any = model.config
    scheme = getattr(config, "position_scheme", None)
    unlimited = scheme != "learned" if scheme is not None else getattr(config, "rope_parameters", None) is not None
    has_table = not unlimited or getattr(config, "is_relative", False)
    return getattr(config, "max_position_embeddings", None) if has_table else None


def describe(checkpoint: Mapping[str, Any]) -> str:
    """The name of a checkpoint, with the rotary variant if it is not the default one."""
    rope = checkpoint["rope_parameters"] or {}
    kind = rope.get("rope_type", "by layer type" if rope else "default")
    return str(checkpoint["model"]["path"]) + ("" if kind == "default" else f" ({kind})")
