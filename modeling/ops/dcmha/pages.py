"""Where a decoding step finds the keys and values of many requests: rows of a paged cache, and a table of rows.

Serving engines keep keys and values in pages, which hold one row for each token. A row has `H_kv` heads, each with `D`
elements of the key or value and, behind them, key-side factors of the token (see `RowLayout` in
`../../serving/paged_rows.py`). Rows are numbered through all pages of a layer.
"""

from dataclasses import replace
from typing import NamedTuple

from torch import Tensor

from .composition import Composition


class Pages(NamedTuple):
    """The rows of all pages of one layer, and which of them each of `N` requests attends to.

    `table` has the numbers of the rows that requests attend to; the `key_counts[n]` rows of request `n` start at
    `table_starts[n]`.
    """

    key: Tensor  # [rows, H_kv, D + terms * H / H_kv or more]
    value: Tensor  # like `key`
    table: Tensor  # int64, on the device of the rows
    table_starts: Tensor  # [N], int64, on the CPU
    key_counts: Tensor  # [N], int64, on the CPU


def without_keys(stage: Composition | None) -> Composition | None:
    """The composition without the key-side factors, which are in the rows."""
    return None if stage is None else replace(stage, key_down=None, key_up=None, key_gate=None)
