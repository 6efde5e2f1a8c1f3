"""Several documents packed into one row of the batch: where each starts, from positions or from borders."""

import torch
from torch import Tensor


def document_starts(position_ids: Tensor) -> Tensor:
    """Index of the first token of each token's document, `[B, T]`.

    A document starts where a position of `position_ids` `[B, T]` is not its predecessor plus one.
    """
    indices = torch.arange(position_ids.shape[1], device=position_ids.device)
    continues = position_ids.diff(dim=1, prepend=position_ids[:, :1] - 1) == 1
    return torch.where(continues, 0, indices).cummax(dim=1).values


def document_positions(cu_seq_lens: Tensor, inputs_embeds: Tensor) -> Tensor:
    """Positions `[1, T]` that restart at each border of `cu_seq_lens` `[documents + 1]`, for embeddings `[1, T, E]`.

    Raises:
        ValueError: the batch has more than one row, or the borders do not go from 0 to its length.
    """
    batch, length = inputs_embeds.shape[:2]
    if batch != 1 or cu_seq_lens[0] != 0 or cu_seq_lens[-1] != length:
        raise ValueError(
            f"cu_seq_lens must go from 0 to the length of a single packed row; it goes from {int(cu_seq_lens[0])} to "
            f"{int(cu_seq_lens[-1])} for {batch} rows of {length} tokens"
        )
    positions = torch.arange(length, device=inputs_embeds.device)
    starts = cu_seq_lens.to(inputs_embeds.device)
    return (positions - starts[torch.searchsorted(starts, positions, right=True) - 1])[None]
