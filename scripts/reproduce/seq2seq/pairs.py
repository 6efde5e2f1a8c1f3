"""Pairs of source and target as tokens, and batches of them."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from dynattn.modeling.ops.chunked_loss import IGNORED

PAD, EOS, FIRST_TOKEN = 0, 1, 2


class Batch(NamedTuple):
    """Padded pairs, as models take them."""

    input_ids: Tensor  # [B, S]
    attention_mask: Tensor  # [B, S]
    labels: Tensor  # [B, T], IGNORED where padded


def make_batch(sources: Sequence[Sequence[int]], targets: Sequence[Sequence[int]]) -> Batch:
    """Pads sources and targets, whose ends are marked, on the right."""
    input_ids, labels = (
        pad_sequence([torch.tensor([*row, EOS]) for row in rows], batch_first=True, padding_value=value)
        for rows, value in ((sources, PAD), (targets, IGNORED))
    )
    return Batch(input_ids, (input_ids != PAD).long(), labels)
