"""The bytes that the tensor core kernels move for each (head, query, key), calculated from shapes and tiles."""

from typing import NamedTuple

from .kernel_configurations import TensorCoreConfiguration

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
PRE_ALONE = ("dcmha_matrix_statistics", "dcmha_matrix_backward_pre")


class Traffic(NamedTuple):
    """Bytes for each (head, query, key)."""

    maps: float  # from and to device memory, unless they stay in the second-level cache
    cached: float  # matrices and terms, which many programs read, from the second-level cache


def tensor_core_traffic(
    configuration: TensorCoreConfiguration, name: str, block_t: int, block_s: int, turns: int
) -> Traffic:
    """What a kernel moves that goes through `turns` blocks of `block_t` queries for `block_s` keys.

    A key's terms serve all these queries, and a query's matrix `block_s` keys.
    """
    pre_query, pre_key, post_query, post_key = configuration.sides
    is_pre_alone = name in PRE_ALONE
    of_queries, of_keys = pre_query + (post_query and not is_pre_alone), pre_key + (post_key and not is_pre_alone)
    cached = configuration.padded * of_queries / block_s + TERMS * of_keys / (block_t * turns)
    return Traffic(MAPS[name] * ELEMENT, round(ELEMENT * cached, 2))
