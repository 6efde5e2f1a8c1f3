"""Attention in one forward pass over a batch of requests, whose keys, values and factors are rows of a paged cache.

A batch is one row of `T` tokens: the new tokens of each request, one request after the other. All requests with one new
token are decoded in one call. The others are chunks of prompts; for each of them the model's implementation of
attention is called as usual.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..ops.dcmha.attention import Attention
from ..ops.dcmha.chunked.attention import dcmha_chunked
from ..ops.dcmha.chunked.paged_decode_native import attend_to_pages
from ..ops.dcmha.composition import Composition
from ..ops.dcmha.key_source import KeySource
from ..ops.dcmha.pages import Pages, without_keys
from ..ops.dcmha.triton.attention import dcmha_triton
from ..ops.dcmha.triton.paged_decode import decode_pages
from ..ops.distance_tables import DistanceTables
from .paged_rows import RowLayout

# The implementations whose decoding reads rows in place; for others the rows are gathered.
PAGED_DECODING: dict[Attention, Any] = {dcmha_chunked: attend_to_pages, dcmha_triton: decode_pages}


class Span(NamedTuple):
    """One request's part of a batch.

    `tokens` are its new tokens in the batch; `rows` are the entries of `RequestRows.table` that it attends to, new ones
    last.
    """

    tokens: slice
    rows: slice

    @property
    def new(self) -> int:
        """The number of new tokens."""
        return self.tokens.stop - self.tokens.start

    @property
    def seen(self) -> int:
        """The number of rows that the last new token sees: all of them."""
        return self.rows.stop - self.rows.start


@dataclass
class RequestRows:
    """Where the rows of all requests are, in every layer of one type."""

    spans: list[Span]
    table: Tensor  # the numbers of the rows that requests attend to, those of each span in the order of positions
    new_rows: Tensor  # [T] or more: the numbers of the rows into which the new tokens are written

    @cached_property
    def chunks(self) -> list[Span]:
        """The requests with several new tokens."""
        return [span for span in self.spans if span.new > 1]

    @cached_property
    def steps(self) -> list[Span]:
        """The requests with one new token, which decode."""
        return [span for span in self.spans if span.new == 1]

    @cached_property
    def step_tokens(self) -> Tensor:
        """The places `[N]` in the batch of the new tokens of `steps`."""
        return torch.tensor([span.tokens.start for span in self.steps], device=self.new_rows.device)

    @cached_property
    def step_table(self) -> Tensor:
        """`table` with the numbers from `new_rows` for the new tokens of `steps`.

        The table may have a marker in place of these numbers: some engines append new rows to those that they read.
        """
        last = torch.tensor([span.rows.stop - 1 for span in self.steps], device=self.table.device)
        return self.table.index_copy(0, last, self.new_rows[self.step_tokens])

    @cached_property
    def step_bounds(self) -> tuple[Tensor, Tensor]:
        """`table_starts` and `key_counts` `[N]` of `Pages`."""
        starts = torch.tensor([span.rows.start for span in self.steps], device="cpu")
        return starts, torch.tensor([span.seen for span in self.steps], device="cpu")

    @cached_property
    def step_index(self) -> tuple[Tensor, Tensor]:
        """The row numbers `[N, S]` of `steps`, padded on the left, and a mask `[N, 1, 1, S]` that hides the padding.

        All end with the newest row, from which distances are counted.
        """
        starts, counts = (bound.to(self.table.device) for bound in self.step_bounds)
        places = counts[:, None] - 1 - torch.arange(int(counts.max()), device=self.table.device).flip(0)
        visible = places >= 0
        return self.step_table[starts[:, None] + places.clamp(min=0)], visible[:, None, None]


class LayerRows(NamedTuple):
    """The rows of one layer in an engine's cache, and a function that writes new ones."""

    key: Tensor  # [rows, H_kv, width]
    value: Tensor  # like `key`
    write: Callable[[Tensor, Tensor], None]  # writes rows of keys and of values [T, H_kv, width] to `new_rows`
    requests: RequestRows
    overwrites: bool = False  # whether `new_rows` may hold rows that tokens of the same batch still see


