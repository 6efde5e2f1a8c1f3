"""Models whose configuration names a published attention: the authors' formula in every way of running."""

import copy
import math
import re
from pathlib import Path

import pytest
import torch
from cases import mixers as authors
from cases.models import SMALL, assert_within_noise, decode
from torch import Tensor
from transformers import DiffLlamaConfig, DiffLlamaForCausalLM, DynamicCache, PreTrainedModel, StaticCache

import dynattn
from dynattn import Composition, DCFormerConfig, DCFormerForCausalLM, DCPythiaConfig, DCPythiaForCausalLM
from dynattn.configuration.mixers import MIXERS, REFUSED
from dynattn.modeling.layers.composed_attention import ComposedAttention
from dynattn.modeling.layers.differential_heads import DifferentialHeads
from dynattn.modeling.positions.rotary import RotaryEmbedding

CLASSES = {"dcformer": (DCFormerConfig, DCFormerForCausalLM), "dcpythia": (DCPythiaConfig, DCPythiaForCausalLM)}
OTHERS = sorted(MIXERS.keys() - {"dcmha"})
IDS = torch.randint(0, 97, (2, 14), generator=torch.Generator().manual_seed(7))


def make(mixer: str, family: str = "dcformer", **overrides: object) -> PreTrainedModel:
    """A model in eval mode whose mixing is far from the identity."""
    config_class, model_class = CLASSES[family]
    torch.manual_seed(1)
    fields = {
        **SMALL,
        "num_key_value_heads": 2,
        "num_attention_heads": 4,
        "hidden_size": 64,
        "initializer_range": 0.1,
        **overrides,
    }
    model = model_class(config_class.from_size("tiny", mixer=mixer, **fields)).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "static_weight" in name or "lambda" in name or "factor_weight" in name:
                weight.normal_(std=0.5)
    return model


def attention_and_inputs(mixer: str, **overrides: object) -> tuple[ComposedAttention, Tensor, list[Tensor]]:
    """The second layer's attention in float64, hidden states, and its query, key and value with repeated heads."""
    model = make(mixer, **overrides).double()
    layer, hidden = model.model.layers[1].self_attn, torch.randn(2, 14, 64, dtype=torch.float64, requires_grad=True)
    query, key, value = layer.project(hidden, rotary(model, hidden))
    return layer, hidden, [query, *(heads.repeat_interleave(2, dim=1) for heads in (key, value))]


def rotary(model: PreTrainedModel, hidden: Tensor) -> tuple[Tensor, Tensor]:
    assert isinstance(model.model.rotary_emb, RotaryEmbedding)
    return model.model.rotary_emb(hidden, torch.arange(14)[None])


