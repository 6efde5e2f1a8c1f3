"""Checks of what a caller hands to a decoder: each error names the value, the limit and the fix."""

from typing import Any

from torch import Tensor
from transformers.cache_utils import Cache
from transformers.utils.import_utils import is_tracing


def check_tokens(input_ids: Tensor | None, inputs_embeds: Tensor | None) -> None:
    """Raises ValueError unless exactly one input is given, `[B, T]` ids or `[B, T, E]` embeddings, with T >= 1."""
    if (input_ids is None) == (inputs_embeds is None):
        raise ValueError("give exactly one of input_ids and inputs_embeds")
    given, name, dimensions = (
        (input_ids, "input_ids", 2) if input_ids is not None else (inputs_embeds, "inputs_embeds", 3)
    )
    if given.ndim != dimensions:  # type: ignore[union-attr]
        expected = "[batch, length]" if dimensions == 2 else "[batch, length, hidden_size]"
        raise ValueError(f"{name} must be {expected}, not of shape {tuple(given.shape)}")  # type: ignore[union-attr]
    if given.shape[1] == 0:  # type: ignore[union-attr]
        raise ValueError(f"{name} of shape {tuple(given.shape)} has no token; give at least one")  # type: ignore[union-attr]


def check_attention_mask(attention_mask: Any, inputs_embeds: Tensor, past_key_values: Cache | None) -> None:
    """Raises ValueError where a `[B, S]` mask does not fit the batch, or hides a whole row of it.

    Masks of four dimensions and prepared ones are the caller's own business. Values are looked at for prompts only, and
    never while tracing: reading them would stall a decoding loop.
    """
    if not isinstance(attention_mask, Tensor) or attention_mask.ndim == 4:
        return
    batch, length = inputs_embeds.shape[:2]
    if attention_mask.ndim != 2 or attention_mask.shape[0] != batch or attention_mask.shape[1] < length:
        raise ValueError(
            f"attention_mask of shape {tuple(attention_mask.shape)} does not fit {batch} rows of {length} tokens; "
            "give one value for each cached and new token"
        )
    if length == 1 or is_tracing(attention_mask):
        return
    hidden_rows = (~attention_mask.bool().any(dim=-1)).nonzero().flatten().tolist()
    if hidden_rows:
        raise ValueError(f"attention_mask hides every token of rows {hidden_rows}; drop those rows from the batch")


def check_labels(labels: Tensor, logits: Tensor) -> None:
    """Raises ValueError unless there is one label for each position of the logits."""
    if labels.shape != logits.shape[:-1]:
        raise ValueError(
            f"labels of shape {tuple(labels.shape)} do not fit logits of shape {tuple(logits.shape)}; "
            "give one label for each input token, and logits_to_keep=0"
        )
