"""Rows of a paged cache: what goes in comes out, with every kind of composition."""

from typing import Any

import pytest
import torch
from cases.models import SMALL

from dynattn import DCFormerConfig, DCFormerForCausalLM
from dynattn.modeling.layers.head_composition import DynamicComposition
from dynattn.modeling.serving.paged_rows import RowLayout
from dynattn.modeling.serving.served_layers import served_layers

COMPOSITIONS: dict[str, dict[str, Any]] = {
    "dynamic": {},
    "multi-head": {"num_key_value_heads": 6},
    "rank-1": {"compose_rank": 1},
    "groups": {"compose_groups": 3},
    "gate-only": {"compose_low_rank": False},
    "low-rank-only": {"compose_gate": False},
    "pre-only": {"compose_post": False},
    "post-only": {"compose_pre": False},
    "query-wise": {"compose_key_wise": False},
    "static-only": {"compose_key_wise": False, "compose_query_wise": False, "compose_static": True},
    "everything": {"compose_static": True, "compose_rank": 3, "compose_groups": 2},
}


def layout_of(config: DCFormerConfig) -> RowLayout:
    return served_layers(DCFormerForCausalLM(config)).layout


@pytest.mark.parametrize("implementation", ["chunked", "triton"])
@pytest.mark.parametrize("options", COMPOSITIONS.values(), ids=COMPOSITIONS.keys())
def test_rows_give_back_states_and_key_factors_bit_for_bit(options: dict[str, Any], implementation: str) -> None:
    config = DCFormerConfig(**{**SMALL, **options}, attn_implementation=implementation)
    layout = layout_of(config)
    assert layout.width % (16 if implementation == "triton" else 1) == 0
    generator = DynamicComposition(config)
    for weight in generator.parameters():
        torch.nn.init.normal_(weight)
    stages = generator.assemble(generator(torch.randn(2, 5, config.hidden_size)))
    queries = generator.assemble(generator(torch.randn(2, 3, config.hidden_size)))
    for stage, query_stage in zip(stages, queries, strict=True):
        states = torch.randn(2, 5, layout.kv_heads, layout.head_dim)
        rows = layout.pack(states, stage)
        assert rows.shape == (2, 5, layout.kv_heads, layout.width)
        found, joined = layout.unpack(rows, query_stage)
        assert torch.equal(found, states)
        if stage is None:
            assert joined is None
            continue
        expected = {name: tensor for name, tensor in stage.tensors().items() if name.startswith("key_")}
        expected |= {name: tensor for name, tensor in query_stage.tensors().items() if not name.startswith("key_")}
        assert {name: tensor.tolist() for name, tensor in joined.tensors().items()} == {
            name: tensor.tolist() for name, tensor in expected.items()
        }
        assert joined.groups == stage.groups


def test_a_row_has_the_channels_that_the_factors_take_and_no_more() -> None:
    assert layout_of(DCFormerConfig(**{**SMALL, "num_key_value_heads": 6})).width == 8 + 5
    assert layout_of(DCFormerConfig(**SMALL)).width == 8 + 2 * 5
    assert layout_of(DCFormerConfig(**{**SMALL, "compose_key_wise": False})).width == 8
    assert layout_of(DCFormerConfig(**SMALL, attn_implementation="triton")) == RowLayout(6, 3, 8, 5, padding=14)
