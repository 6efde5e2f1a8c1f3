"""Comparing a converted model with the official formulas on the official tensors."""

from pathlib import Path

import torch
from torch import Tensor

from ..common.logits_check import compare
from ..common.model_loading import load_converted
from ..common.probe import FLOAT64_MAPS, PROBE_WITHOUT_WINDOW, affordable_tokens, longest_within_memory, random_ids
from .reference import OfficialModel


def verify_logits(folder: Path, dtype: torch.dtype, official: OfficialModel) -> str:
    """Loads our model in `folder` with weights rounded to `dtype`, and compares its logits with the official ones.

    Returns the outcome in one line.

    Raises:
        UserError: it does not load or needs more memory than there is, or logits differ by more than rounding.
    """
    model = load_converted(folder, dtype)
    ids = probe(official, model.num_parameters())
    with torch.no_grad():
        observed = model(ids[None]).logits[0]
    del model
    return compare(observed, official.logits(ids, torch.float64), official.logits(ids, torch.float32))


def probe(official: OfficialModel, parameters: int) -> Tensor:
    """Random token ids `[T]`, more than two windows long if the model allows, and time and memory are bearable."""
    config = official.config
    has_local = "sliding_attention" in config.layer_types
    wanted = 2 * official.window + 8 if has_local and official.window else PROBE_WITHOUT_WINDOW
    bearable = min(affordable_tokens(parameters), longest_within_memory(FLOAT64_MAPS, config.n_head))
    return random_ids(config.vocab_size, min(wanted, config.block_size, bearable))
