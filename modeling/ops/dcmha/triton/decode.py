"""`dcmha_triton` for a single query, a decoding step: the cache is read once, in place.

Keys are split over programs, each of which has all heads of its keys. Launches depend on shapes alone, so that a step
may be captured in a CUDA graph. `DESIGN.md`, "Decoding", has the reasons.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.flop_counter import flop_registry

from ...autocast import without_autocast
from ...custom_operators import NAMESPACE, are_operators_observed, count_operations
from ...distance_tables import DistanceTables
from ...masking import split_mask
from ..composition import Composition, from_list, list_tensors
from ..eager import attend_to_all
from .arguments import unspecialized
from .kernels.registry import load_kernels
from .matmuls import row_strides, with_contiguous_rows
from .tuning import blocks_of_decoding, channels_of_sums, loading_of_decoding, programs_of_decoding


class DecodeSide(NamedTuple):
    """One stage's factors of queries or of keys, and the strides that all of them share; heads are contiguous."""

    down: Tensor | None  # [B, 1 or S, R, H]
    up: Tensor | None  # [B, 1 or S, R, H]
    gate: Tensor | None  # [B, 1 or S, H]
    item_stride: int
    token_stride: int
    term_stride: int

    @property
    def rank(self) -> int:
        """The rank of the low-rank term, 0 without one."""
        return 0 if self.down is None else self.down.shape[2]


class DecodeStage(NamedTuple):
    """All terms of one stage."""

    query: DecodeSide
    key: DecodeSide
    static: Tensor | None  # [H, H], indexed [in, out]


class DecodeMask(NamedTuple):
    """A mask as visibility and bias; strides are those between items and between keys."""

    mask: Tensor | None  # [B, S], 8 bits
    mask_strides: tuple[int, ...]
    bias: Tensor | None  # [B, S]
    bias_strides: tuple[int, ...]
    first_keys: Tensor | None  # [B]


class DecodePages(NamedTuple):
    """The table of `Pages` as the kernels read it, on the device, for `B` requests."""

    table: Tensor  # integers
    bounds: Tensor  # [B, 2], integers: `table_starts` and `key_counts`


class DecodeTables(NamedTuple):
    """Tables by distance, for a query at `position`, by default at the last key of its item; None without a table.

    Only hidden keys are at distances beyond the rows of a table; they read the nearest row.
    """

    composed_bias: Tensor | None  # [L, H], added before the first composition
    bias: Tensor | None  # [L, H], added after it
    gain: Tensor | None  # [L, H]
    bias_rows: int | None  # L, `unspecialized`
    gain_rows: int | None  # L, `unspecialized`
    position: Tensor | None  # [], integer


class CacheSizes(NamedTuple):
    """The range of visible keys, divided into `splits`, one for each program, of `blocks` blocks each."""

    first: int  # the first key that counts, `unspecialized` for kernels
    keys: int  # the end of the range, S, `unspecialized` for kernels
    blocks: int
    splits: int


def decode(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    pre: Composition | None,
    post: Composition | None,
    scaling: float,
    mask: Tensor | None,
    first_keys: Tensor | None,
    sliding_window: int | None,
    tables: DistanceTables,
) -> Tensor:
    """Returns `[B, 1, H, D]` for a query `[B, H, 1, D]` at the last key, without gradients.

    Args:
        key, value: `[B, H_kv, S, D]`.
        pre, post: the composition of scores and of probabilities.
        scaling: factor of the scores.
        mask: boolean or additive, four dimensions that broadcast to `[B, 1, 1, S]`.
        first_keys: `[B, 1]` integers, the first key that each query sees.
        sliding_window: number of keys that the query sees.
        tables: a bias and a gain `[L, H]`, and the position of the query if it is not that of the last key. Keys that
            such a query does not see have to be hidden by the mask.
    """
    offset = tables.offset
    if offset is not None and not isinstance(offset, Tensor):
        offset = torch.full((), offset, device=query.device)
    elif offset is not None:
        offset = offset.to(query.device)
    groups = [1 if stage is None else stage.groups for stage in (pre, post)]
    if first_keys is not None:
        first_keys = first_keys.to(query.device)
    by_distance = tables.bias, tables.gain, offset
    settings: Any = (scaling, sliding_window, *groups, tables.compose_bias)
    # Tensors without content are on `meta` or of subclasses, and the operator has an implementation for them.
    has_content = type(query) is Tensor and not query.is_meta
    run = _decode if has_content and not are_operators_observed() else _decode_op
    factors = list_tensors(pre), list_tensors(post)
    return run(query, key, value, *factors, mask, first_keys, *by_distance, *settings)


