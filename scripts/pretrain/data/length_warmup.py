"""Sequences that are cut shorter in the first updates of a run (sequence length warmup, arXiv 2108.06084).

A sequence is cut into pieces, none of which is dropped: an update has the same tokens and targets at any length.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from dynattn.modeling.ops.chunked_loss import IGNORED

from ...common.errors import UserError
from ..arguments import PretrainArguments

# Unless the arguments give it, the first length is `sequence_length` divided by this.
USUAL_PARTS = 8


@dataclass(frozen=True)
class LengthWarmup:
    """The length of sequences as a function of the update.

    Attributes:
        lengths: the lengths in ascending order; each is twice the one before, and the last is the whole sequence.
        steps: updates before the last length is reached.
    """

    lengths: tuple[int, ...]
    steps: int

    @classmethod
    def of(cls, arguments: PretrainArguments) -> "LengthWarmup":
        """What the arguments ask for.

        Raises:
            UserError: sequences cannot be cut into parts of the shortest length, or would stay whole.
        """
        whole = arguments.sequence_length
        if not arguments.length_warmup_steps:
            return cls((whole,), 0)
        shortest = arguments.shortest_length or max(2, whole // USUAL_PARTS)
        parts = whole // shortest
        if shortest < 2 or parts < 2 or shortest * parts != whole or parts & (parts - 1):
            raise UserError(
                f"shortest_length={shortest} must be sequence_length={whole} divided by 2, 4, 8 or another power of two"
            )
        return cls(
            tuple(shortest << doublings for doublings in range(parts.bit_length())), arguments.length_warmup_steps
        )

    def __call__(self, step: int) -> int:
        """The length in update `step`, counted from 0.

        It is the longest of `lengths` below a straight line that goes from the first to the last over `steps` updates.
        """
        if step >= self.steps:
            return self.lengths[-1]
        line = self.lengths[0] + (self.lengths[-1] - self.lengths[0]) * step / self.steps
        return max(length for length in self.lengths if length <= line)

    def cut(self, batch: dict[str, Tensor], step: int) -> dict[str, Tensor]:
        """A batch of tensors `[B, T]` as pieces `[B * T / t, t]` of the length `t` of update `step`.

        The target of a piece's last token is the first token of the next piece.
        """
        length = self(step)
        if batch["input_ids"].shape[1] == length:
            return batch
        shifted = batch.get("shift_labels", pad(batch["labels"][:, 1:], (0, 1), value=IGNORED))
        pieces = {name: tensor.reshape(-1, length) for name, tensor in {**batch, "shift_labels": shifted}.items()}
        if "position_ids" in pieces:
            # A document that began before the piece is counted from the piece's start.
            pieces["position_ids"] = torch.minimum(pieces["position_ids"], torch.arange(length))
        return pieces
