"""The tuning constants of `dcmha_triton`, and functions by which the other modules read them.

`DESIGN.md`, "Tuning constants", has the reason for each. `dynattn benchmark --preset gpu` sets candidates for these
constants and measures which are fastest. Modules call the functions and import no constant, so that they see the values
that the tuner sets.
"""

import torch

from .devices import WARP

# The least number of queries of a chunk.
ROWS = 128
# The largest number of elements of a chunk's map. While there is room, a chunk takes more items, and then more queries.
LARGEST_MAP = 1 << 27
# The least number of queries of a window's block, which has a quarter as many queries as the window has keys if that is
# more.
BLOCK = 64
# Queries and keys of a tile in the matrix products of a window, and warps of a program. Float32 does not run on tensor
# cores, and registers have room for a quarter of the tile only.
WINDOW_TILE = (64, 64, 4)
WINDOW_TILE_OF_FLOAT32 = (32, 32, 4)

# From how many up to how many heads of an item are composed on the tensor cores, in half precision.
FEWEST_HEADS, MOST_HEADS = 11, 32

# Queries and keys of a program's patch, and its warps, in the head by head kernels.
TILES = dict.fromkeys(("dcmha_statistics", "dcmha_probs", "dcmha_backward_post", "dcmha_backward_pre"), (32, 64, 4))
TILES_OF_MANY_TERMS = dict.fromkeys(TILES, (16, 64, 4))
# The same where `dcmha_backward_post` holds probabilities both with and without a gain by distance.
TILE_OF_GAINS = (16, 64, 4)
# The same in the kernels on the tensor cores, which hold 16 or 32 heads with padding, and the stages of loading (3 or
# more load ahead). Matrix instructions need at least 16 keys, and a warp a query.
MATRIX_TILES_16 = {
    "dcmha_matrix_statistics": (4, 32, 4, 3),
    "dcmha_matrix_probs": (4, 32, 4, 4),
    "dcmha_matrix_backward_post": (4, 16, 4, 4),
    "dcmha_matrix_backward_pre": (1, 16, 1, 3),
}
MATRIX_TILES_32 = dict.fromkeys(MATRIX_TILES_16, (4, 16, 4, 3)) | {"dcmha_matrix_backward_post": (1, 16, 1, 3)}
# Bytes of shared memory that the kernels on the tensor cores take at most, with 16 and with 32 heads.
MATRIX_MEMORY = {16: 65_536, 32: 131_072}
# A program goes through at most `TURNS` blocks of queries. With windows it goes through more where otherwise more than
# `PROGRAMS_OF_A_BLOCK` programs would share a block of keys.
TURNS, PROGRAMS_OF_A_BLOCK = 64, 8
# Queries of a program of `dcmha_merge`, and its warps.
MERGED = (32, 4)
# Queries and columns of a tile of `dcmha_distance_sums`, queries of a program, and its warps.
DISTANCE_SUMS = (16, 128, 512, 4)
# Positions of a program of `dcmha_matrices`, which divide lengths with padding, and its warps.
MATRICES = (4, 4)

# Decoding: how many programs a launch should have, splits times items; the numbers of keys that a block may have, and
# two limits for them; warps of a program, and blocks of keys that it has in shared memory.
DECODE_PROGRAMS = 792
DECODE_BLOCKS = (64, 32, 16)
# A tile of all heads is in registers; it has half as many elements over pages, where the address of each factor takes
# registers too. `DECODE_KEYS` bounds the bytes of the keys of a block.
DECODE_TILE, DECODE_KEYS = 2048, 16384
DECODE_WARPS, DECODE_STAGES = 4, 4
# Channels of a program that sums the outputs of splits: few, since heads alone are too few programs for a device.
SUMMED_CHANNELS = 16


def fewest_rows() -> int:
    """Returns the least number of queries of a chunk."""
    return ROWS


def fits_in_a_chunk(elements: int) -> bool:
    """Whether a chunk's map may have this number of elements."""
    return elements <= LARGEST_MAP


def items_of_a_chunk(elements: int) -> int:
    """Returns the number of items that share a chunk, if the map of each has this number of elements."""
    return LARGEST_MAP // max(1, elements)


