"""The arguments of csrc/passes.c: fills the C struct `problem`, and compiles its stages."""

import functools
from array import array
from ctypes import CDLL, c_void_p, cast
from typing import NamedTuple

import torch
from torch import Tensor

from ...c_compiler import lanes
from ...masking import Structure, split_mask
from ...native_library import C_FLOATS, Signatures, load_or_warn
from .arguments import ChunkedInputs, ChunkedSettings, PackedStage, stages_of
from .csrc.sources import COMPOSE
from .distance_blocks import DistanceGrid

# The dtypes that C code reads, with their numbers in elements.h.
TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
# The most bytes that a function may put on the stack of a thread, for its stages or for the width of a head; what needs
# more runs in PyTorch.
LARGEST_STACK = 1 << 20
# The lowest float32 element of a mask that does not hide a key, approximately.
LOWEST_BIAS = torch.finfo(torch.float32).min * (1 - torch.finfo(torch.float32).eps)
# `BLOCK_KEYS` of stage.h, the larger `BLOCK_QUERIES` of compose.c, and `MAX_CHUNK` of chunk.h.
BLOCK_KEYS, BLOCK_QUERIES, MAX_CHUNK = 64, 4, 64
# The functions of compose.c, which only C code calls.
SIGNATURES: Signatures = {"compose": ((), None), "differentiate": ((), None)}


class StageShape(NamedTuple):
    """What compose.c is compiled for."""

    heads: int  # H
    groups: int
    query_terms: int
    key_terms: int

    @classmethod
    def of(cls, stage: PackedStage) -> "StageShape | None":
        """The shape of a stage; None without terms, where there is nothing to compile."""
        present = [terms for terms in (stage.query, stage.key) if terms is not None]
        if not present:
            return None
        counts = (0 if terms is None else terms.shape[2] for terms in (stage.query, stage.key))
        return cls(present[0].shape[3], stage.groups, *counts)

    @property
    def stack(self) -> int:
        """A bound on the bytes that `differentiate` puts on the stack: two sets of hidden maps (see compose.c)."""
        return torch.float32.itemsize * (self.query_terms + self.key_terms) * BLOCK_QUERIES * BLOCK_KEYS