def _decode(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    pre: list[Tensor | None],
    post: list[Tensor | None],
    mask: Tensor | None,
    first_keys: Tensor | None,
    position_bias: Tensor | None,
    position_gain: Tensor | None,
    offset: Tensor | None,
    scaling: float,
    sliding_window: int | None,
    pre_groups: int,
    post_groups: int,
    compose_bias: bool,
) -> Tensor:
    """`decode` with stages as `list_tensors` lists them; returns `[B, 1, H, D]`."""
    if not query.numel() or not key.numel():
        return query.new_zeros(query.transpose(1, 2).shape)
    with torch.no_grad(), without_autocast(query.device), torch.cuda.device_of(query):
        stages = decode_stage(pre), decode_stage(post)
        keys = key.shape[2]
        where = _mask(mask, first_keys, query.shape[0], keys)
        first = 0 if sliding_window is None else max(0, keys - sliding_window)
        tables = decode_tables(DistanceTables(position_bias, position_gain, offset, compose_bias))
        return launch(query, key, value, stages, (pre_groups, post_groups), where, None, tables, (first, keys), scaling)


_decode_op = torch.library.custom_op(f"{NAMESPACE}::dcmha_triton_decode", _decode, mutates_args=())


@_decode_op.register_fake
def _(query: Tensor, *_: object) -> Tensor:
    """An empty result `[B, 1, H, D]` for a query `[B, H, 1, D]`."""
    batch, heads, queries, width = query.shape
    return query.new_empty(batch, queries, heads, width)


def _decode_flops(*arguments: Any, out_val: Any = None) -> int:
    """Operations of `eager` for the arguments of `_decode`, without masks and tables."""
    *_, pre_groups, post_groups, _ = arguments

    def attend(query: Tensor, key: Tensor, value: Tensor, pre: list[Tensor], post: list[Tensor]) -> Tensor:
        return attend_to_all(query, key, value, from_list(pre, pre_groups), from_list(post, post_groups))

    return count_operations(attend, *arguments[:5])


flop_registry[getattr(torch.ops, NAMESPACE).dcmha_triton_decode] = _decode_flops


