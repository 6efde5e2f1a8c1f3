"""Comparing a converted RCMHA model with the official formulas, over segments with memory."""

from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from dynattn import RCMHAConfig
from dynattn.modeling.caches.names import named_cache

from ...common.rounding import largest
from ..common.logits_check import compare
from ..common.model_loading import load_converted
from ..common.probe import FLOAT64_MAPS, affordable_tokens, longest_within_memory, random_ids
from .config import OfficialRCMHAConfig
from .reference import OfficialRCMHA

# Tokens of the longest segment after a full memory.
SEGMENT = 64


def verify_segments(
    folder: Path, dtype: torch.dtype, config: RCMHAConfig, official: OfficialRCMHA
) -> tuple[str, float | None]:
    """Compares our model in `folder`, run with memory by segments as the official code is, with the official logits.

    Args:
        folder: of our checkpoint.
        dtype: weights are rounded to it.
        config: ours.
        official: the formulas.

    Returns:
        The outcome in one line, and for a streaming model by how much its logits differ when its memory streams.

    Raises:
        UserError: it does not load or needs more memory than there is, or logits differ by more than rounding.
    """
    twin = by_segments(config)
    model = load_converted(folder, dtype, twin)
    parameters = model.num_parameters()
    segments = list(probe(official.config, twin.max_position_embeddings, parameters))
    observed = segment_logits(model, segments)
    del model
    exact, rounded = (official.logits(segments, precision) for precision in (torch.float64, torch.float32))
    outcome = compare(observed, exact, rounded, " in segments with memory")
    if twin is config:
        return outcome, None
    # Without position tables nothing bounds what a segment and its memory have together.
    reach = official.config.P if config.is_relative else official.config.mem_len + SEGMENT
    segments = list(probe(official.config, max(reach, twin.max_position_embeddings), parameters))
    effect = segment_logits(load_converted(folder, dtype), segments) - official.logits(segments, torch.float32)
    return outcome, largest(effect)


def by_segments(config: RCMHAConfig) -> RCMHAConfig:
    """The configuration with which a streaming model's weights compute what the official code computes."""
    if config.memory_type == "segment":
        return config
    rows = {"max_position_embeddings": config.num_relative_positions} if config.is_relative else {}
    return RCMHAConfig.from_dict({**config.to_dict(), "memory_type": "segment", **rows})


@torch.no_grad()
def segment_logits(model: PreTrainedModel, segments: Sequence[Tensor]) -> Tensor:
    """Logits `[sum of T, V]` of consecutive segments `[T]`."""
    memory = DynamicCache(config=model.config)
    return torch.cat([model(ids[None], use_cache=True, **named_cache(memory)).logits[0] for ids in segments])


def probe(config: OfficialRCMHAConfig, reach: int, parameters: int) -> Iterator[Tensor]:
    """Segments of random token ids `[T]`: on an empty, a half full and a full memory, shorter and longer than a kernel.

    Args:
        config: the official configuration.
        reach: most tokens that a segment and its memory may have together.
        parameters: of the model; a large one gets shorter segments, as do many heads.
    """
    wanted = (config.mem_len // 2 + 1, config.mem_len // 2 + 2, 1, 5, 2, SEGMENT)
    # A segment of half the memory sees up to twice as many keys as it has tokens.
    affordable = min(
        affordable_tokens(parameters, segments=len(wanted)), longest_within_memory(2 * FLOAT64_MAPS, config.heads)
    )
    generator, seen = torch.Generator().manual_seed(0), 0
    for length in wanted:
        room = reach - min(seen, config.mem_len)
        ids = random_ids(config.vocab, min(length, room, affordable), generator=generator)
        seen += len(ids)
        yield ids