@functools.cache
def load_stage(shape: StageShape) -> CDLL | None:
    """Returns compose.c, compiled for a stage; None where it cannot be compiled, or does not fit on the stack."""
    if shape.stack > LARGEST_STACK:
        return None
    macros = {"LANES": lanes(), "HEADS": shape.heads, "GROUPS": shape.groups}
    macros |= {"QUERY_RANK": shape.query_terms // 2, "QUERY_GATE": shape.query_terms % 2}
    macros |= {"KEY_RANK": shape.key_terms // 2, "KEY_GATE": shape.key_terms % 2}
    return load_or_warn(COMPOSE, tuple(macros.items()), SIGNATURES)


class Problem:
    """The C struct `problem`, and the tensors that it points to."""

    def __init__(
        self,
        inputs: ChunkedInputs,
        settings: ChunkedSettings,
        structure: Structure,
        chunk: int,
        grad_output: Tensor | None = None,
        mask_sums: Tensor | None = None,
    ) -> None:
        """Describes `inputs`.

        Args:
            structure: which keys each query sees by position, by the same inputs and settings.
            chunk: how many queries a chunk has.
            grad_output: `[B, T, H, D]`, for the backward pass.
            mask_sums: the gradient of the mask in its shape, float32, for the backward pass; None if not needed.
        """
        self._kept: list[Tensor | array[int]] = []
        items, heads, _, width = inputs.query.shape
        first_keys = None if inputs.first_keys is None else inputs.first_keys.to("cpu", torch.int64).contiguous()
        members: list[int] = []
        for tensor in (*inputs[:3], None if grad_output is None else grad_output.transpose(1, 2)):
            members += self._heads(tensor)
        for stage in stages_of(inputs, settings):
            members += self._stage(stage)
        members += (*self._mask(_as_bool_or_float32(inputs.mask)), *self._mask(mask_sums), self._address(first_keys))
        members += (items, heads, inputs.key.shape[1], width, structure.queries, structure.keys)
        members += (*band_of(structure), chunk, *self._tables(inputs, table_grid(structure)), settings.compose_bias)
        struct = array("l", members)
        self._kept.append(struct)
        self.address = struct.buffer_info()[0]

    def _tables(self, inputs: ChunkedInputs, grid: DistanceGrid) -> tuple[int, ...]:
        """The addresses of the tables by distance, their length, and the place of distance 0 in them."""
        tables = (inputs.position_bias, inputs.position_gain)
        addresses = (None if one is None else grid.spread(one, torch.float32).contiguous() for one in tables)
        return *map(self._address, addresses), grid.columns, grid.farthest

    def _address(self, tensor: Tensor | None) -> int:
        """The address of the data, or 0; keeps the tensor alive as long as this object."""
        if tensor is None:
            return 0
        self._kept.append(tensor)
        return tensor.data_ptr()

    def _heads(self, tensor: Tensor | None) -> tuple[int, ...]:
        """The members of the C struct `heads_tensor`, for `[B, H, T or S, D]`."""
        if tensor is None:
            return (0,) * 5
        if tensor.stride(3) != 1:
            tensor = tensor.contiguous()
        return self._address(tensor), TYPES[tensor.dtype], *tensor.stride()[:3]

    def _terms(self, terms: Tensor | None) -> tuple[int, ...]:
        """The members of the C struct `terms_tensor`, for `[B, T or S, terms, H]`."""
        if terms is None:
            return (0,) * 7
        return self._address(terms), TYPES[terms.dtype], *terms.stride(), terms.shape[2]

    def _stage(self, stage: PackedStage) -> list[int]:
        """The members of the C struct `stage` of problem.h."""
        members = [*self._terms(stage.query), *self._terms(stage.key)]
        matrix = None if stage.static is None else stage.static.float() + torch.eye(len(stage.static), **C_FLOATS)
        members += (self._matrix(None if matrix is None else matrix.t()), self._matrix(matrix))
        shape = StageShape.of(stage)
        library = None if shape is None else load_stage(shape)
        if library is None:
            return [*members, 0, 0]
        functions = (library.compose, library.differentiate)
        return members + [cast(function, c_void_p).value or 0 for function in functions]

    def _matrix(self, matrix: Tensor | None) -> int:
        """The address of `[H, H]`, padded to an even number of rows, as products.h takes rows in pairs."""
        if matrix is None:
            return 0
        padded = torch.nn.functional.pad(matrix, (0, 0, 0, len(matrix) % 2))
        return self._address(padded.contiguous())

    def _mask(self, mask: Tensor | None) -> tuple[int, ...]:
        """The members of the C struct `mask`, for four dimensions that broadcast to `[B, H, T, S]`."""
        if mask is None:
            return (0,) * 6
        strides = (0 if length == 1 else stride for length, stride in zip(mask.shape, mask.stride(), strict=True))
        return self._address(mask), mask.dtype == torch.bool, *strides


def _as_bool_or_float32(mask: Tensor | None) -> Tensor | None:
    """A mask of any dtype as C code reads it: boolean or float32.

    In float32, minus infinity and the lowest finite element hide a key. A float64 mask may have that element, or lower
    ones, where it hides nothing. These become `LOWEST_BIAS`, the lowest element that hides nothing in float32.
    """
    if mask is None or mask.dtype in (torch.bool, torch.float32):
        return mask
    visible, bias = split_mask(mask)
    assert visible is not None and bias is not None
    return torch.where(visible, bias.float().clamp(min=LOWEST_BIAS), -torch.inf)


def table_grid(structure: Structure) -> DistanceGrid:
    """The grid of a table `[H, 1, X]` as C code reads it: a single row, from which each query reads at another offset.

    It has an element for every pair of a tile, rows beyond the queries and keys beyond the last one included.
    """
    farthest = structure.first_query + structure.queries + MAX_CHUNK
    nearest = structure.first_query - -(-structure.keys // BLOCK_KEYS) * BLOCK_KEYS
    return DistanceGrid(1, farthest, farthest - nearest + 1)


def band_of(structure: Structure) -> tuple[int, int, int]:
    """Returns (offset, behind, ahead): query `t` sees the keys from `t + offset - behind` to `t + offset + ahead`."""
    offset = structure.first_query
    unbounded = structure.queries + structure.keys + abs(offset)  # farther than any key stands from any query
    side = unbounded if structure.sliding_window is None else min(structure.sliding_window - 1, unbounded)
    return offset, side, 0 if structure.is_causal else side
