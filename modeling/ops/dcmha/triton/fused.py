"""A forward pass that keeps no maps (`kernels.fused`): one kernel for the log-sum-exp of all rows, one for the output.

It needs neither the buffers of chunks nor a launch for each of them, and serves calls in which the output of some
queries in all heads fits into registers. `DESIGN.md`, "Without maps", has the reasons.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from .arguments import TABLES, MapChunk, MapInputs, MapSettings, Mixing
from .devices import capability_of
from .matmuls import row_strides, with_contiguous_rows
from .matrices import filled_up, key_counts, make_mixing, padded_terms
from .tiling import whole_tiling
from .tuning import fused_tiles_for, fuses_forward
from .workspace import Workspace


def is_fused(inputs: MapInputs) -> bool:
    """Whether these kernels serve a forward pass whose heads the tensor cores compose.

    They do not if there are tables by distance, which would take more shared memory than a multiprocessor has.
    """
    if any(getattr(inputs, name) is not None for name in TABLES):
        return False
    batch, heads, queries, width = inputs.query.shape
    return fuses_forward(heads, width, batch * queries)


def attend_fused(inputs: MapInputs, settings: MapSettings) -> tuple[Tensor, Tensor]:
    """Returns the output `[B, T, H, D]` and the log-sum-exp of each row of composed scores, `[B, H, T]` in float32."""
    tiles = fused_tiles_for(capability_of(inputs.query.device))
    queries, keys, *_ = map(max, zip(*tiles.values(), strict=True))
    work = Workspace(inputs, settings, (), (queries, keys), whole_tiling)
    mixing = make_mixing(work, inputs, padded_terms(work, inputs))
    batch, heads, length, width = inputs.query.shape
    output = inputs.value.new_zeros(batch, length, heads, width)
    lse = torch.zeros(batch, heads, work.queries, dtype=torch.float32, device=work.device)
    query, key, value = map(with_contiguous_rows, (inputs.query, inputs.key, inputs.value))
    for chunk in work.chunks():
        *rows, own_lse = (part[chunk.items] for part in (query, key, value, output.transpose(1, 2), lse))
        own = Mixing(*(None if part is None else part[chunk.items] for part in mixing))
        _launch(work, "dcmha_fused_statistics", tiles, chunk, own, rows[:2], own_lse)
        _launch(work, "dcmha_fused_output", tiles, chunk, own, rows, own_lse)
    return output, lse[..., :length].contiguous()


def _launch(
    work: Workspace,
    name: str,
    tiles: dict[str, tuple[int, int, int, int]],
    chunk: MapChunk,
    mixing: Mixing,
    rows: Sequence[Tensor],
    lse: Tensor,
) -> None:
    """Launches a kernel on a chunk, with its `rows` `[items, H or H_kv, T or S, D]` and the arguments of both."""
    block_t, block_s, warps, stages = tiles[name]
    query, key, *_ = rows
    work.kernels[name][chunk.sizes.queries // block_t, chunk.counts[0]](
        *rows,
        lse,
        mixing,
        *map(row_strides, rows),
        chunk.sizes,
        chunk.where,
        work.scaling,
        heads=work.heads,
        share=work.heads // key.shape[1],
        width=query.shape[3],
        padded=filled_up(work.heads),
        block_t=block_t,
        block_s=block_s,
        key_counts=key_counts(mixing),
        num_warps=warps,
        num_stages=stages,
    )
