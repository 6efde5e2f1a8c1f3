"""Where a decoding step finds the keys and values of many requests: rows of a paged cache, and a table of pages.

Engines that serve many requests keep keys and values in pages. A row of a page has `H_kv` heads, each with `D` elements
and, behind them, the key-side factors of its token, as `RowLayout` tells.
"""

from dataclasses import replace
from typing import NamedTuple

from torch import Tensor

from .composition import Composition


class Pages(NamedTuple):
    """The rows of one layer, and which of them each of `N` requests attends to.

    The table holds the numbers of pages of all requests. Those of request `n` start at `table_starts[n]`. Its query
    sees `key_counts[n]` keys from the one that is `first_keys[n]` rows behind the start of its first page.
    """

    key: Tensor  # [pages, page_length, H_kv, D + terms * H / H_kv or more]
    value: Tensor  # like `key`
    table: Tensor  # int64, on the device of the rows
    table_starts: Tensor  # [N], int64, on the CPU
    first_keys: Tensor  # [N], int64, on the CPU
    key_counts: Tensor  # [N], int64, on the CPU


def without_keys(stage: Composition | None) -> Composition | None:
    """The composition without the factors of keys, which rows hold."""
    return None if stage is None else replace(stage, key_down=None, key_up=None, key_gate=None)
