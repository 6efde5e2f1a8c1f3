"""Long texts in windows that a model can read: each token is predicted once."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..common.errors import UserError

# Positions whose log-probabilities are worked out at once.
ROWS = 256


def first_token(tokenizer: PreTrainedTokenizerBase) -> int:
    """What stands before the first token of a text."""
    return tokenizer.eos_token_id if tokenizer.bos_token_id is None else tokenizer.bos_token_id


def check_context(model: PreTrainedModel, asked: int | None) -> None:
    """Raises UserError if so many tokens of context are more than the model reads."""
    limit = getattr(model.config, "max_position_embeddings", None)
    if asked is not None and limit is not None and asked > limit:
        raise UserError(f"max_length {asked} exceeds the model's max_position_embeddings, {limit}; lower --max_length")


def encode_document(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """The tokens of a text behind `first_token`.

    A tokenizer that itself puts its `bos` before every text, as Llama's does, adds nothing here: `bos` would stand
    twice, and the second would be scored.
    """
    return [first_token(tokenizer), *tokenizer.encode(text, add_special_tokens=False, verbose=False)]


def windows(tokens: list[int], max_length: int, stride: int) -> Iterator[tuple[list[int], list[int]]]:
    """Yields the inputs of a window and those targets, the tokens after its last inputs, that no earlier window had."""
    done = 1
    while done < len(tokens):
        end = min(done + (max_length if done == 1 else stride), len(tokens))
        yield tokens[max(0, end - 1 - max_length) : end - 1], tokens[done:end]
        done = end


def segments(tokens: list[int], length: int) -> Iterator[tuple[list[int], list[int]]]:
    """Yields the inputs of a segment and the tokens after each of them."""
    for begin in range(0, len(tokens) - 1, length):
        targets = tokens[begin + 1 : begin + 1 + length]
        yield tokens[begin : begin + len(targets)], targets


@torch.no_grad()
def predict(
    model: PreTrainedModel, inputs: list[int], targets: list[int], **options: Any
) -> tuple[list[int], list[float]]:
    """The likeliest token at the place of each target, and the target's log-probability."""
    output = model(torch.tensor([inputs], device=model.device), **options)
    logits = output.logits[0, -len(targets) :]  # [T, V]
    truth: Tensor = torch.tensor(targets, device=logits.device)[:, None]
    # Logits of a long window are the largest tensor there is. Only a few rows at a time are copied.
    parts = zip(logits.split(ROWS), truth.split(ROWS), strict=True)
    log_probs = torch.cat([rows.float().log_softmax(-1).gather(-1, right)[:, 0] for rows, right in parts])
    return logits.argmax(-1).tolist(), log_probs.tolist()
