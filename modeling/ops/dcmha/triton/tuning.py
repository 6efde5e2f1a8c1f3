"""How `dcmha_triton` cuts its work and which kernels do it: constants of a GPU, and what follows from them.

`dynattn benchmark --preset gpu` tries others and tells which are fastest. All of these were chosen on paper: from bytes
moved, and from instructions and registers of kernels compiled for sm_90. Other modules ask the functions, so that they
see what a tuner sets.
"""

import torch

# Queries of a chunk, at least: more make better matrix products, fewer waste less on the triangle of hidden keys.
ROWS = 128
# Items of the batch share a chunk, and where all of them do it has more queries, while a map has no more elements than
# this: 128 MiB in half precision. Python and PyTorch need about 100 us to launch a chunk forward and 200 us backward,
# in which memory of 4.3 TB/s moves the 10 and 24 bytes per element of 40 million; under a causal mask the average chunk
# has half of what the largest has. Smaller maps would stay in the device's cache, at most 1.3 times as fast, and leave
# it waiting.
LARGEST_MAP = 1 << 26
# A causal window is cut into blocks of a quarter as many queries as it has keys, but of at least this many: maps have
# (c + W) / W entries for each pair that is visible, 1.25, and products need tiles of 64 queries.
BLOCK = 64
# Queries and keys of a tile in the matrix products of a window, and warps of a program; in float32, which has no tensor
# cores, registers leave room for a quarter.
WINDOW_TILE = (64, 64, 4)
WINDOW_TILE_OF_FLOAT32 = (32, 32, 4)

# Heads of an item from here to there compose on the tensor cores, in half precision. Their number is filled up to 16 or
# 32, which costs these kernels as much as real heads: for each real one of 11 they need as many instructions forward as
# those that go through the heads, and of 19 or 20 as many forward and backward together. For more than 32, patches of
# all heads do not fit a multiprocessor.
FEWEST_HEADS, MOST_HEADS = 11, 32

# Queries and keys of a program's patch, and its warps, in the kernels that go through the heads: 16 entries a thread,
# whose hidden maps (8 at rank 2) take half of the registers that it can have. With 8 entries the kernels need 1.10,
# 1.12, 1.30 and 1.31 times the instructions, as what is loaded for a key or a query serves fewer of them, and registers
# leave room for no more entries on a multiprocessor: two programs of 16 (three of `dcmha_statistics`), or three to five
# of 8.
# The shape matters little (95 to 103 instructions in `dcmha_backward_post` from 32 x 32 to 8 x 256), so that it is one
# with little traffic of factors and partial sums. More than 5 rows on a side (rank 2 and a gate), or a static matrix in
# float32, leave registers for 8 entries.
TILES = dict.fromkeys(("dcmha_statistics", "dcmha_probs", "dcmha_backward_post", "dcmha_backward_pre"), (32, 64, 4))
TILES_OF_MANY_TERMS = dict.fromkeys(TILES, (16, 64, 4))
# The same in the kernels that hold all heads, and stages of loading. Products need 8 queries and keys forward, 16 of
# both backward. Forward there is room for two programs on a multiprocessor or more, backward for one, which with 16
# heads loads for its next turn while it computes, and spills 48 bytes of a thread and more for that. With 32 heads the
# gradients of 16 keys' matrices take a quarter of a thread's registers, and it spills 300 bytes and more without.
MATRIX_TILES_16 = {
    "dcmha_matrix_statistics": (8, 32, 4, 1),
    "dcmha_matrix_probs": (8, 32, 4, 1),
    "dcmha_matrix_backward_post": (16, 32, 8, 2),
    "dcmha_matrix_backward_pre": (16, 32, 8, 2),
}
MATRIX_TILES_32 = {
    "dcmha_matrix_statistics": (8, 32, 8, 1),
    "dcmha_matrix_probs": (8, 16, 4, 1),
    "dcmha_matrix_backward_post": (16, 16, 8, 1),
    "dcmha_matrix_backward_pre": (16, 16, 8, 1),
}
# Blocks of queries that a program goes through, at most: a power of two.
TURNS = 8
# Queries of a program of `dcmha_merge`, and its warps.
MERGED = (32, 4)
# Positions of a program that makes matrices, and its warps.
MATRICES = (8, 4)


def fewest_rows() -> int:
    """Returns how many queries a chunk has at least."""
    return ROWS


def fits_in_a_chunk(elements: int) -> bool:
    """Whether a chunk may have maps of so many elements."""
    return elements <= LARGEST_MAP


def items_of_a_chunk(elements: int) -> int:
    """Returns how many items of so many elements share a chunk."""
    return LARGEST_MAP // max(1, elements)


def block_of(window: int) -> int:
    """Returns how many queries of a causal window are a block."""
    return max(BLOCK, window // 4)


def blocks_of_a_chunk(elements: int) -> int:
    """Returns how many blocks of a window share a chunk, if each has so many elements in all maps of a row."""
    return max(1, LARGEST_MAP // max(1, elements))


def tile_of_window(dtype: torch.dtype) -> tuple[int, int, int]:
    """Returns the queries and keys of a tile of a window's matrix products, and the warps of a program."""
    return WINDOW_TILE_OF_FLOAT32 if dtype == torch.float32 else WINDOW_TILE


def composes_on_tensor_cores(heads: int, dtype: torch.dtype) -> bool:
    """Whether kernels of the tensor cores compose these heads of an item."""
    return dtype != torch.float32 and FEWEST_HEADS <= heads <= MOST_HEADS


def tiles_for(terms: tuple[int, ...], *, wide_static: bool) -> dict[str, tuple[int, int, int]]:
    """Returns the patch and the warps of each kernel that goes through the heads.

    Args:
        terms: the number of terms on each side of each stage.
        wide_static: whether a static matrix adds tiles of float32 to those that a thread holds.
    """
    return TILES_OF_MANY_TERMS if max(terms) > 5 or wide_static else TILES


def matrix_tiles_for(padded: int) -> dict[str, tuple[int, int, int, int]]:
    """Returns the patch, the warps and the stages of each kernel that holds all heads, `padded` of them."""
    return MATRIX_TILES_16 if padded == 16 else MATRIX_TILES_32


def most_turns() -> int:
    """Returns how many blocks of queries a program goes through at most."""
    return TURNS


def tile_of_merge() -> tuple[int, int]:
    """Returns the queries of a program of `dcmha_merge`, and its warps."""
    return MERGED


def tile_of_matrices() -> tuple[int, int]:
    """Returns the positions of a program that makes matrices, and its warps."""
    return MATRICES
