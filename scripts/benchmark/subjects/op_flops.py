"""FLOPs of the benchmark's subjects, counted as `scripts.common.flops` counts those of a model.

A backward pass takes twice the FLOPs of the forward pass.
"""

from ...common.flops import stage_flops
from ..baselines.relative import CONVOLUTIONAL, KERNEL, RELATIVE
from ..harness.inputs import COMPOSED, GATES, POST, QUERY, RANK, STATIC
from ..harness.shapes import Shape, visible_pairs


def attention_flops(shape: Shape, pairs: int, function: str) -> float:
    """Forward FLOPs of attention over so many visible (query, key) pairs of each head."""
    return shape.heads * pairs * (4 * shape.width + 2 * composition_flops(function, shape.heads))


def composition_flops(function: str, heads: int) -> int:
    """FLOPs of one stage for one head of one pair; where only one stage composes, half of its FLOPs."""
    flops = {
        COMPOSED: stage_flops(sides=2, rank=RANK, gate=True, static_heads=0),
        STATIC: stage_flops(sides=0, rank=0, gate=False, static_heads=heads),
        POST: stage_flops(sides=1, rank=1, gate=False, static_heads=0) // 2,
        QUERY: stage_flops(sides=1, rank=RANK, gate=True, static_heads=0),
        GATES: stage_flops(sides=2, rank=0, gate=True, static_heads=0),
    }
    return flops.get(function, 0)


def relative_flops(shape: Shape, attention_type: str) -> float:
    """Forward FLOPs of an attention layer of the RCMHA family over one segment and its memory."""
    hidden, rows = shape.heads * shape.width, shape.memory + shape.length
    projections = 2 * hidden**2 * (2 * shape.length + 2 * rows)
    convolutions = 2 * KERNEL * hidden * (shape.length + 2 * rows) if attention_type in CONVOLUTIONAL else 0
    pairs = shape.heads * visible_pairs(shape.length, None, shape.memory)
    of_a_pair = (6 if attention_type in RELATIVE else 4) * shape.width
    return projections + convolutions + pairs * of_a_pair
