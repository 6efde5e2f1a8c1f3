"""Comparing a converted model with the official formulas on the official tensors."""

from pathlib import Path

import torch
from torch import Tensor

from ..common.comparison import AFFORDABLE_OPERATIONS, SHORTEST_PROBE, WITHOUT_WINDOW, Verification, compare, load_model
from .reference import OfficialModel


def verify_logits(folder: Path, dtype: torch.dtype, official: OfficialModel) -> Verification:
    """Loads our model in `folder` with weights rounded to `dtype`, and compares its logits with the official ones.

    Raises:
        UserError: it does not load or needs more memory than there is, or logits differ by more than rounding.
    """
    model = load_model(folder, dtype)
    ids = probe(official, sum(parameter.numel() for parameter in model.parameters()))
    with torch.no_grad():
        observed = model(ids[None]).logits[0]
    del model
    return compare(observed, official.logits(ids, torch.float64), official.logits(ids, torch.float32))


def probe(official: OfficialModel, parameters: int) -> Tensor:
    """Random token ids `[T]`, more than two windows long if the model allows and the time is bearable."""
    config = official.config
    has_local = "sliding_attention" in config.layer_types
    wanted = 2 * official.window + 8 if has_local and official.window else WITHOUT_WINDOW
    affordable = max(SHORTEST_PROBE, int(AFFORDABLE_OPERATIONS / (6 * parameters)))
    length = min(wanted, config.block_size, affordable)
    return torch.randint(config.vocab_size, (length,), generator=torch.Generator().manual_seed(0))