def launch(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    stages: tuple[DecodeStage, DecodeStage],
    groups: tuple[int, int],
    where: DecodeMask,
    pages: DecodePages | None,
    tables: DecodeTables,
    span: tuple[int, int],
    scaling: float,
) -> Tensor:
    """Launches the kernels for queries `[B, H, 1, D]`, and returns `[B, 1, H, D]`.

    Args:
        key, value: `[B, H_kv, S, D]`, or with `pages` their rows `[rows, H_kv, 1, D or more]`.
        span: the first visible key, and the end of the keys; over pages, the end of the longest request.
    """
    kernels = load_kernels(query.device)
    query, key, value = (with_contiguous_rows(rows) for rows in (query, key, value))
    (batch, heads, _, width), kv_heads, (first, keys) = query.shape, key.shape[1], span
    sides = tile_sides(heads, kv_heads, width)
    blocks = blocks_of_decoding(sides["block_h"], sides["block_d"] * key.itemsize, paged=pages is not None)
    sizes, block_s = plan(batch, first, keys, blocks)
    splits, sizes = sizes.splits, sizes._replace(first=unspecialized(first), keys=unspecialized(keys))
    common = {"heads": heads, "kv_heads": kv_heads, "width": width, "block_s": block_s, **sides}
    pre, post = (_constants(stage, count) | common for stage, count in zip(stages, groups, strict=True))
    scores, partial_lse, partial, output = _buffers(query, keys - first, splits)
    query_strides, key_strides, value_strides = map(row_strides, (query, key, value))
    kernels["dcmha_decode_scores"][batch, splits](
        query,
        key,
        scores,
        partial_lse,
        stages[0],
        where,
        pages,
        sizes,
        query_strides,
        key_strides,
        tables,
        scaling,
        **pre,
    )
    kernels["dcmha_decode_outputs"][batch, splits](
        scores, partial_lse, value, partial, stages[1], pages, sizes, value_strides, tables, **post
    )
    if splits > 1:
        block_d = min(sides["block_d"], channels_of_sums())
        kernels["dcmha_decode_sum"][batch, heads, -(-width // block_d)](
            partial, output, splits, heads, width, block_d, **loading_of_decoding()
        )
    return output


def _constants(stage: DecodeStage, groups: int) -> dict[str, int]:
    """The constants of a kernel that composes this stage."""
    ranks = {"query_rank": stage.query.rank, "key_rank": stage.key.rank}
    return {**ranks, "groups": groups, **loading_of_decoding()}


def _buffers(query: Tensor, keys: int, splits: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Allocates scores `[B, S, H]`, log-sum-exp `[B, splits, H]`, and partial and whole output.

    The partial output is `[B, splits, H, D]` in float32, or the output `[B, 1, H, D]` itself if there is one split.
    """
    batch, heads, _, width = query.shape
    scores = query.new_empty(batch, keys, heads, dtype=torch.float32)
    output = query.new_empty(batch, 1, heads, width)
    partial = output if splits == 1 else scores.new_empty(batch, splits, heads, width)
    return scores, scores.new_empty(batch, splits, heads), partial, output


def plan(batch: int, first: int, keys: int, blocks: tuple[int, ...]) -> tuple[CacheSizes, int]:
    """Returns how to divide the `keys - first` keys of each item, and how many keys a block has, one of `blocks`."""
    counts = {block: -(-(keys - first) // block) for block in blocks}
    programs = programs_of_decoding()
    block_s = next((block for block in blocks if batch * counts[block] >= programs), blocks[-1])
    of_split = -(-counts[block_s] // max(1, programs // batch))
    return CacheSizes(first, keys, of_split, splits=-(-counts[block_s] // of_split)), block_s


def tile_sides(heads: int, kv_heads: int, width: int) -> dict[str, int]:
    """Returns the sides of tiles by the name of their constant: powers of two and at least 16, as products need.

    They hold all heads, the heads that share a key head, and the channels.
    """
    counts = {"block_h": heads, "block_g": heads // kv_heads, "block_d": width}
    return {name: max(16, 1 << (count - 1).bit_length()) for name, count in counts.items()}


def decode_stage(tensors: list[Tensor | None]) -> DecodeStage:
    """The inverse of `list_tensors`: factors `[B, 1 or S, R, H]`, gates `[B, 1 or S, H]`, a static matrix `[H, H]`."""
    static = tensors[6]
    return DecodeStage(_side(*tensors[:3]), _side(*tensors[3:6]), None if static is None else static.contiguous())


def decode_tables(tables: DistanceTables) -> DecodeTables:
    """The tables `[L, H]` as the kernels read them, in place. An offset has to be a tensor."""
    bias, gain = (None if one is None else one.contiguous() for one in (tables.bias, tables.gain))
    bias_rows, gain_rows = (None if table is None else unspecialized(len(table)) for table in (bias, gain))
    position = None if bias is None and gain is None else tables.offset
    assert not isinstance(position, int)
    composed, after = (bias, None) if tables.compose_bias else (None, bias)
    return DecodeTables(composed, after, gain, bias_rows, gain_rows, position)


def _side(down: Tensor | None, up: Tensor | None, gate: Tensor | None) -> DecodeSide:
    """Uses `down`, `up` `[B, T, R, H]` and `gate` `[B, T, H]` in place if they share strides, as views of a cache do.

    Otherwise copies them into one tensor.
    """
    if down is None or up is None:
        if gate is None:
            return DecodeSide(None, None, None, 0, 0, 0)
        if gate.stride(2) != 1:
            gate = gate.clone(memory_format=torch.contiguous_format)
        return DecodeSide(None, None, gate, gate.stride(0), gate.stride(1), 0)
    item, token, term, head = strides = down.stride()
    if head == 1 and up.stride() == strides and (gate is None or gate.stride() == (item, token, head)):
        return DecodeSide(down, up, gate, item, token, term)
    # `cat` may keep the order of dimensions of its inputs, so that heads would still not be contiguous.
    joined = torch.cat([down, up, *(() if gate is None else (gate.unsqueeze(2),))], dim=2)
    down, up, *gates = joined.clone(memory_format=torch.contiguous_format).split(down.shape[2], dim=2)
    return _side(down, up, gates[0].squeeze(2) if gates else None)


def _mask(mask: Tensor | None, first_keys: Tensor | None, batch: int, keys: int) -> DecodeMask:
    """A mask that broadcasts to `[B, 1, 1, S]` and first keys `[B, 1]`, as views for the kernels."""
    visible, bias = (None if part is None else part.expand(batch, 1, 1, keys)[:, 0, 0] for part in split_mask(mask))
    visible = None if visible is None else visible.view(torch.uint8)
    strides = [(0, 0) if part is None else part.stride() for part in (visible, bias)]
    return DecodeMask(
        visible, strides[0], bias, strides[1], None if first_keys is None else first_keys[:, 0].contiguous()
    )
