"""Cuts long texts into windows that a model can read, in which each token is predicted once."""

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel, PreTrainedTokenizerBase

from dynattn.modeling.caches.names import named_cache
from dynattn.modeling.positions.context_length import context_length

from ..common.errors import UserError
from ..common.special_tokens import start_token_id

# Positions whose log-probabilities are computed at once.
ROWS = 256


def check_context(model: PreTrainedModel, asked: int | None) -> None:
    """Raises UserError if `asked` tokens of context are more than the model has positions for."""
    limit = context_length(model.config)
    if asked is not None and limit is not None and asked > limit:
        raise UserError(
            f"max_length {asked} exceeds the model's context of {limit} tokens (max_position_embeddings); lower it"
        )


def encode_document(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """The start token and the tokens of a text.

    A `bos` that the tokenizer itself would add, as Llama's does, is left out: it would stand twice and be scored.
    """
    return [start_token_id(tokenizer), *tokenizer.encode(text, add_special_tokens=False, verbose=False)]


def windows(tokens: list[int], max_length: int, stride: int) -> Iterator[tuple[list[int], list[int]]]:
    """Yields the inputs of each window, and as targets the tokens that no earlier window has predicted.

    The last target follows the last input. From the second window on, a token is predicted from more than
    `max_length - stride` tokens, so a smaller stride takes longer and gives better scores.
    """
    done = 1
    while done < len(tokens):
        end = min(done + (max_length if done == 1 else stride), len(tokens))
        yield tokens[max(0, end - 1 - max_length) : end - 1], tokens[done:end]
        done = end


def segments(tokens: list[int], length: int) -> Iterator[tuple[list[int], list[int]]]:
    """Yields the inputs of each segment, and as targets the token after each input."""
    for begin in range(0, len(tokens) - 1, length):
        targets = tokens[begin + 1 : begin + 1 + length]
        yield tokens[begin : begin + len(targets)], targets


class Reading(NamedTuple):
    """What a model reads at once, and what it says of the tokens after it; see `predict`."""

    inputs: list[int]
    targets: list[int]
    predictions: list[int]
    log_probs: list[float]


def read(
    model: PreTrainedModel, tokens: list[int], *, max_length: int, stride: int, carry_memory: bool = False
) -> Iterator[Reading]:
    """Reads a text in `windows`, or with `carry_memory` in `segments`, along which the model's cache carries memory."""
    memory = named_cache(DynamicCache(config=model.config)) if carry_memory else {}
    parts = segments(tokens, max_length) if carry_memory else windows(tokens, max_length, stride)
    for inputs, targets in parts:
        yield Reading(inputs, targets, *predict(model, inputs, targets, **memory))


@torch.no_grad()
def predict(
    model: PreTrainedModel, inputs: list[int], targets: list[int], **options: Any
) -> tuple[list[int], list[float]]:
    """For each target the token that the model finds likeliest in its place, and the target's log-probability.

    The targets are the tokens after the last `len(targets)` of the inputs. `options` go to the model.
    """
    output = model(torch.tensor([inputs], device=model.device), **options)
    logits = output.logits[0, -len(targets) :]  # [T, V]
    truth: Tensor = torch.tensor(targets, device=logits.device)[:, None]
    # The logits of a long window are the largest tensor of all, so only a few rows at a time are copied to float32.
    parts = zip(logits.split(ROWS), truth.split(ROWS), strict=True)
    log_probs = torch.cat([rows.float().log_softmax(-1).gather(-1, right)[:, 0] for rows, right in parts])
    return logits.argmax(-1).tolist(), log_probs.tolist()
