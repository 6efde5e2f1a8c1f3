"""Makes one vector of the tokens of a text or an image, for a classifier."""

from typing import Any

import torch
from torch import Tensor

from ..ops.dtypes import at_least_float32
from .input_checks import tells_padding


def first_token(hidden_states: Tensor, attention_mask: Any) -> Tensor:
    """The hidden state `[B, E]` of each row's first token, from hidden states `[B, T, E]`.

    A mask `[B, T]` says where padding ends, which may stand on the left. Other masks do not tell padding from tokens.
    """
    if not tells_padding(attention_mask):
        return hidden_states[:, 0]
    first = attention_mask.bool().int().argmax(dim=1)
    return hidden_states[torch.arange(first.shape[0], device=first.device), first]


def mean_of_tokens(hidden_states: Tensor, attention_mask: Any, prefix: int = 0) -> Tensor:
    """The mean `[B, E]` over the tokens that a mask `[B, T]` shows, or all without one, of hidden states `[B, T, E]`.

    Args:
        prefix: number of tokens at the start that do not count.

    Raises:
        ValueError: the mask has an entry for each pair of tokens, and so does not tell padding from tokens.
    """
    hidden_states = hidden_states[:, prefix:]
    if attention_mask is None:
        return hidden_states.mean(dim=1)
    if not tells_padding(attention_mask):
        raise ValueError(
            "classifier_pooling by the mean needs a mask [B, T] to know the real tokens; give one, or use 'cls'"
        )
    shown = attention_mask[:, prefix:, None].bool()
    # In at least float32, because a sum over thousands of tokens overflows float16.
    wide = hidden_states.to(at_least_float32(hidden_states.dtype))
    # The mean over no token is zero, and not NaN, which would spoil the gradients of the whole batch.
    count = shown.sum(dim=1).clamp(min=1)
    return (wide.masked_fill(~shown, 0).sum(dim=1) / count).to(hidden_states.dtype)
