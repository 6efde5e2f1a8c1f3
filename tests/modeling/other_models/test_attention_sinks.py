"""Attention sinks beside composed heads: the key that stands for them, against the definition."""

import copy

import pytest
import torch
import torch.nn.functional as F
from cases.models import assert_same_gradients
from cases.vision_models import strengthen
from torch import Tensor
from transformers import GptOssConfig, GptOssForCausalLM

from dynattn import Composition, compose_heads_of, dcmha_attention
from dynattn.modeling.layers.head_composition import PackedFactors
from dynattn.modeling.ops.dcmha.composition import unpack_factors
from dynattn.modeling.ops.dcmha.eager import compose
from dynattn.modeling.other_models.attention_sinks import CHANNELS, with_sink_key, with_visible_sink

HEADS, KEY_HEADS, WIDTH, LENGTH, SCALING = 4, 2, 6, 9, 0.3
WINDOW = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril().triu(-3)[None, None]


def random(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, requires_grad=True)


def stages_of(factors: PackedFactors) -> list[Composition]:
    """The compositions before and after the softmax, with the sink's key before all others."""
    with_sink = factors.behind_sink()
    pre = unpack_factors({"query": with_sink.pre_query, "key": with_sink.pre_key})
    return [pre, unpack_factors({"query": with_sink.post_query, "key": with_sink.post_key})]


def by_definition(query: Tensor, key: Tensor, value: Tensor, sinks: Tensor, factors: PackedFactors) -> Tensor:
    """The output `[B, T, H, D]`: sinks are further scores, without factors on the side of keys and without a value."""
    pre, post = stages_of(factors)
    key, value = (states.repeat_interleave(HEADS // KEY_HEADS, dim=1) for states in (key, value))
    scores = SCALING * query @ key.mT
    scores = torch.cat([sinks[None, :, None, None].expand(*scores.shape[:3], 1), scores], dim=3)
    composed = compose(scores, pre).masked_fill(~F.pad(WINDOW, (1, 0), value=True), -torch.inf)
    return (compose(composed.softmax(-1), post)[..., 1:] @ value).transpose(1, 2)


@pytest.mark.parametrize("implementation", ["eager", "chunked"])
def test_sinks_are_further_scores_without_values(implementation: str) -> None:
    torch.manual_seed(0)
    query, sinks = random(2, HEADS, LENGTH, WIDTH), random(HEADS)
    key, value = (random(2, KEY_HEADS, LENGTH, WIDTH) for _ in range(2))
    factors = PackedFactors(*(random(2, LENGTH, 5, HEADS) for _ in range(4)))
    pre, post = stages_of(factors)
    *states, values = with_sink_key(query, key, value, sinks, SCALING)
    found = dcmha_attention(
        *states,
        F.pad(values, (0, CHANNELS)),
        pre=pre,
        post=post,
        attention_mask=with_visible_sink(WINDOW),
        is_causal=False,
        scaling=SCALING,
        implementation=implementation,
    )[..., :WIDTH]
    expected = by_definition(query, key, value, sinks, factors)
    torch.testing.assert_close(found, expected)
    learned = [query, key, value, sinks, *factors[:4]]
    gradients = [torch.autograd.grad(output.square().sum(), learned) for output in (found, expected)]
    for ours, theirs in zip(*gradients, strict=True):
        torch.testing.assert_close(ours, theirs)


def gpt_oss() -> GptOssForCausalLM:
    torch.manual_seed(0)
    sizes = {"vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "head_dim": 8}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "sliding_window": 6}
    experts = {"num_local_experts": 4, "num_experts_per_tok": 2, "initializer_range": 0.2, "pad_token_id": 0}
    return GptOssForCausalLM(GptOssConfig(**sizes, **heads, **experts))


def test_sinks_learn_as_they_did_and_maps_are_of_keys_alone() -> None:
    ids = torch.randint(3, 97, (2, 11))
    plain = gpt_oss()
    composed = copy.deepcopy(plain)
    compose_heads_of(composed)
    outputs = [model(ids, labels=ids, output_attentions=True) for model in (plain, composed)]
    for output in outputs:
        output.loss.backward()
    for ours, theirs in zip(outputs[1].attentions, outputs[0].attentions, strict=True):
        torch.testing.assert_close(ours, theirs, check_dtype=False, atol=1e-6, rtol=1e-5)
    found = [composed.get_parameter(name).grad for name, _ in plain.named_parameters()]
    assert_same_gradients(found, [weight.grad for weight in plain.parameters()])


def test_maps_need_not_be_in_memory() -> None:
    ids = torch.randint(3, 97, (2, 11))
    model = gpt_oss()
    compose_heads_of(model)
    strengthen(model)
    chunked = gpt_oss()
    compose_heads_of(chunked, implementation="chunked")
    chunked.load_state_dict(model.state_dict())
    for each in (model, chunked):
        each(ids, labels=ids).loss.backward()
    assert_same_gradients(*([weight.grad for weight in each.parameters()] for each in (chunked, model)))