@dataclass
class PagedAttention(KeySource):
    """The `key_source` of a model that is served: attention over the rows of each layer, for one row of tokens."""

    layout: RowLayout
    layer_rows: Callable[[int], LayerRows]

    def key_count(self, layer: int) -> int:
        """The most keys that any of the requests attends to in a layer, new ones included."""
        return max((span.seen for span in self.layer_rows(layer).requests.spans), default=0)

    @torch.compiler.disable  # its control flow depends on the lengths of requests, and it writes the engine's memory
    def attend(
        self,
        layer: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        pre: Composition | None,
        post: Composition | None,
        scaling: float,
        sliding_window: int | None,
        attend: Attention,
        tables: DistanceTables,
    ) -> Tensor:
        """As in `KeySource`, with `B = 1`; also writes the rows of the new tokens. Padding behind them gets zeros.

        Chunks are left to `attend`, and steps for which `PAGED_DECODING` has nothing else.

        Raises:
            ValueError: there are tables, but `attend` takes none.
        """
        options: dict[str, Any] = {"scaling": scaling, "tables": tables}
        rows = self.layer_rows(layer)
        new = [self.layout.pack(states.transpose(1, 2), stage) for states, stage in ((key, pre), (value, post))]
        output = query.new_zeros(query.transpose(1, 2).shape)
        # Rows are written first, because requests of a batch may share those of a prefix that is new to all of them.
        if not rows.overwrites:
            rows.write(new[0][0], new[1][0])
        for span in rows.requests.chunks:
            output[:, span.tokens] = self._attend_chunk(
                rows, span, query, new, (pre, post), attend, sliding_window=sliding_window, **options
            )
        if rows.overwrites:
            rows.write(new[0][0], new[1][0])
        if rows.requests.steps:
            places = rows.requests.step_tokens
            stages = [None if stage is None else tokens_as_items(stage, places) for stage in (pre, post)]
            output[0, places] = self._decode(
                rows, query[0, :, places].transpose(0, 1).unsqueeze(2), stages, attend, **options
            ).squeeze(1)
        return output

    def _attend_chunk(
        self,
        rows: LayerRows,
        span: Span,
        query: Tensor,
        new: list[Tensor],
        stages: tuple[Composition | None, Composition | None],
        attend: Attention,
        **options: Any,
    ) -> Tensor:
        """The output `[1, t, H, D]` of a request's `t` new tokens, which see the request's old rows and each other."""
        old = rows.requests.table[span.rows.start : span.rows.stop - span.new]
        states, complete_stages = [], []
        for kept, added, stage in zip((rows.key, rows.value), new, stages, strict=True):
            added = added[:, span.tokens]
            joined = torch.cat([kept[old][None], added], dim=1) if len(old) else added
            own = None if stage is None else stage.narrow(queries=span.tokens)
            state, own = self.layout.unpack(joined, own)
            states.append(state.transpose(1, 2))
            complete_stages.append(own)
        pre, post = complete_stages
        options = {"attention_mask": None, "is_causal": True, **options}
        return attend(query[:, :, span.tokens], *states, pre=pre, post=post, **options)[0]

    def _decode(
        self,
        rows: LayerRows,
        query: Tensor,
        stages: list[Composition | None],
        attend: Attention,
        **options: Any,
    ) -> Tensor:
        """The output `[N, 1, H, D]` of queries `[N, H, 1, D]`, which see all rows of their requests."""
        read = PAGED_DECODING.get(attend)
        if read is not None:
            pages = Pages(rows.key, rows.value, rows.requests.step_table, *rows.requests.step_bounds)
            pre, post = (without_keys(stage) for stage in stages)
            output = read(query, pages, pre, post, terms=self.layout.terms, **options)
            if output is not None:
                return output
        index, visible = rows.requests.step_index
        (key, pre), (value, post) = (
            self.layout.unpack(kept[index], stage) for kept, stage in zip((rows.key, rows.value), stages, strict=True)
        )
        states = (key.transpose(1, 2), value.transpose(1, 2))
        options = {"attention_mask": visible, "is_causal": False, "sliding_window": None, **options}
        return attend(query, *states, pre=pre, post=post, **options)[0]


def tokens_as_items(stage: Composition, places: Tensor) -> Composition:
    """The factors `[1, T, ...]` of the tokens at `places` `[N]`, as factors `[N, 1, ...]` of `N` items of one token."""
    return stage.map(lambda factor: factor if factor.ndim == 2 else factor[0, places][:, None])


class CurrentPages(threading.local):
    """The pages that attention in a thread reads; other threads may call the same model with a cache of its own."""

    paged: KeySource | None = None  # None where attention gets its keys from the model


CURRENT = CurrentPages()


@contextmanager
def attending_to_pages(paged: KeySource) -> Iterator[None]:
    """Lets attention that gets no `key_source` from its model attend by this one, in this thread."""
    before, CURRENT.paged = CURRENT.paged, paged
    try:
        yield
    finally:
        CURRENT.paged = before
