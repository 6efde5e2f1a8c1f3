"""The passes of `dcmha_chunked` on a CPU, each in one call of C code.

Maps and sums are float32, whatever the dtype of the inputs. On processors that multiply bfloat16 elements, products of
bfloat16 inputs take these as they are, and round maps and their gradients to bfloat16. Results do not depend on the
number of threads.
"""

import functools
from array import array
from collections.abc import Iterator
from ctypes import CDLL, c_float, c_long, c_void_p
from functools import partial

import torch
from torch import Tensor

from ...c_compiler import lanes
from ...masking import Structure
from ...native_library import C_FLOATS, load_or_warn, usable_threads
from .arguments import TABLES, ChunkedInputs, ChunkedSettings, stages_of
from .composers.choice import compile_mode
from .csrc.sources import PASSES
from .distance_blocks import DistanceGrid
from .native_problem import BLOCK_KEYS, LARGEST_STACK, TYPES, Problem, StageShape, band_of, load_stage, table_grid

# How many queries a chunk has: the first of these numbers for which the maps of all threads stay within `LARGEST_MAPS`
# elements, or the last one. They are multiples of `GROUP_QUERIES` of chunk.h, so that the output does not depend on the
# choice. They are odd multiples, so that rows of different heads fall into different sets of the processor's caches.
CHUNK_QUERIES = (60, 36, 12)
LARGEST_MAPS = 1 << 23
# The functions of passes.c, with the types of their arguments and of their result.
SIGNATURES = {
    "forward_size": ((c_void_p, c_long), c_long),
    "forward": ((c_void_p, c_void_p, c_void_p, c_float, c_long), None),
    "backward_size": ((c_void_p, c_long), c_long),
    "backward": ((c_void_p, c_void_p, c_void_p, c_float, c_long), None),
}


def library_for(inputs: ChunkedInputs, settings: ChunkedSettings) -> CDLL | None:
    """passes.c, after compose.c has been compiled for both stages; None where C code does not serve these arguments."""
    if compile_mode() == "0" or not inputs.query.is_cpu:
        return None
    stages = stages_of(inputs, settings)
    tensors = [*inputs[:3], *(terms for stage in stages for terms in (stage.query, stage.key) if terms is not None)]
    if any(one.dtype not in TYPES for one in tensors):
        return None
    if torch.float32.itemsize * inputs.query.shape[-1] > LARGEST_STACK:
        return None
    shapes = [shape for stage in stages if (shape := StageShape.of(stage)) is not None]
    return load_passes() if all(load_stage(shape) is not None for shape in shapes) else None


def attend_in_c(library: CDLL, inputs: ChunkedInputs, settings: ChunkedSettings, structure: Structure) -> Tensor:
    """`passes.attend` by the library of `library_for`: returns `[B, T, H, D]`."""
    threads = usable_threads()
    batch, heads, queries, width = inputs.query.shape
    output = torch.empty(batch, queries, heads, width, **C_FLOATS)
    problem = Problem(inputs, settings, structure, _chunk_queries(structure, heads, threads))
    memory = torch.empty(library.forward_size(problem.address, threads), **C_FLOATS)
    library.forward(output.data_ptr(), memory.data_ptr(), problem.address, settings.scaling, threads)
    return output.to(inputs.query.dtype)


def attend_backward_in_c(
    library: CDLL,
    grad_output: Tensor,
    inputs: ChunkedInputs,
    settings: ChunkedSettings,
    structure: Structure,
    mask_needs_grad: bool,
) -> dict[str, Tensor]:
    """`passes.attend_backward` by the library of `library_for`.

    Args:
        grad_output: `[B, T, H, D]`.
    """
    # Blocks of keys may add to the same elements of the mask's gradient, so they must do that one after the other, and
    # always in the same order.
    threads = 1 if mask_needs_grad else usable_threads()
    sums = _Sums(inputs, settings, table_grid(structure), mask_needs_grad)
    chunk = _chunk_queries(structure, inputs.query.shape[1], 1)
    problem = Problem(inputs, settings, structure, chunk, grad_output, sums.mask)
    memory = torch.empty(library.backward_size(problem.address, threads), **C_FLOATS)
    addresses = array("l", [0 if one is None else one.data_ptr() for one in sums.members])
    library.backward(addresses.buffer_info()[0], memory.data_ptr(), problem.address, settings.scaling, threads)
    return dict(sums.results())


class _Sums:
    """The gradients that C code writes or adds to, in float32 and in the layouts of `gradients` in backward.h."""

    def __init__(
        self, inputs: ChunkedInputs, settings: ChunkedSettings, grid: DistanceGrid, mask_needs_grad: bool
    ) -> None:
        self.inputs, self.grid = inputs, grid
        empty, zeros = partial(torch.empty, **C_FLOATS), partial(torch.zeros, **C_FLOATS)
        batch, heads, _, width = inputs.query.shape
        kv_heads, keys = inputs.key.shape[1:3]
        blocks, padded = -(-keys // BLOCK_KEYS), -(-width // lanes()) * lanes()
        self.query = empty(inputs.query.shape)
        self.key, self.value = (zeros(batch, kv_heads, blocks * BLOCK_KEYS, padded) for _ in range(2))
        stages = stages_of(inputs, settings)
        self.query_terms = [None if one.query is None else empty(one.query.shape) for one in stages]
        self.key_terms = [
            None if one.key is None else zeros(batch, blocks, *one.key.shape[2:], BLOCK_KEYS) for one in stages
        ]
        self.matrices = [None if one.static is None else zeros(batch, blocks, heads, heads) for one in stages]
        self.mask = zeros(inputs.mask.shape) if inputs.mask is not None and mask_needs_grad else None
        self.tables = {
            name: None if getattr(inputs, name) is None else zeros(batch, heads, grid.columns) for name in TABLES
        }
        stage_sums = (*self.query_terms, *self.key_terms, *self.matrices)
        # The members of the struct `gradients` in backward.h.
        self.members = (self.query, self.key, self.value, *stage_sums, *self.tables.values())

    def results(self) -> Iterator[tuple[str, Tensor]]:
        """The gradients of the inputs by name and in their shapes."""
        keys, width = self.inputs.key.shape[2:]
        yield "query", self.query
        yield "key", self.key[..., :keys, :width]
        yield "value", self.value[..., :keys, :width]
        stage_sums = zip(("pre", "post"), self.query_terms, self.key_terms, self.matrices, strict=True)
        for name, query, key, matrix in stage_sums:
            if query is not None:
                yield f"{name}_query", query
            if key is not None:
                yield f"{name}_key", key.permute(0, 1, 4, 2, 3).flatten(1, 2)[:, :keys]
            if matrix is not None:
                yield f"{name}_static", matrix.sum((0, 1))
        if self.mask is not None:
            yield "mask", self.mask
        for name, sums in self.tables.items():
            if sums is not None:
                yield name, self.grid.gather(sums.sum(0)[:, None], getattr(self.inputs, name))


def _chunk_queries(structure: Structure, heads: int, threads: int) -> int:
    """How many queries a chunk has, if each of `threads` threads has the maps of one chunk in memory."""
    _, behind, ahead = band_of(structure)
    for queries in CHUNK_QUERIES:
        if threads * queries * heads * min(structure.keys, queries + behind + ahead) <= LARGEST_MAPS:
            return queries
    return CHUNK_QUERIES[-1]


@functools.cache
def load_passes(**macros: int) -> CDLL | None:
    """Returns passes.c, compiled with `LANES` and further `macros`; None where it cannot be compiled."""
    return load_or_warn(PASSES, (("LANES", lanes()), *macros.items()), SIGNATURES)
