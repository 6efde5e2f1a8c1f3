"""Memory of the type `segment`: the inputs of a model layer, as in Transformer-XL (arXiv 1901.02860).

The layer projects them to keys and values anew for every segment.
"""

import torch
from torch import Tensor
from transformers.cache_utils import DynamicLayer


class SegmentMemoryLayer(DynamicLayer):
    """Keeps the inputs of one model layer for the last `mem_len` tokens, as `keys` `[B, 1, M, E]` without `values`."""

    is_croppable = False

    def __init__(self, mem_len: int | None) -> None:
        super().__init__()
        self.mem_len = mem_len
        self.cumulative_length = 0

    def extend(self, hidden_states: Tensor) -> Tensor:
        """Puts the memory in front of a segment `[B, T, E]`, and keeps the last `mem_len` tokens of both as memory.

        Returns:
            `[B, M + T, E]`.
        """
        if not self.is_initialized:
            self.lazy_initialization(hidden_states[:, None], hidden_states[:, None, :, :0])
            self.keys = hidden_states[:, None, :0]
        whole = torch.cat([self.keys, hidden_states[:, None]], dim=2)  # type: ignore[list-item]
        kept = whole.shape[2] if self.mem_len is None else min(self.mem_len, whole.shape[2])
        self.keys = whole[:, :, whole.shape[2] - kept :].detach()
        self.values = self.keys[..., :0]
        self.cumulative_length += hidden_states.shape[1]
        return whole[:, 0]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Returns the length of memory and segment together, and the position of the oldest token in memory."""
        kept = self.cumulative_length if self.mem_len is None else min(self.mem_len, self.cumulative_length)
        return kept + query_length, self.cumulative_length - kept

    def get_seq_length(self) -> int:
        return self.cumulative_length

    def reset(self) -> None:
        self.is_initialized = False  # Transformers 5.17 itself would keep as many zeros
        super().reset()
        self.cumulative_length = 0

    def crop(self, tokens_to_remove: int) -> None:
        """Always raises RuntimeError: tokens that a later segment pushed out of the memory cannot be restored."""
        raise RuntimeError("segment memory cannot take tokens back; use memory_type='streaming'")
