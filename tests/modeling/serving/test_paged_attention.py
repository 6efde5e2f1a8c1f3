"""Attention over rows of pages: implementations that read them in place give what the gathered rows give."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from cases.models import SMALL
from cases.triton_marks import interpreted
from torch import Tensor

from dynattn import DCFormerConfig, DCFormerForCausalLM
from dynattn.modeling.layers.head_composition import DynamicComposition
from dynattn.modeling.ops.dcmha.attention import COMPOSING_IMPLEMENTATIONS
from dynattn.modeling.ops.distance_tables import NO_TABLES, DistanceTables
from dynattn.modeling.serving import paged_attention
from dynattn.modeling.serving.paged_attention import LayerRows, PagedAttention, RequestRows, Span
from dynattn.modeling.serving.served_layers import served_layers

pytestmark = pytest.mark.filterwarnings("ignore:divide by zero encountered in log")
LENGTHS = (12, 1, 7)


def prepare(
    implementation: str,
    spans: list[Span],
    table: Tensor,
    new_rows: Tensor,
    dtype: torch.dtype = torch.float32,
    tables: DistanceTables = NO_TABLES,
) -> Callable[[], Tensor]:
    """Attention of the new tokens of some requests to 30 random rows, into which each call writes the new ones."""
    tokens = spans[-1].tokens.stop
    config = DCFormerConfig(**SMALL, attn_implementation=implementation)
    layout = served_layers(DCFormerForCausalLM(config)).layout
    torch.manual_seed(4)
    generator = DynamicComposition(config)
    for weight in generator.parameters():
        torch.nn.init.normal_(weight, std=0.3)
    states = [torch.randn(1, heads, tokens, 8).to(dtype) for heads in (6, 3, 3)]
    new, old = (generator.assemble(generator(torch.randn(1, count, config.hidden_size))) for count in (tokens, 30))
    stages = [stage.map(lambda factor: factor.to(dtype)) for stage in new]
    pools = [layout.pack(torch.randn(1, 30, 3, 8), stage)[0].detach().to(dtype) for stage in old]

    def write(*rows: Tensor) -> None:
        for pool, states in zip(pools, rows, strict=True):
            pool[new_rows] = states

    rows = LayerRows(*pools, write, RequestRows(spans, table, new_rows))
    paged = PagedAttention(layout, lambda layer: rows)
    attend = COMPOSING_IMPLEMENTATIONS[implementation]
    options: dict[str, Any] = {"scaling": 0.3, "sliding_window": None, "attend": attend, "tables": tables}
    return torch.no_grad()(lambda: paged.attend(0, *states, *stages, **options))


def attend_to_steps(
    implementation: str, dtype: torch.dtype = torch.float32, tables: DistanceTables = NO_TABLES
) -> Tensor:
    """The output `[1, 3, H, D]` of one new token of each of three requests, whose rows are everywhere."""
    torch.manual_seed(3)
    ends = torch.tensor(LENGTHS).cumsum(0).tolist()
    table = torch.randperm(30)[: ends[-1]]
    bounds = zip(ends, LENGTHS, strict=True)
    spans = [Span(slice(n, n + 1), slice(end - length, end)) for n, (end, length) in enumerate(bounds)]
    return prepare(implementation, spans, table, table[torch.tensor(ends) - 1], dtype, tables)()


@pytest.mark.parametrize(
    "tables", [NO_TABLES, DistanceTables(-torch.arange(12.0)[:, None].expand(12, 6))], ids=["plain", "biased"]
)
@pytest.mark.parametrize("implementation", ["chunked", pytest.param("triton", marks=interpreted)])
def test_steps_that_read_rows_in_place_are_as_exact_as_those_that_gather_them(
    implementation: str, tables: DistanceTables, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = attend_to_steps("eager", torch.float64, tables)
    noise = (attend_to_steps("eager", tables=tables) - expected).abs().max()
    monkeypatch.setattr(paged_attention.RequestRows, "step_index", property(lambda self: pytest.fail("gathered")))
    assert (
        attend_to_steps(implementation, tables=tables) - expected
    ).abs().max() <= 4 * noise + 1e-6 * expected.abs().max()


@pytest.mark.parametrize("new", [1, 4])
def test_a_request_sees_rows_that_another_one_of_the_same_batch_writes(new: int) -> None:
    """vLLM lets requests that arrive together share the pages of a prefix before these are computed."""
    spans = [Span(slice(0, 8), slice(0, 8)), Span(slice(8, 8 + new), slice(8, 14 + new))]
    new_rows = torch.arange(8 + new)
    table = torch.cat([torch.arange(8), torch.arange(6), new_rows[8:]])  # the second one shares six rows
    attend = prepare("eager", spans, table, new_rows)
    at_once, later = attend(), attend()
    torch.testing.assert_close(at_once, later, rtol=0, atol=0)