def block_of(window: int) -> int:
    """Returns the number of queries of a block of a causal window."""
    return max(BLOCK, window // 4)


def blocks_of_a_chunk(elements: int) -> int:
    """Returns the number of a window's blocks in a chunk, if each has this number of elements in a row of the batch."""
    return max(1, LARGEST_MAP // max(1, elements))


def tile_of_window(dtype: torch.dtype) -> tuple[int, int, int]:
    """Returns the queries and keys of a tile of a window's matrix products, and the warps of a program."""
    return WINDOW_TILE_OF_FLOAT32 if dtype == torch.float32 else WINDOW_TILE


def composes_on_tensor_cores(heads: int, dtype: torch.dtype, shared_memory: int, *, mixes_heads: bool) -> bool:
    """Whether an item's heads are composed on the tensor cores; gates alone mix none, and are cheaper head by head.

    Args:
        heads: the heads of an item.
        dtype: that of the queries.
        shared_memory: the bytes that a program may have on the device.
        mixes_heads: whether there are other terms than gates.
    """
    has_memory = shared_memory >= MATRIX_MEMORY[filled_up(heads)]
    return mixes_heads and has_memory and dtype != torch.float32 and FEWEST_HEADS <= heads <= MOST_HEADS


def tiles_for(term_counts: tuple[int, ...], *, wide_static: bool, has_gain: bool) -> dict[str, tuple[int, int, int]]:
    """Returns the patch and the warps of each head by head kernel.

    Args:
        term_counts: the number of terms on each side of each stage.
        wide_static: whether a static matrix makes threads hold more tiles in float32, of maps or of a bias.
        has_gain: whether a gain by distance makes threads hold the gained probabilities too.
    """
    if max(term_counts) > 5 or wide_static:
        return TILES_OF_MANY_TERMS
    return TILES | ({"dcmha_backward_post": TILE_OF_GAINS} if has_gain else {})


def filled_up(heads: int) -> int:
    """Returns the number of heads that a program of a kernel on the tensor cores holds, with padding: 16 or 32."""
    return 16 if heads <= 16 else 32


def matrix_tiles_for(padded: int) -> dict[str, tuple[int, int, int, int]]:
    """Returns the patch, the warps and the stages of each kernel on the tensor cores, for 16 or 32 heads."""
    tiles = MATRIX_TILES_32 if padded == 32 else MATRIX_TILES_16
    # Kernels write maps and gradients of keys' terms in place, which is safe if no two threads load the same element.
    assert all(padded * keys >= WARP * warps for _, keys, warps, _ in tiles.values())
    return tiles


def turns_of_rows() -> int:
    """Returns the largest number of blocks of queries that a program goes through."""
    return TURNS


def turns_of_window(blocks: int) -> int:
    """Returns the number of blocks of queries that a program goes through, a divisor of those of a window's block."""
    divisors = [turns for turns in range(1, blocks + 1) if blocks % turns == 0]
    enough = [turns for turns in divisors if blocks <= PROGRAMS_OF_A_BLOCK * turns]
    return max((turns for turns in enough if turns <= TURNS), default=enough[0])


def tile_of_merge() -> tuple[int, int]:
    """Returns the queries of a program of `dcmha_merge`, and its warps."""
    return MERGED


def tile_of_distance_sums() -> tuple[int, int, int, int]:
    """Returns the queries and columns of a tile of `dcmha_distance_sums`, queries of a program, and its warps."""
    return DISTANCE_SUMS


def tile_of_matrices() -> tuple[int, int]:
    """Returns the positions of a program of `dcmha_matrices`, and its warps."""
    return MATRICES


def programs_of_decoding() -> int:
    """Returns how many programs the launch of a decoding step should have."""
    return DECODE_PROGRAMS


def blocks_of_decoding(heads: int, bytes_of_key: int, *, paged: bool) -> tuple[int, ...]:
    """Returns the numbers of keys that a block of a decoding step may have, the largest first.

    Args:
        heads: those of a tile, padding included.
        bytes_of_key: those of one head of a key, padding included.
        paged: whether keys are in pages.
    """
    most = min(DECODE_TILE // (1 + paged) // heads, DECODE_KEYS // bytes_of_key)
    blocks = tuple(block for block in DECODE_BLOCKS if block <= most) or DECODE_BLOCKS[-1:]
    # Kernels write in place, which is safe if no two threads load the same element.
    assert heads * min(blocks) >= WARP * DECODE_WARPS
    return blocks


def loading_of_decoding() -> dict[str, int]:
    """Returns the warps of a decoding step's programs and their stages of loading, as Triton names them."""
    return {"num_warps": DECODE_WARPS, "num_stages": DECODE_STAGES}


def channels_of_sums() -> int:
    """Returns the most channels of a program that sums the outputs of splits."""
    return SUMMED_CHANNELS
