"""The bytes that the tensor core kernels move for each (head, query, key), calculated from shapes and tiles."""

from typing import NamedTuple

from .kernel_configurations import FusedConfiguration, TensorCoreConfiguration

# Bytes of an element: all maps, rows, matrices and terms are in half precision.
ELEMENT = 2
# Terms of each side of a stage: rank 2 and a gate.
TERMS = 5
# How many maps a kernel reads and writes.
MAPS = {
    "dcmha_matrix_statistics": 1,
    "dcmha_matrix_probs": 2,
    "dcmha_matrix_backward_post": 4,
    "dcmha_matrix_backward_pre": 3,
}
# The kernels that compose only before the softmax.
PRE_ALONE = ("dcmha_matrix_statistics", "dcmha_matrix_backward_pre", "dcmha_fused_statistics")
Sides = tuple[bool, bool, bool, bool]


class Traffic(NamedTuple):
    """Bytes for each (head, query, key)."""

    maps: float  # from and to device memory, unless they stay in the second-level cache
    cached: float  # rows, matrices and terms, which many programs read, from the second-level cache


def tensor_core_traffic(
    configuration: TensorCoreConfiguration, name: str, block_t: int, block_s: int, turns: int
) -> Traffic:
    """What a kernel moves that goes through `turns` blocks of `block_t` queries for `block_s` keys."""
    matrices = _of_matrices(configuration.sides, name, configuration.padded, block_t * turns, block_s)
    return Traffic(MAPS[name] * ELEMENT, round(matrices, 2))


def fused_traffic(configuration: FusedConfiguration, name: str, padded: int, block_t: int, keys: int) -> Traffic:
    """What a kernel moves that goes through `keys` keys for `block_t` queries: each key, and in the last one its value.

    Rows and matrices of queries are read once for all keys.
    """
    inputs, outputs = (2, 2) if name == "dcmha_fused_output" else (1, 1)
    rows = ELEMENT * configuration.width * (inputs / block_t + outputs / keys)
    return Traffic(0, round(rows + _of_matrices(configuration.sides, name, padded, block_t, keys), 2))


def _of_matrices(sides: Sides, name: str, padded: int, queries: int, keys: int) -> float:
    """Bytes of matrices and terms, if a key's terms serve so many queries, and a query's matrix so many keys."""
    pre_query, pre_key, post_query, post_key = sides
    is_pre_alone = name in PRE_ALONE
    of_queries, of_keys = pre_query + (post_query and not is_pre_alone), pre_key + (post_key and not is_pre_alone)
    return ELEMENT * (padded * of_queries / keys + TERMS * of_keys / queries)