def formula(mixer: str, layer: ComposedAttention, hidden: Tensor, heads: list[Tensor]) -> Tensor:
    """The output of the layer before its last projection, `[B, T, E]`, by the authors' formula."""
    one = torch.eye(4, dtype=torch.float64)
    if mixer == "differential":
        part = layer.differential
        dots = [(part.lambda_q1 @ part.lambda_k1).exp(), (part.lambda_q2 @ part.lambda_k2).exp()]
        start = 0.8 - 0.6 * 2.718281828459045 ** (-0.3 * (2 - 1))  # the second layer
        output = authors.differential(*heads, dots[0] - dots[1] + start)
        wide = torch.cat(output.chunk(2, dim=2), dim=-1)  # [B, T, H/2, 2D]
        normed = wide / (wide.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() * part.norm.weight
        return (normed * (1 - start)).flatten(2)
    weights = layer.composition
    if mixer == "talking_heads":
        return authors.talking_heads(*heads, *(one + stage[0] for stage in weights.static_weight)).flatten(2)
    if mixer == "head_convolution":
        kernels = weights.static_weight[0] + torch.eye(2, dtype=torch.float64)
        return authors.head_convolution(*heads, after=kernels).flatten(2)
    generated = torch.nn.functional.gelu(hidden @ weights.hidden_weight[:, 0, 0])  # [B, T, K]
    w1, w2 = (generated @ weights.factor_weight[0, 0, :, term] for term in (0, 1))
    w1 = w1 / (w1.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt()
    return authors.modded_nanogpt(*heads, w1, w2).flatten(2)


@pytest.mark.parametrize("implementation", ["eager", "chunked"])
@pytest.mark.parametrize("mixer", OTHERS)
def test_a_layer_is_its_authors_formula(mixer: str, implementation: str) -> None:
    groups = {"compose_groups": 2} if mixer == "head_convolution" else {}
    layer, hidden, heads = attention_and_inputs(mixer, sliding_window=None, layer_types=None, **groups)
    model = layer.config
    model._attn_implementation = implementation
    embedding = RotaryEmbedding(model).double()(hidden, torch.arange(14)[None])
    output, _ = layer(hidden, embedding)
    expected = layer.o_proj(formula(mixer, layer, hidden, heads))
    inputs = [hidden, *layer.parameters()]
    upstream = torch.randn_like(output)
    gradients = [torch.autograd.grad(result, inputs, upstream, retain_graph=True) for result in (output, expected)]
    for ours, theirs in zip([output, *gradients[0]], [expected, *gradients[1]], strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-11 * float(theirs.detach().abs().max()), rtol=0)


@pytest.mark.parametrize("family", CLASSES)
@pytest.mark.parametrize("mixer", OTHERS)
@torch.no_grad()
def test_caches_saved_copies_and_implementations_give_the_same_logits(mixer: str, family: str, tmp_path: Path) -> None:
    model = make(mixer, family)
    whole, exact = model(IDS, use_cache=False).logits, copy.deepcopy(model).double()(IDS, use_cache=False).logits
    for cache in (DynamicCache(config=model.config), StaticCache(config=model.config, max_cache_len=20)):
        first = model(IDS[:, :5], past_key_values=cache).logits
        logits = torch.cat([first, decode(model, IDS[:, 5:], cache)], dim=1)
        assert_within_noise(logits, whole, exact)
    model.save_pretrained(tmp_path)
    assert torch.equal(type(model).from_pretrained(tmp_path)(IDS, use_cache=False).logits, whole)
    model.set_attn_implementation("eager")
    assert_within_noise(model(IDS, use_cache=False).logits, whole, exact)


@pytest.mark.parametrize("mixer", OTHERS)
def test_every_parameter_learns_from_the_start(mixer: str) -> None:
    """Where the mixing starts as the identity, factors that multiply zeros learn after the first update."""
    torch.manual_seed(1)
    model = DCFormerForCausalLM(DCFormerConfig.from_size("tiny", mixer=mixer))
    for _ in range(2):
        model(IDS, labels=IDS).loss.backward()
        with torch.no_grad():
            for weight in model.parameters():
                weight -= 0.1 * weight.grad
    assert not [name for name, weight in model.named_parameters() if weight.grad.abs().max() == 0]


@pytest.mark.parametrize("kv_heads", [4, 2])
@torch.no_grad()
def test_differential_dcformer_is_transformers_diff_llama(kv_heads: int) -> None:
    shared = {
        "vocab_size": 97,
        "hidden_size": 48,
        "intermediate_size": 80,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": kv_heads,
        "initializer_range": 0.2,
        "rms_norm_eps": 1e-5,
    }
    theirs = DiffLlamaForCausalLM(DiffLlamaConfig(**shared, attn_implementation="eager")).eval().double()
    fields = {"use_qk_norm": False, "sliding_window": None, "head_norm_eps": 1e-5}
    ours = DCFormerForCausalLM(DCFormerConfig(**shared, **fields, **dynattn.mixer_fields("differential")))
    weights = {
        name.replace("self_attn.lambda", "self_attn.differential.lambda"): weight
        for name, weight in theirs.state_dict().items()
    }
    missing, unexpected = ours.eval().double().load_state_dict(weights, strict=False)
    assert not unexpected
    assert all(name.endswith("differential.norm.weight") for name in missing)  # ones; DiffLlama has no scale
    expected = theirs(IDS).logits
    assert (ours(IDS).logits - expected).abs().max() <= 1e-5 * expected.abs().max()  # its lambda is rounded to float32
    assert torch.equal(
        ours.generate(IDS, max_new_tokens=8, do_sample=False, pad_token_id=0),
        theirs.generate(IDS, max_new_tokens=8, do_sample=False, pad_token_id=0),
    )


def test_a_new_model_draws_lambda_as_the_paper_does() -> None:
    model = DCFormerForCausalLM(DCFormerConfig.from_size("tiny", mixer="differential", num_hidden_layers=8))
    weights = torch.cat([weight.flatten() for name, weight in model.named_parameters() if "lambda" in name])
    assert weights.numel() == 8 * 4 * 32
    assert weights.std().item() == pytest.approx(0.1, rel=0.1) and abs(weights.mean().item()) < 0.02


def test_a_static_mixing_is_added_to_the_difference_of_pairs() -> None:
    part = make("differential").model.layers[1].self_attn.differential
    static, difference = torch.randn(4, 4), part(Composition()).static
    torch.testing.assert_close(part(Composition(static=static)).static, static + difference)


def test_lambda_in_half_precision_is_rounded_once() -> None:
    part = DifferentialHeads(DCFormerConfig.from_size("tiny", mixer="differential"), 0).bfloat16()
    with torch.no_grad():
        for name, value in (("q1", 0.5), ("k1", 0.296875), ("q2", 0.5), ("k2", 0.2890625)):
            getattr(part, f"lambda_{name}").fill_(value)
    expected = math.exp(32 * 0.5 * 0.296875) - math.exp(32 * 0.5 * 0.2890625) + 0.2
    assert -part(Composition()).static[0, 0].item() == 0 and -part(Composition()).static[2, 0].item() == pytest.approx(
        expected, rel=2**-8
    )


def test_a_mixer_stands_for_fields_and_keywords_override_them() -> None:
    config = DCFormerConfig.from_size("405m", mixer="talking_heads", compose_pre=False)
    assert (config.compose_static, config.compose_gate, config.compose_stages) == (True, False, ("post",))
    assert not config.composes_keys
    same = DCFormerConfig(
        **{**DCFormerConfig.sizes["405m"], **dynattn.mixer_fields("talking_heads")}, compose_post=True
    )
    assert same.to_dict() == DCFormerConfig.from_size("405m", mixer="talking_heads").to_dict()
    assert "mixer" not in same.to_dict()


@pytest.mark.parametrize("name", [*REFUSED, "talking"])
def test_what_is_no_mixing_of_heads_is_refused_with_the_reason(name: str) -> None:
    reason = REFUSED.get(name, "does not exist; choose from")
    with pytest.raises(ValueError, match=re.escape(f"mixer={name!r} {reason}")):
        DCFormerConfig.from_size("tiny", mixer=name)


def test_the_constructor_says_how_to_give_a_mixer() -> None:
    with pytest.raises(ValueError, match=re.escape("DCPythiaConfig(**dynattn.mixer_fields('talking_heads'), ...)")):
        DCPythiaConfig(mixer="talking_heads")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"compose_post": False}, "compose_post is False"),
        ({"compose_groups": 2}, "compose_groups (2) must be 1"),
        ({"num_key_value_heads": 1}, "num_key_value_heads (1) must be even"),
    ],
)
def test_differential_heads_need_pairs(fields: dict[str, object], message: str) -> None:
    with pytest.raises(Exception, match=re.escape(message)):
        DCFormerConfig.from_size("tiny", mixer="differential", **fields)
