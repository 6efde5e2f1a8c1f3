"""Several documents packed into one row of the batch: finds where each starts, and keeps them apart in masks."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from ..ops.readable import is_readable


def starts_by_positions(position_ids: Tensor) -> Tensor:
    """Index of the first token of each token's document, `[B, T]`.

    A document starts where a position of `position_ids` `[B, T]` is not larger than the one before it. A position that
    is larger by more than one still belongs to the same document.
    """
    indices = torch.arange(position_ids.shape[1], device=position_ids.device)
    continues = position_ids.diff(dim=1, prepend=position_ids[:, :1]) > 0
    return torch.where(continues, 0, indices).cummax(dim=1).values


def packed_starts(position_ids: Tensor, shape: torch.Size) -> Tensor | None:
    """`starts_by_positions` for a batch of the `shape` `[B, T]`; None where every row is one document.

    Where values cannot be read, rows are taken to pack several documents.
    """
    starts = starts_by_positions(position_ids).expand(shape)
    return starts if not is_readable(starts) or bool(starts.any()) else None


def borders_of(arguments: Mapping[str, Any]) -> Tensor | None:
    """The borders `[documents + 1]` of packed documents among a model's keywords, `cu_seq_lens_q`; None without any.

    Queries and keys are the same tokens, so `cu_seq_lens_k` beside them says nothing more.

    Raises:
        ValueError: there are those of keys alone.
    """
    borders = arguments.get("cu_seq_lens_q")
    if borders is None and arguments.get("cu_seq_lens_k") is not None:
        raise ValueError("cu_seq_lens_k is given without cu_seq_lens_q, which is read; give both, or cu_seq_lens_q")
    return borders


def starts_by_borders(cu_seq_lens: Tensor, inputs_embeds: Tensor) -> Tensor:
    """Index of the first token of each token's document, `[1, T]`, from borders `[documents + 1]`.

    Raises:
        ValueError: the embeddings `[B, T, E]` have more than one row, or the borders do not rise from 0 to `T`.
    """
    if cu_seq_lens.ndim != 1 or len(cu_seq_lens) < 2:
        # Accelerate cuts all tensors of such a batch to as many entries as it has rows.
        raise ValueError(
            f"cu_seq_lens of shape {tuple(cu_seq_lens.shape)} must be [documents + 1], from 0 to the length of the "
            "row; with an IterableDataset the Trainer cuts cu_seq_lens to one border, unless TrainingArguments have "
            "accelerator_config={'dispatch_batches': False}"
        )
    batch, length = inputs_embeds.shape[:2]
    starts = cu_seq_lens.to(inputs_embeds.device)
    if batch != 1 or (is_readable(starts) and (starts[0] != 0 or starts[-1] != length or (starts.diff() < 0).any())):
        raise ValueError(
            f"cu_seq_lens must rise from 0 to the length of a single packed row; it goes from {int(starts[0])} to "
            f"{int(starts[-1])} for {batch} rows of {length} tokens"
        )
    indices = torch.arange(length, device=inputs_embeds.device)
    return starts[torch.searchsorted(starts, indices, right=True) - 1][None]


def not_before_document(starts: Tensor) -> Callable[..., Tensor]:
    """A mask function for Transformers: a query sees no key before the start of its document, in `starts` `[B, T]`.

    Later documents stay visible: they are for a causal mask to hide.
    """
    return lambda batch, head, query, key: key >= starts[batch, query]


def same_document(starts: Tensor) -> Callable[..., Tensor]:
    """A mask function for Transformers: tokens see each other if their documents have the same start (`[B, T]`)."""
    return lambda batch, head, query, key: starts[batch, query] == starts[batch, key]
