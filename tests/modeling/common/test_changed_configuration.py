"""What a finished model makes of fields of its configuration that are changed."""

import copy
from typing import Any

import pytest
import torch
from cases.models import decode, make_model
from torch import Tensor
from transformers import DynamicCache, StaticCache


@torch.no_grad()
def read(model: Any, ids: Tensor) -> list[Tensor]:
    """Logits of a whole text, and of its tokens one by one with caches that follow the configuration."""
    caches = DynamicCache(config=model.config), StaticCache(config=model.config, max_cache_len=64)
    return [model(ids, use_cache=False).logits, model(ids).logits, *(decode(model, ids, cache) for cache in caches)]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("sliding_window", 5),
        ("sliding_window", 14),
        ("layer_types", ["full_attention"] * 3),
        ("layer_types", ["full_attention", "sliding_attention", "full_attention"]),
    ],
)
def test_windows_are_those_of_a_changed_configuration(field: str, value: Any) -> None:
    """Masks and caches are made by the configuration, so layers must not keep windows of their own."""
    model, ids = make_model(), torch.arange(25)[None]
    expected = read(make_model(**{field: value}), ids)[0]
    setattr(model.config, field, value)
    for logits in read(model, ids):
        torch.testing.assert_close(logits, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("stage", ["pre", "post"])
def test_stages_stay_those_that_the_weights_were_made_for(stage: str) -> None:
    """Factors that come through a cache were once divided among the stages of the changed configuration."""
    model, ids = make_model(), torch.arange(25)[None]
    expected = read(copy.deepcopy(model), ids)[0]
    setattr(model.config, f"compose_{stage}", False)
    for logits in read(model, ids):
        torch.testing.assert_close(logits, expected, atol=1e-4, rtol=1e-4)
