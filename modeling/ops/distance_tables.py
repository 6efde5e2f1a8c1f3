"""Tables `[L, H]` with one row for each distance from a key to a query: how they are read and what is checked.

A distance is how many places the key is before the query in their row of the batch, whatever the tokens' position ids
are. So padding on the left and packed documents need nothing special.
"""

from collections.abc import Callable
from functools import wraps
from inspect import signature
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .dtypes import at_least_float32
from .validation import is_integer


class DistanceTables(NamedTuple):
    """The tables by distance of a call, and the position that distances are counted from."""

    bias: Tensor | None = None  # [L, H], added to the scores
    gain: Tensor | None = None  # [L, H], multiplies the probabilities
    offset: int | Tensor | None = None  # position of the first query among the keys; None: the last is at the last key
    compose_bias: bool = False  # whether the bias is added before the first composition, so that it is mixed too

    @property
    def has_any(self) -> bool:
        """Whether a call with these tables differs from one without."""
        return self.bias is not None or self.gain is not None or self.offset is not None

    @property
    def offset_tensor(self) -> Tensor | None:
        """The offset as an operator takes it: an integer becomes a tensor on the CPU, which is read without waiting."""
        return self.offset if isinstance(self.offset, Tensor | None) else torch.as_tensor(self.offset, device="cpu")

    @property
    def present(self) -> dict[str, Tensor]:
        """The tables that there are, by the names that they have as arguments."""
        named = {"position_bias": self.bias, "position_gain": self.gain}
        return {name: table for name, table in named.items() if table is not None}


NO_TABLES = DistanceTables()


def at_distances(table: Tensor, distance: Tensor) -> Tensor:
    """The rows of a table `[L, H]` at distances `[T, S]`, as `[H, T, S]`.

    Distances outside the table read the nearest row; the caller must hide these keys. The gradient of a row is a sum
    over all pairs at its distance, which half precision is too coarse for.
    """
    dtype = at_least_float32(table.dtype) if table.requires_grad else table.dtype
    rows = table.to(dtype)[distance.clamp(0, table.shape[0] - 1)]
    return rows.to(table.dtype).permute(2, 0, 1)


def takes_tables(attend: Callable[..., Any]) -> bool:
    """Whether an implementation has the argument `tables` by itself; wrappers have the signature of what they wrap."""
    return "tables" in signature(attend).parameters


def refusing_tables(name: str, attend: Callable[..., Any]) -> Callable[..., Any]:
    """Returns the implementation `attend`, called `name`, if it takes an argument `tables`.

    Otherwise returns a function that takes this argument and raises ValueError if there are tables or an offset.
    """
    if takes_tables(attend):
        return attend

    @wraps(attend)
    def refusing(*args: Any, tables: DistanceTables = NO_TABLES, **kwargs: Any) -> Any:
        if tables.has_any:
            raise ValueError(f"implementation={name!r} takes no position_bias, position_gain or offset; use 'chunked'")
        return attend(*args, **kwargs)

    return refusing


def check_offset(offset: Any) -> None:
    """Raises ValueError unless the offset is None, an integer or an integer tensor `[]` or `[1]`."""
    if isinstance(offset, Tensor):
        is_integral = not offset.is_floating_point() and offset.dtype != torch.bool
        if offset.ndim > 1 or offset.numel() != 1 or not is_integral:
            raise ValueError(f"offset must be one integer, not {tuple(offset.shape)} of {offset.dtype}")
    elif offset is not None and not is_integer(offset):
        raise ValueError(f"offset must be an integer, the position of the first query among the keys, not {offset!r}")


def check_table_lengths(
    tables: dict[str, Tensor],
    queries: int,
    keys: int,
    sliding_window: int | None,
    offset: int | Tensor | None,
    later_rows: int = 0,
    is_causal: bool = True,
) -> None:
    """Checks that position tables `[L, ..]` have a row for every distance that causality and window allow.

    Masks are not considered. A layer whose mask hides far keys, as between packed documents, has to check by itself
    which distances its queries reach. An offset that is a tensor is not read.

    Args:
        later_rows: how many rows of the tables belong to later keys; the first query reaches the farthest of those.

    Raises:
        ValueError: a table is too short; the text names it.
    """
    # Limits are compared one by one, because `torch.export` cannot prove anything about the smaller of two sizes.
    place = None if isinstance(offset, Tensor) else offset
    behind = [keys if place is None else queries + place]
    ahead = [0 if is_causal else max(keys - 1 - (keys - queries if place is None else place), 0)]
    if sliding_window is not None:
        behind.append(sliding_window)
        ahead.append(sliding_window - 1)
    for name, table in tables.items():
        earlier_rows = table.shape[0] - later_rows
        if all(earlier_rows < limit for limit in behind) or all(later_rows < limit for limit in ahead):
            rows, later = min(behind), min(ahead)
            beyond = f", and {later} keys ahead, for which it has {later_rows}" if later else ""
            raise ValueError(
                f"{name} has {earlier_rows} rows, but queries reach over {rows} keys{beyond}; use fewer "
                "keys, a sliding window or a longer table"
            )
