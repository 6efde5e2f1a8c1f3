"""`ComposedAttention` without causality: the authors' vision transformer, windows, dropout, small masks."""

from typing import Any

import pytest
import torch
from cases.golden import assert_gradients, case_names, flax_attention, read_case, tensors_under
from torch import Tensor, nn
from transformers.masking_utils import create_bidirectional_mask, create_bidirectional_sliding_window_mask

from dynattn.configuration.multihead_config import MultiheadConfig
from dynattn.modeling.layers.composed_attention import ComposedAttention
from dynattn.modeling.layers.head_composition import DynamicComposition, init_composition

B, T, E, H = 2, 9, 24, 6


def make_config(implementation: str = "eager", **fields: Any) -> MultiheadConfig:
    shape = {"hidden_size": E, "num_attention_heads": H, "use_qk_norm": False}
    return MultiheadConfig(**{**shape, "attn_implementation": implementation, **fields})


def make_attention(config: MultiheadConfig, **options: Any) -> ComposedAttention:
    """In float64, with a composition that matters."""
    attention = ComposedAttention(config, layer_idx=0, is_causal=False, **options).double()
    for module in attention.modules():
        if isinstance(module, DynamicComposition):
            init_composition(module, scale=30.0)
    return attention.eval()


@pytest.mark.parametrize("implementation", ["eager", "chunked"])
@pytest.mark.parametrize("name", case_names("dcvit_attn_*", "dcvit_cross_*"))
def test_it_equals_the_authors_vision_transformer(name: str, implementation: str) -> None:
    meta, tensors = read_case(name)
    config = make_config(
        implementation,
        hidden_size=meta["hidden_size"],
        num_attention_heads=meta["heads"],
        compose_groups=meta["groups"],
        compose_static=True,
        compose_act="gelu_pytorch_tanh",
        attention_bias=True,
        use_qk_norm=True,
        qk_norm_type="layer_norm",
    )
    attention = make_attention(config, is_cross_attention=meta["cross"])
    attention.load_state_dict(flax_attention(tensors_under(tensors, "sd.")))
    x = tensors["x"].requires_grad_()
    y = tensors["y"].requires_grad_() if meta["cross"] else None
    output, _ = attention(x, attention_mask=tensors.get("mask"), key_value_states=y)
    torch.testing.assert_close(output, tensors["out"], atol=1e-9, rtol=0)

    (output * tensors["weight_of_output"]).sum().backward()
    expected = flax_attention(tensors_under(tensors, "grad.sd."))
    assert_gradients(attention, expected)
    for key, tensor in {"x": x, "y": y}.items():
        if tensor is not None:
            torch.testing.assert_close(tensor.grad, tensors[f"grad.{key}"], atol=1e-8, rtol=0)


@pytest.mark.parametrize("implementation", ["eager", "chunked"])
def test_without_a_mask_a_token_sees_later_ones(implementation: str) -> None:
    attention = make_attention(make_config(implementation))
    x = torch.randn(B, T, E, dtype=torch.float64, requires_grad=True)
    attention(x)[0][:, 0].sum().backward()
    assert (x.grad[:, -1] != 0).all()


@pytest.mark.parametrize("implementation", ["eager", "chunked"])
def test_tokens_have_no_order_without_positions(implementation: str) -> None:
    attention = make_attention(make_config(implementation, compose_static=True))
    x, order = torch.randn(B, T, E, dtype=torch.float64), torch.randperm(T)
    torch.testing.assert_close(attention(x[:, order])[0], attention(x)[0][:, order], atol=1e-12, rtol=0)


@pytest.mark.parametrize("padding", [None, "left", "right"])
@pytest.mark.parametrize("window", [None, 2])
def test_bidirectional_masks_are_no_larger_than_the_padding(window: int | None, padding: str | None) -> None:
    config = make_config("chunked")
    config.sliding_window, config.layer_types = window, None if window is None else ["sliding_attention"]
    x = torch.randn(B, T, E, dtype=torch.float64)
    visible = torch.ones(B, T, dtype=torch.long)
    if padding is not None:
        visible[1, slice(0, 3) if padding == "left" else slice(-3, None)] = 0
    maker = create_bidirectional_mask if window is None else create_bidirectional_sliding_window_mask
    mask = maker(config=config, inputs_embeds=x, attention_mask=visible)
    assert mask is None if padding is None else mask.shape == (B, T)

    torch.manual_seed(0)
    ours = make_attention(config)
    assert ours.sliding_window == (None if window is None else window + 1)  # that of an op counts the token itself
    config._attn_implementation = "eager"
    complete = maker(config=config, inputs_embeds=x, attention_mask=visible)  # what Transformers takes these to mean
    expected = ours(x, attention_mask=complete)[0]
    config._attn_implementation = "chunked"
    real = visible.bool()
    torch.testing.assert_close(ours(x, attention_mask=mask)[0][real], expected[real], atol=1e-12, rtol=0)


def test_a_mask_that_holds_more_than_padding_is_written_out() -> None:
    x = torch.randn(B, T, E)
    mask = create_bidirectional_mask(
        config=make_config("chunked"),
        inputs_embeds=x,
        attention_mask=None,
        and_mask_function=lambda batch, head, query, key: query != key,
    )
    assert mask.shape[-2:] == (T, T) and not mask[0, 0].diagonal().any()


def test_composition_dropout_acts_in_training_only() -> None:
    attention = make_attention(make_config(compose_dropout=0.5))
    x = torch.randn(B, T, E, dtype=torch.float64)
    assert torch.equal(attention(x)[0], attention(x)[0])
    attention.train()
    assert not torch.equal(attention(x)[0], attention(x)[0])


@pytest.mark.parametrize("implementation", ["eager", "chunked"])
def test_dropout_without_composition_needs_an_implementation_that_has_it(implementation: str) -> None:
    config = make_config(implementation, attention_dropout=0.5, compose_pre=False, compose_post=False)
    attention, x = make_attention(config), torch.randn(B, T, E, dtype=torch.float64)
    attention(x)
    attention.train()
    with pytest.raises(ValueError, match=r"attention_dropout \(0.5\) is not supported.*attn_implementation='sdpa'"):
        attention(x)
    config._attn_implementation = "sdpa"
    assert not torch.equal(attention(x)[0], attention(x)[0])


def test_scaling_and_the_bias_of_the_output_are_fields() -> None:
    attention = make_attention(make_config(attention_scaling=1.0, attention_output_bias=True))
    assert attention.scaling == 1.0
    assert attention.q_proj.bias is None and isinstance(attention.o_proj.bias, Tensor)
    assert make_attention(make_config()).scaling == (E // H) ** -0.5


def test_a_layer_may_stay_plain_in_a_model_that_composes() -> None:
    attention = make_attention(make_config(), composes=False)
    assert not any(isinstance(module, DynamicComposition | nn.LayerNorm) for module in attention.modules())
