"""What a finished model makes of fields of its configuration that are changed."""

import copy
from typing import Any

import pytest
import torch
from cases import seq2seq
from cases.models import decode, make_model
from torch import Tensor
from transformers import DynamicCache, StaticCache

from dynattn import DCViTConfig, DCViTModel


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


@pytest.mark.parametrize("names", [("pre",), ("post",), ("pre", "post"), ("key_wise",), ("low_rank", "gate")])
def test_composition_stays_as_the_weights_were_made_for_it(names: tuple[str, ...]) -> None:
    """Caches once left out factors, or divided them among stages, as the changed configuration says."""
    model, ids = make_model(), torch.arange(25)[None]
    expected = read(copy.deepcopy(model), ids)[0]
    for name in names:
        setattr(model.config, f"compose_{name}", False)
    for logits in read(model, ids):
        torch.testing.assert_close(logits, expected, atol=1e-4, rtol=1e-4)


@torch.no_grad()
def test_caches_of_an_encoder_decoder_keep_the_factors_of_its_weights() -> None:
    model, source, target = seq2seq.make_model(), seq2seq.random_tokens(1, 7), seq2seq.random_tokens(1, 5)
    expected = seq2seq.whole(model, source, target)
    model.config.compose_key_wise = False
    torch.testing.assert_close(seq2seq.in_steps(model, source, target), expected, atol=1e-4, rtol=1e-4)


def test_no_implementation_ignores_the_composition_of_finished_layers() -> None:
    """Transformers' functions were accepted where only the configuration had lost its composition."""
    model = make_model()
    model.config.compose_pre = model.config.compose_post = False
    model.set_attn_implementation("sdpa")
    with pytest.raises(ValueError, match="implementation 'sdpa' cannot compose heads"):
        model(torch.arange(5)[None])


@torch.no_grad()
def test_learned_positions_of_images_stay_those_of_their_grid() -> None:
    fields = {"position_embedding_type": "learned", "interpolate_pos_encoding": True}
    model, pixels = DCViTModel(DCViTConfig.from_size("tiny", **fields)).eval(), torch.randn(1, 3, 32, 32)
    expected = model(pixels).last_hidden_state
    model.config.image_size = 32
    torch.testing.assert_close(model(pixels).last_hidden_state, expected)
