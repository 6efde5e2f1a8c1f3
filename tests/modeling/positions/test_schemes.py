"""Position schemes of DCFormer and DCPythia: each equals a model that has it, and runs in every way."""

from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from cases.golden import read_case, tensors_under
from cases.versions import crops_static_caches
from huggingface_hub.errors import StrictDataclassError
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounter
from torch.fx.experimental.proxy_tensor import make_fx
from transformers import (
    AutoModelForCausalLM,
    BloomConfig,
    BloomForCausalLM,
    DynamicCache,
    Gemma3Config,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MptConfig,
    MptForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
    RobertaConfig,
    RobertaForCausalLM,
    SmolLM3Config,
    SmolLM3ForCausalLM,
    StaticCache,
    T5Config,
)
from transformers.models.t5.modeling_t5 import T5Attention

from dynattn import (
    Composition,
    DCFormerConfig,
    DCFormerForCausalLM,
    DCPythiaConfig,
    DCPythiaForCausalLM,
    RCMHAConfig,
    RCMHAForCausalLM,
    dcmha_attention,
)
from dynattn.modeling.positions.absolute import SinusoidalEmbedding, check_learned_positions, check_position_range
from dynattn.modeling.positions.alibi import alibi_bias, alibi_slopes
from dynattn.modeling.positions.carope import ContentRotary, last_phases, pack_phases
from dynattn.modeling.positions.context_length import context_length, longest_readable
from dynattn.modeling.positions.learned_tables import DistanceTable, t5_buckets
from dynattn.modeling.positions.rotary import RotaryEmbedding, rotate
from dynattn.modeling.serving.requirements import check_positions

CPU = torch.device("cpu")
# Of models of Transformers in float64 whose norms, softmax, angles or constants are those of float32 all the same.
SINGLE = {"atol": 2e-5, "rtol": 0.0}
SHAPE = {"vocab_size": 61, "hidden_size": 48, "num_hidden_layers": 2, "max_position_embeddings": 40}
OURS = {**SHAPE, "num_attention_heads": 6, "intermediate_size": 96, "bos_token_id": None, "eos_token_id": None}
PLAIN = {"compose_pre": False, "compose_post": False, "use_qk_norm": False, "sliding_window": None}
SMALL = {**OURS, "num_key_value_heads": 3, "sliding_window": 8, "initializer_range": 0.2, "compose_init_scale": 3.0}


def pythia(**fields: Any) -> DCPythiaForCausalLM:
    common = {"use_parallel_residual": False, "tie_word_embeddings": True, "layer_norm_eps": 1e-5}
    return DCPythiaForCausalLM(DCPythiaConfig(**{**OURS, **PLAIN, **common, **fields})).double().eval()


def random_weights(model: PreTrainedModel) -> PreTrainedModel:
    torch.manual_seed(3)
    for name, weight in model.named_parameters():
        nn.init.normal_(weight, mean=float("norm" in name or "ln_" in name) * (weight.ndim == 1), std=0.2)
    return model.double().eval()


def load(model: nn.Module, weights: dict[str, Tensor], renamed: dict[str, str]) -> None:
    """Loads weights under other names; every parameter of `model` has to be among them."""
    ours = {}
    for name, weight in weights.items():
        for theirs, here in renamed.items():
            name = name.replace(theirs, here)
        ours[name] = weight
    missing, _ = model.load_state_dict(ours, strict=False)
    assert set(missing) <= {"lm_head.weight"}


def split_qkv(
    weights: dict[str, Tensor], joined: str, split: Callable[[Tensor], tuple[Tensor, ...]]
) -> dict[str, Tensor]:
    apart = {}
    for name, weight in weights.items():
        if joined not in name:
            apart[name] = weight
            continue
        for part, value in zip("qkv", split(weight), strict=True):
            apart[name.replace(joined, f"self_attn.{part}_proj")] = value
    return apart


@torch.no_grad()
def test_alibi_is_mpt_with_a_number_of_heads_that_is_no_power_of_two() -> None:
    config = MptConfig(d_model=48, n_heads=6, n_layers=2, max_seq_len=40, vocab_size=61, no_bias=True)
    parent = random_weights(MptForCausalLM(config))
    model = pythia(
        position_scheme="alibi", attention_bias=False, mlp_bias=False, hidden_act="gelu", intermediate_size=192
    )
    weights = split_qkv(parent.state_dict(), "attn.Wqkv", lambda weight: weight.chunk(3))
    weights |= {name.replace("weight", "bias"): 0 * one for name, one in weights.items() if "norm" in name}
    renamed = {
        "transformer.blocks": "model.layers",
        "transformer.norm_f": "model.norm",
        "transformer.wte": "model.embed_tokens",
    }
    renamed |= {
        "norm_1": "input_layernorm",
        "norm_2": "post_attention_layernorm",
        ".attn.out_proj": ".self_attn.o_proj",
    }
    load(model, weights, renamed | {"ffn.": "mlp."})
    ids = torch.randint(61, (2, 31))
    torch.testing.assert_close(model(ids).logits, parent(ids).logits, **SINGLE)


@torch.no_grad()
def test_alibi_is_bloom_behind_its_norm_of_embeddings() -> None:
    parent = random_weights(BloomForCausalLM(BloomConfig(vocab_size=61, hidden_size=48, n_layer=2, n_head=6)))
    model = pythia(position_scheme="alibi", hidden_act="gelu_new", intermediate_size=192)
    split = lambda one: tuple(part.flatten(0, 1) for part in one.unflatten(0, (6, 3, -1)).unbind(1))  # noqa: E731
    weights = split_qkv(parent.state_dict(), "self_attention.query_key_value", split)
    renamed = {
        "transformer.h.": "model.layers.",
        "transformer.ln_f": "model.norm",
        "transformer.word_embeddings.": "model.embed_tokens.",
    }
    renamed |= {"self_attention.dense.": "self_attn.o_proj.", "dense_h_to_4h": "up_proj", "dense_4h_to_h": "down_proj"}
    load(model, weights, renamed)
    ids = torch.randint(61, (2, 31))
    embedded = parent.transformer.word_embeddings_layernorm(parent.transformer.word_embeddings(ids))
    torch.testing.assert_close(model(inputs_embeds=embedded).logits, parent(ids).logits, **SINGLE)


@torch.no_grad()
@pytest.mark.parametrize("padded", [False, True])
def test_learned_positions_are_those_of_gpt2(padded: bool) -> None:
    config = GPT2Config(vocab_size=61, n_positions=40, n_embd=48, n_layer=2, n_head=6, n_inner=96)
    parent = random_weights(GPT2LMHeadModel(config))
    model = pythia(position_scheme="learned", hidden_act="gelu_new")
    weights = {
        name: one.t() if name.endswith("weight") and one.ndim == 2 and ("c_" in name) else one
        for name, one in parent.state_dict().items()
    }
    weights = split_qkv(weights, "attn.c_attn", lambda weight: weight.chunk(3))
    renamed = {
        "transformer.h.": "model.layers.",
        "transformer.ln_f": "model.norm",
        "transformer.wte": "model.embed_tokens",
    }
    renamed |= {
        "transformer.wpe": "model.embed_positions",
        "ln_1": "input_layernorm",
        "ln_2": "post_attention_layernorm",
    }
    load(model, weights, renamed | {".attn.c_proj": ".self_attn.o_proj", "c_fc": "up_proj", "c_proj": "down_proj"})
    ids = torch.randint(61, (2, 31))
    mask = torch.ones_like(ids)
    if padded:
        mask[1, :9] = 0
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    expected = parent(ids, attention_mask=mask, position_ids=positions).logits[mask.bool()]
    torch.testing.assert_close(model(ids, attention_mask=mask).logits[mask.bool()], expected, atol=1e-12, rtol=1e-12)


@torch.no_grad()
@pytest.mark.parametrize("rotates", [[0, 0], [1, 0], [1, 1]])
def test_schemes_of_layer_types_are_the_layers_of_smollm3(rotates: list[int]) -> None:
    """Layers without rotation through `no_rope_layers` are compared with whole models in `test_plain_equality`."""
    fields = {**OURS, "num_key_value_heads": 3, "rms_norm_eps": 1e-5}
    config = SmolLM3Config(**fields, no_rope_layers=rotates, use_sliding_window=False, pad_token_id=0)
    parent = random_weights(SmolLM3ForCausalLM(config))
    scheme: Any = "none" if rotates == [0, 0] else "rope"
    if rotates == [1, 0]:
        scheme = {"sliding_attention": "rope", "full_attention": "none"}
    types = ["sliding_attention", "full_attention"]
    layers = {"layer_types": types, "sliding_window": 1000} if rotates == [1, 0] else {"sliding_window": None}
    rope = {} if scheme == "none" else {"rope_parameters": config.rope_parameters}
    model = DCFormerForCausalLM(
        DCFormerConfig(**{**fields, **PLAIN, **layers, **rope}, position_scheme=scheme, tie_word_embeddings=True)
    )
    load(model.double().eval(), parent.state_dict(), {})
    ids = torch.randint(61, (2, 31))
    torch.testing.assert_close(model(ids).logits, parent(ids).logits, **SINGLE)


TRAINED = {"original_max_position_embeddings": 16}
ROPES: list[dict[str, Any]] = [
    {"rope_type": "default"},
    {"rope_type": "linear", "factor": 2.0},
    {"rope_type": "dynamic", "factor": 2.0},
    {"rope_type": "yarn", "factor": 4.0, **TRAINED},
    {"rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, **TRAINED},
    {"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [2.0, 3.0, 4.0, 5.0], **TRAINED},
    {"rope_type": "proportional", "partial_rotary_factor": 0.5},
]


@torch.no_grad()
@pytest.mark.parametrize("rope", ROPES, ids=lambda rope: rope["rope_type"])
@pytest.mark.parametrize("nested", [False, True])
def test_every_rope_type_is_that_of_llama_beyond_the_trained_length(rope: dict[str, Any], nested: bool) -> None:
    fields = {**OURS, "num_key_value_heads": 3, "rms_norm_eps": 1e-5, "pad_token_id": 0}
    rope = {"rope_theta": 1e4, **rope}
    parent = random_weights(LlamaForCausalLM(LlamaConfig(**fields, rope_parameters=dict(rope))))
    by_type = {"full_attention": dict(rope)} if nested else dict(rope)
    model = DCFormerForCausalLM(DCFormerConfig(**{**fields, **PLAIN}, rope_parameters=by_type))
    load(model.double().eval(), parent.state_dict(), {})
    ids = torch.randint(1, 61, (2, 55))
    torch.testing.assert_close(model(ids).logits, parent(ids).logits, **SINGLE)
    # Llama keeps keys of LongRoPE's short factors in the cache. Here they are computed again, as by Phi-3.
    options = {"use_cache": False} if rope["rope_type"] == "longrope" else {}
    ours = model.generate(ids[:, :12], max_new_tokens=40, do_sample=False)
    assert torch.equal(ours, parent.generate(ids[:, :12], max_new_tokens=40, do_sample=False, **options))


@pytest.mark.parametrize("options", [{}, {"num_beams": 3}, {"cache_implementation": "static"}], ids=str)
@pytest.mark.parametrize("pads", [0, 5])
def test_a_cache_does_not_keep_short_factors_of_longrope(options: dict[str, Any], pads: int) -> None:
    torch.manual_seed(0)
    fields = {"rope_parameters": dict(ROPES[5]), "pad_token_id": 0, "compose_init_scale": 20.0}
    model = random_weights(DCFormerForCausalLM(DCFormerConfig(**OURS, **fields)))
    ids = F.pad(torch.randint(1, 61, (2, 12)), (pads, 0))
    mask = F.pad(torch.ones(2, 12, dtype=torch.long), (pads, 0))
    mask[1, : pads + 3] = 0
    inputs = {"attention_mask": mask, "max_new_tokens": 12, "min_new_tokens": 12, "do_sample": False}
    plain = {name: value for name, value in options.items() if name != "cache_implementation"}
    expected = model.generate(ids, **inputs, **plain, use_cache=False)
    assert torch.equal(model.generate(ids, **inputs, **options), expected)


def test_assisted_decoding_does_not_keep_short_factors_of_longrope() -> None:
    model = random_weights(DCFormerForCausalLM(DCFormerConfig(**OURS, rope_parameters=dict(ROPES[5]))))
    options = {"prompt_lookup_num_tokens": 3, "do_sample": False}
    with pytest.raises(ValueError, match="assisted decoding to max_length=17 would take the keys of LongRoPE's short"):
        model.generate(torch.randint(1, 61, (1, 12)), max_length=17, **options)
    assert model.generate(torch.randint(1, 61, (1, 12)), max_length=16, **options).shape[1] <= 16


@pytest.mark.parametrize("way", ["forward pass", "new tokens alone", "prefill_chunk_size", "inputs_embeds"])
def test_tokens_that_outgrow_cached_short_factors_of_longrope_are_refused(way: str) -> None:
    model = random_weights(DCFormerForCausalLM(DCFormerConfig(**OURS, rope_parameters=dict(ROPES[5]), pad_token_id=0)))
    ids, cache = torch.randint(1, 61, (2, 18)), DynamicCache(config=model.config)
    options = {"max_new_tokens": 1, "do_sample": False, "attention_mask": torch.ones_like(ids)}
    if way in ("forward pass", "new tokens alone"):
        whole, parts = model(ids[:, :16]).logits, ids[:, :16].split((9, 7), dim=1)
        logits = [model(part, past_key_values=cache, use_cache=True).logits for part in parts]
        torch.testing.assert_close(torch.cat(logits, dim=1), whole)  # up to the border and no further
    with pytest.raises(ValueError, match=r"new tokens after 1\d cached ones would take the keys of LongRoPE"):
        if way == "forward pass":
            model(ids[:, 16:], past_key_values=cache, use_cache=True)
        elif way == "new tokens alone":
            model.generate(ids[:, 16:], past_key_values=cache, **options)
        elif way == "prefill_chunk_size":
            model.generate(ids, prefill_chunk_size=10, **options)
        else:
            embeddings = model.get_input_embeddings()(ids[:, :12])
            model.generate(inputs_embeds=embeddings, max_new_tokens=8, do_sample=False)


@pytest.mark.parametrize(("buckets", "farthest"), [(8, 20), (16, 64), (32, 128)])
def test_t5_buckets_are_those_of_the_golden_case(buckets: int, farthest: int) -> None:
    _, tensors = read_case("positions_t5_bias")
    assert torch.equal(t5_buckets(260, buckets, farthest, CPU), tensors[f"buckets.{buckets}.{farthest}"])


@pytest.mark.parametrize(("buckets", "farthest"), [(32, 25), (64, 50), (2, 2), (32, 17), (32, 128)])
def test_t5_buckets_are_those_of_t5_also_where_rounding_decides(buckets: int, farthest: int) -> None:
    distance = torch.arange(2 * farthest)
    expected = T5Attention._relative_position_bucket(-distance, False, buckets, farthest)
    assert torch.equal(t5_buckets(len(distance), buckets, farthest, CPU), expected)


@torch.no_grad()
def test_a_t5_bias_is_that_of_t5() -> None:
    config = T5Config(d_model=48, num_heads=6, d_kv=8, is_decoder=True, relative_attention_num_buckets=8)
    config.relative_attention_max_distance = 20
    parent = T5Attention(config, has_relative_attention_bias=True, layer_idx=0).double().eval()
    states = torch.randn(2, 31, 48).double()
    heads = (projection(states).unflatten(-1, (6, 8)).transpose(1, 2) for projection in (parent.q, parent.k, parent.v))
    bias = parent.relative_attention_bias.weight[t5_buckets(31, 8, 20, CPU)]
    output = parent.o(dcmha_attention(*heads, position_bias=bias, scaling=1.0).flatten(2))
    causal = torch.full((31, 31), -torch.inf).double().triu(1)[None, None]
    torch.testing.assert_close(output, parent(states, mask=causal)[0], atol=1e-12, rtol=1e-12)


def check_golden(case: str, form: str, bias: Tensor, **options: Any) -> None:
    """Compares attention with a bias, which is composed or plain as the name of its `form` says."""
    _, tensors = read_case(case)
    if form not in ("plain", "unscaled"):
        options |= {stage: Composition(**tensors_under(tensors, f"{stage}.")) for stage in ("pre", "post")}
    for implementation in ("eager", "chunked"):
        output = dcmha_attention(
            *(tensors[name] for name in ("query", "key", "value")),
            position_bias=bias,
            compose_position_bias=form == "before",
            implementation=implementation,
            **options,
        )
        torch.testing.assert_close(output, tensors[f"{form}.output"], atol=1e-12, rtol=1e-12)


@pytest.mark.parametrize("form", ["plain", "after", "before", "left_padded"])
def test_attention_with_alibi_is_that_of_the_golden_case(form: str) -> None:
    _, tensors = read_case("positions_alibi")
    mask = {"attention_mask": tensors["key_mask"][:, None, None]} if form == "left_padded" else {}
    check_golden("positions_alibi", form, alibi_bias(7, 6, CPU).double(), **mask)


@pytest.mark.parametrize("form", ["unscaled", "plain", "after", "before"])
def test_attention_with_t5_buckets_is_that_of_the_golden_case(form: str) -> None:
    _, tensors = read_case("positions_t5_bias")
    bias = tensors["table"][t5_buckets(12, 8, 20, CPU)]
    check_golden("positions_t5_bias", form, bias, scaling=1.0 if form == "unscaled" else None)


@pytest.mark.parametrize("heads", [1, 2, 3, 4, 5, 6, 8, 12, 16, 20, 32, 40])
def test_slopes_are_those_of_the_golden_case(heads: int) -> None:
    _, tensors = read_case("positions_alibi")
    torch.testing.assert_close(alibi_slopes(heads, CPU).double(), tensors[f"slopes.{heads}"], atol=0, rtol=1e-6)


def test_sinusoids_are_those_of_the_golden_case_for_any_position() -> None:
    _, tensors = read_case("positions_sinusoidal")
    table = SinusoidalEmbedding(12, scale=1.0)(torch.arange(24)[None])[0]
    torch.testing.assert_close(table.double(), tensors["table"], atol=2e-6, rtol=0)
    assert SinusoidalEmbedding(12, scale=0.5)(torch.tensor([[10**6]])).abs().max() <= 0.5


@pytest.fixture
def carope() -> tuple[ContentRotary, dict[str, Tensor]]:
    """The golden case, and a module with its weights."""
    _, tensors = read_case("positions_carope")
    module = ContentRotary(12, 2, 6, 1e4).double()
    module.load_state_dict({"frequency.weight": tensors["weight"].t(), "frequency.bias": tensors["bias"]})
    return module, tensors


@torch.no_grad()
@pytest.mark.parametrize("form", ["plain", "composed", "left_padded"])
def test_carope_is_that_of_the_golden_case(form: str, carope: tuple[ContentRotary, dict[str, Tensor]]) -> None:
    module, tensors = carope
    phases = module(tensors["x"])
    torch.testing.assert_close(phases, tensors["phase"].transpose(1, 2), atol=1e-12, rtol=1e-12)
    query, key = rotate(tensors["query"], *module.angles(phases, 2)), rotate(tensors["key"], *module.angles(phases))
    torch.testing.assert_close(query, tensors["rotated_query"], atol=1e-12, rtol=1e-12)
    torch.testing.assert_close(key, tensors["rotated_key"], atol=1e-12, rtol=1e-12)
    options: dict[str, Any] = {}
    if form == "composed":
        options = {stage: Composition(**tensors_under(tensors, f"{stage}.")) for stage in ("pre", "post")}
    if form == "left_padded":
        options["attention_mask"] = tensors["key_mask"][:, None, None]
    output = dcmha_attention(query, key, tensors["value"], implementation="eager", **options)
    shown = tensors["key_mask"] if form == "left_padded" else slice(None)
    torch.testing.assert_close(output[shown], tensors[f"{form}.output"][shown], atol=1e-12, rtol=1e-12)


def test_carope_is_differentiated_when_compiled_without_a_compiler_of_kernels() -> None:
    module, hidden = ContentRotary(16, kv_heads=2, head_dim=8, rope_theta=1e4), torch.randn(2, 5, 16)
    run = torch.compile(module, backend="aot_eager", fullgraph=True)
    expected, observed = (
        torch.autograd.grad(phases.square().sum(), list(module.parameters()))
        for phases in (module(hidden), run(hidden))
    )
    torch.testing.assert_close(observed, expected)


@torch.no_grad()
@pytest.mark.parametrize(("head_dim", "theta"), [(8, 1e4), (16, 5e5), (2, 1e4)])
def test_a_new_model_with_carope_turns_as_rope_does(head_dim: int, theta: float) -> None:
    fields = {**OURS, "head_dim": head_dim, "rope_parameters": {"rope_theta": theta}}
    model = DCFormerForCausalLM(DCFormerConfig(**fields, position_scheme="carope")).double()
    rotary, pairs = model.model.layers[1].self_attn.content_rotary, head_dim // 2
    nn.init.zeros_(rotary.frequency.weight)
    expected = torch.arange(1, 101).double()[:, None] * theta ** (-torch.arange(pairs).double() / pairs)
    phases = rotary(torch.randn(2, 100, 48).double())
    torch.testing.assert_close(phases, expected.expand(2, 6, 100, pairs), atol=0, rtol=2e-6)


@torch.no_grad()
def test_carope_does_not_count_padding_or_hidden_tokens() -> None:
    model, ids = make("carope and none"), torch.randint(1, 61, (1, 30))
    mask = torch.ones_like(ids).index_fill(1, torch.tensor([0, 1, 2, 11, 12, 29]), 0)
    shown = mask[0].bool()
    others = torch.where(shown, ids, 61 - ids)
    cache = StaticCache(config=model.config, max_cache_len=34)
    parts = [(others[:, :12], mask[:, :12]), (others[:, 12:], mask)]
    logits = torch.cat([model(part, attention_mask=seen, past_key_values=cache).logits for part, seen in parts], dim=1)
    expected = model(ids, attention_mask=mask).logits
    torch.testing.assert_close(logits[:, shown], expected[:, shown], atol=1e-11, rtol=0)
    rotary, states = model.model.layers[0].self_attn.content_rotary, torch.randn(1, 5, 48).double()
    padded = F.pad(states, (0, 0, 40_000, 0))
    assert torch.equal(rotary(padded, None, torch.arange(40_005)[None] >= 40_000)[:, :, -5:], rotary(states))


@torch.no_grad()
def test_a_cache_keeps_phases_of_half_precision() -> None:
    # The first pair turns by 1 for each token, and bfloat16 cannot count beyond 256.
    counted = ContentRotary(6, 2, 6, 1e4).bfloat16()(torch.randn(2, 300, 6).bfloat16())[..., 0]
    assert torch.equal(counted, torch.arange(1.0, 301).expand(2, 2, -1))
    key, phases = torch.randn(2, 2, 5, 6).bfloat16(), torch.rand(2, 2, 5, 3) * 3000
    cache = DynamicCache()
    cache.update(pack_phases(key, phases), key, 0)
    assert torch.equal(last_phases(cache, 0, 6, torch.float32), phases[:, :, -1:])
    # ONNX has no operation that reads bits as another dtype, and float32 needs none.
    for dtype, reads_bits in ((torch.bfloat16, True), (torch.float32, False)):
        traced = make_fx(pack_phases)(key.to(dtype), phases).graph
        assert any(node.target == torch.ops.aten.view.dtype for node in traced.nodes) == reads_bits


def test_truncated_and_power_frequencies_follow_their_formulas() -> None:
    default = 1e4 ** (-torch.arange(8) / 8)
    fields = {**OURS, "head_dim": 16}
    config = DCFormerConfig(**fields, rope_parameters={"rope_type": "power", "power_factor": 0.5})
    torch.testing.assert_close(RotaryEmbedding(config).inv_freq, default * (1 - torch.arange(8) / 8) ** 0.5)
    for length in (78, 80):  # the frequency 0.01 is just below an eighth of one turn in them, or just above
        config = DCFormerConfig(**fields, rope_parameters={"rope_type": "truncated", "truncate_length": length})
        once = 2 * torch.pi / length
        expected = [f if f >= once else once / 16 if f >= once / 8 else 0.0 for f in default.tolist()]
        torch.testing.assert_close(RotaryEmbedding(config).inv_freq, torch.tensor(expected))
        assert expected[0] == 1 and once / 16 in expected and (expected[4] == 0) == (length == 78)


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "default"},
        {"rope_type": "truncated", "truncate_length": 64},
        {"rope_type": "power", "power_factor": 0.5},
    ],
    ids=lambda rope: rope["rope_type"],
)
def test_a_new_model_of_half_precision_has_the_frequencies_of_single_precision(rope: dict[str, Any]) -> None:
    config = DCFormerConfig(**{**OURS, "head_dim": 16}, rope_parameters=rope)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    assert torch.equal(model.model.rotary_emb.inv_freq, RotaryEmbedding(config).inv_freq)


def test_rotation_in_float32_is_rounded_once() -> None:
    fields = {**OURS, "head_dim": 16}
    exact, low, plain = (
        RotaryEmbedding(DCFormerConfig(**fields, rotary_dtype=dtype)) for dtype in ("float32", "float32", None)
    )
    x, places = torch.randn(1, 2, 50, 16, dtype=torch.bfloat16), torch.arange(50)[None] + 3000
    truth = rotate(x.float(), *exact(x.float(), places))
    errors = [(rotate(x, *embedding(x, places)).float() - truth).abs().max() for embedding in (low, plain)]
    assert rotate(x, *low(x, places)).dtype == torch.bfloat16
    assert errors[0] <= truth.abs().max() * 2**-8 and errors[1] > errors[0]
    assert low(x.double(), places)[0].dtype == torch.float64


@pytest.mark.parametrize("cast", [torch.bfloat16, torch.float16])
def test_a_cast_of_the_model_leaves_frequencies_exact(cast: torch.dtype) -> None:
    rotary = DCFormerForCausalLM(DCFormerConfig(**OURS)).model.rotary_emb
    exact = rotary.inv_freq.clone()
    assert torch.equal(rotary.to(cast).float().inv_freq, exact) and rotary.inv_freq.dtype == torch.float32
    assert rotary.to("meta").inv_freq.is_meta


PLAIN_HEADS = {"compose_pre": False, "compose_post": False}
VARIANTS: dict[str, dict[str, Any]] = {
    **{
        scheme: {"position_scheme": scheme}
        for scheme in ("rope", "none", "alibi", "t5", "learned", "sinusoidal", "carope")
    },
    "mixed": {"position_scheme": {"sliding_attention": "rope", "full_attention": "none"}},
    "composed bias and gain": {
        "position_scheme": {"sliding_attention": "t5", "full_attention": "alibi"},
        "position_gain": "bucket",
        "compose_position_bias": True,
    },
    "a composed bias in some layers": {
        "position_scheme": {"sliding_attention": "rope", "full_attention": "t5"},
        "compose_position_bias": True,
    },
    "gain by distance": {"position_gain": "distance", "position_gain_length": 7},
    "plain": {"position_scheme": "alibi", "position_gain": "distance", "compose_pre": False, "compose_post": False},
    "carope and none": {"position_scheme": {"sliding_attention": "carope", "full_attention": "none"}, **PLAIN_HEADS},
    "ropes": {
        "rope_parameters": {
            "sliding_attention": {"rope_theta": 1e4},
            "full_attention": {"rope_theta": 1e5, "rope_type": "truncated", "truncate_length": 16},
        }
    },
}


def make(variant: str) -> DCFormerForCausalLM:
    torch.manual_seed(0)
    model = DCFormerForCausalLM(DCFormerConfig(**SMALL, **VARIANTS[variant])).double().eval()
    for table in (model.model.position_bias, model.model.position_gain):
        if table is not None:
            nn.init.normal_(table.weight, mean=1.0, std=0.4)
    return model


@torch.no_grad()
@pytest.mark.parametrize("variant", VARIANTS)
def test_every_way_of_running_gives_the_same_logits(variant: str) -> None:
    model, ids = make(variant), torch.randint(1, 61, (2, 30))
    model.set_attn_implementation("eager")
    expected = model(ids).logits
    model.set_attn_implementation("chunked")
    same = {"atol": 2e-6, "rtol": 0.0}  # angles are float32, and padding changes them
    torch.testing.assert_close(model(ids).logits, expected, atol=1e-11, rtol=0)
    mask = torch.ones_like(ids)
    mask[1, :9] = 0
    alone = model(ids[1:, 9:]).logits[0]
    torch.testing.assert_close(model(ids, attention_mask=mask).logits[1, 9:], alone, **same)
    for cache in (DynamicCache(config=model.config), StaticCache(config=model.config, max_cache_len=34)):
        chunks = ids.split([12, 5, *[1] * 13], dim=1)
        logits = torch.cat([model(chunk, past_key_values=cache).logits for chunk in chunks], dim=1)
        torch.testing.assert_close(logits, expected, atol=1e-11, rtol=0)
    positions = torch.cat([torch.arange(13), torch.arange(17)])[None].expand(2, -1)
    apart = torch.cat([model(part).logits for part in ids.split([13, 17], dim=1)], dim=1)
    torch.testing.assert_close(model(ids, position_ids=positions, use_cache=False).logits, apart, **same)
    found = model.generate(ids, attention_mask=mask, max_new_tokens=6, do_sample=False, pad_token_id=0)[1, -6:]
    assert torch.equal(found, model.generate(ids[1:, 9:], max_new_tokens=6, do_sample=False)[0, -6:])


@pytest.mark.parametrize("other", ["carope", "none", "alibi", "rope"])
@pytest.mark.parametrize(
    "rope",
    [{}, {"rope_theta": 100.0}, {"full_attention": {"rope_theta": 100.0}, "sliding_attention": {"rope_theta": 10.0}}],
    ids=["default", "one", "nested"],
)
def test_carope_turns_whole_heads_in_every_family(other: str, rope: dict[str, Any]) -> None:
    scheme: Any = "carope" if other == "carope" else {"full_attention": "carope", "sliding_attention": other}
    fields = {**OURS, "head_dim": 16, "position_scheme": scheme}
    config = DCPythiaConfig(**fields, rope_parameters=rope)
    assert config.rope_of("full_attention")["partial_rotary_factor"] == 1.0
    if other == "rope":
        assert config.rope_of("sliding_attention")["partial_rotary_factor"] == 0.25
    assert config.rope_of("full_attention")["rope_theta"] == (100.0 if rope else 10_000.0)
    assert DCPythiaConfig(**config.to_dict()).to_dict() == config.to_dict()


def test_carope_needs_a_base_above_one() -> None:
    with pytest.raises(ValueError, match=r"rope_theta \(1.0\) must be greater than 1 for 'carope'"):
        DCFormerConfig(**OURS, position_scheme="carope", rope_parameters={"rope_theta": 1.0})


@torch.no_grad()
def test_a_cache_that_was_allocated_for_keys_alone_takes_phases_too() -> None:
    """As `generate(cache_implementation="static", prefill_chunk_size=12)` allocates it."""
    model, ids = make("carope and none"), torch.randint(1, 61, (2, 30))
    cache = StaticCache(config=model.config, max_cache_len=34)
    cache.early_initialization(2, model.config.num_key_value_heads, model.config.head_dim, torch.float64, ids.device)
    logits = torch.cat([model(chunk, past_key_values=cache).logits for chunk in ids.split(12, dim=1)], dim=1)
    torch.testing.assert_close(logits, model(ids).logits, atol=1e-11, rtol=0)


@pytest.mark.parametrize("kind", [DynamicCache, pytest.param(StaticCache, marks=crops_static_caches)])
@torch.no_grad()
def test_a_cache_that_was_emptied_and_is_not_full_goes_on_from_its_last_phases(kind: Any) -> None:
    model, ids = make("carope"), torch.randint(1, 61, (2, 30))
    cache = kind(config=model.config, **({"max_cache_len": 34} if kind is StaticCache else {}))
    model(ids[:, -3:], past_key_values=cache)
    cache.crop(-3)
    logits = torch.cat([model(chunk, past_key_values=cache).logits for chunk in ids.split(5, dim=1)], dim=1)
    torch.testing.assert_close(logits, model(ids).logits, atol=1e-11, rtol=0)


@pytest.mark.parametrize("variant", VARIANTS)
def test_checkpoints_keep_the_scheme_and_checkpointing_its_gradients(variant: str, tmp_path: Any) -> None:
    model, ids = make(variant), torch.randint(1, 61, (2, 30))
    model.save_pretrained(tmp_path)
    again = DCFormerForCausalLM.from_pretrained(tmp_path, dtype=torch.float64)
    expected = model(ids, labels=ids).loss
    torch.testing.assert_close(again(ids, labels=ids).loss, expected, atol=0, rtol=0)
    expected.backward()
    again.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    again.train()(ids, labels=ids).loss.backward()
    for (name, ours), theirs in zip(model.named_parameters(), again.parameters(), strict=True):
        torch.testing.assert_close(theirs.grad, ours.grad, atol=1e-12, rtol=1e-9, msg=name)


@pytest.mark.parametrize("options", [{"use_reentrant": True}, {"use_reentrant": None}, {}])
def test_learned_tables_refuse_checkpointing_in_which_layers_share_nothing(options: dict[str, Any]) -> None:
    """PEFT's `prepare_model_for_kbit_training` gives no options, which leaves the choice to PyTorch."""
    model, ids = make("composed bias and gain").train(), torch.randint(1, 61, (2, 30))
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=options)
    with pytest.raises(ValueError, match=r"use_reentrant=True.* cannot .* give {.use_reentrant.: False} where"):
        model(ids, labels=ids)
    with torch.no_grad():
        assert model(ids, labels=ids).loss.isfinite()
    assert model.eval()(ids, labels=ids).loss.isfinite()


def test_wrapped_tables_refuse_it_too() -> None:
    """PEFT wraps tables that `modules_to_save` names."""
    model, ids = make("composed bias and gain").train(), torch.randint(1, 61, (2, 30))
    body = model.model
    body.position_bias, body.position_gain = nn.Sequential(body.position_bias), nn.Sequential(body.position_gain)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": True})
    with pytest.raises(ValueError, match=r"use_reentrant=True.* cannot"):
        model(ids, labels=ids)


def test_beams_and_removed_tokens_keep_distances() -> None:
    model, ids = make("composed bias and gain"), torch.randint(1, 61, (2, 6))
    tokens = [
        model.generate(ids, max_new_tokens=8, num_beams=3, do_sample=False, use_cache=use_cache)
        for use_cache in (True, False)
    ]
    assert torch.equal(*tokens)


def test_a_gain_starts_as_one_and_tables_are_not_decayed() -> None:
    config = DCFormerConfig(**SMALL, position_scheme="t5", position_gain="distance")
    model = DCFormerForCausalLM(config).model
    assert torch.equal(model.position_gain.weight, torch.ones(40, 6)) and model.position_bias.weight.std() > 0.05
    short = DCFormerForCausalLM(DCFormerConfig(**SMALL, position_gain="distance", position_gain_length=7)).model
    assert short.position_gain.weight.shape == (7, 6)
    buckets = {"t5_num_buckets": 8, "t5_max_distance": 20}
    gain = DCFormerForCausalLM(DCFormerConfig(**SMALL, position_gain="bucket", **buckets)).model.position_gain
    nn.init.normal_(gain.weight)
    assert torch.equal(gain(40), gain.weight[t5_buckets(40, 8, 20, CPU)])
    assert model.bfloat16().position_bias(5).dtype == torch.float32
    assert isinstance(model.position_bias, nn.Embedding)  # whose weights optimizers leave undecayed


@pytest.mark.parametrize(("given", "scale"), [(None, 0.2), (1.5, 1.5), (0.0, 0.0)])
def test_sinusoids_are_as_large_as_new_embeddings_unless_told_otherwise(given: float | None, scale: float) -> None:
    model = DCFormerForCausalLM(DCFormerConfig(**SMALL, position_scheme="sinusoidal", position_scale=given)).model
    positions = model.embed_positions(torch.arange(9)[None])
    torch.testing.assert_close(positions[0, 0], torch.cat([torch.zeros(24), torch.full((24,), scale)]))


def test_phases_of_a_quantized_cache_are_refused() -> None:
    layer = SimpleNamespace(is_initialized=True, _quantized_keys=torch.zeros(1))
    with pytest.raises(ValueError, match="keeps phases in its cache, which a quantized one would round"):
        last_phases(SimpleNamespace(layers=[layer]), 0, 8, torch.float32)


@torch.no_grad()
def compiled_steps(scheme: str) -> int:
    """Checks the logits of compiled steps until a window is full and beyond; returns how many graphs they have."""
    torch.compiler.reset()
    sizes = {**SMALL, "num_hidden_layers": 1, "layer_types": ["sliding_attention"]}
    model = DCFormerForCausalLM(DCFormerConfig(**sizes, position_scheme=scheme)).eval()
    ids = torch.randint(1, 61, (2, 12))
    cache = StaticCache(config=model.config, max_cache_len=16)
    model(ids[:, :2], past_key_values=cache)
    counter = CompileCounter()
    step = torch.compile(model, fullgraph=True, backend=counter)
    logits = [step(token, past_key_values=cache).logits for token in ids[:, 2:].split(1, dim=1)]
    torch.testing.assert_close(torch.cat(logits, dim=1), model(ids).logits[:, 2:], atol=1e-4, rtol=0)
    return counter.frame_count


@pytest.mark.slow
def test_compiled_steps_with_carope_have_as_many_graphs_as_with_rope() -> None:
    # Graphs of the first length, of all others and of a full window. Only other versions of PyTorch and Transformers
    # may make others with rope, which takes as long to trace.
    graphs = compiled_steps("carope")
    assert graphs == 3 or graphs == compiled_steps("rope") < 6


@pytest.mark.parametrize("mask", [None, torch.ones(0, 9)])
def test_a_batch_without_rows_has_no_learned_positions_to_check(mask: Tensor | None) -> None:
    model = DCFormerForCausalLM(DCFormerConfig(**SMALL, position_scheme="learned"))
    assert model(torch.ones(0, 9, dtype=torch.long), attention_mask=mask).logits.shape[:2] == (0, 9)


def test_learned_positions_end_with_their_table() -> None:
    model = DCFormerForCausalLM(DCFormerConfig(**SMALL, position_scheme="learned"))
    with pytest.raises(ValueError, match=r"needs 41 learned positions, but there are max_position_embeddings \(40\)"):
        model(torch.ones(1, 41, dtype=torch.long))
    for cache in (DynamicCache(config=model.config), StaticCache(config=model.config, max_cache_len=50)):
        model(torch.ones(1, 39, dtype=torch.long), past_key_values=cache)
        model(torch.ones(1, 1, dtype=torch.long), past_key_values=cache)
        with pytest.raises(ValueError, match="a segment of 1 tokens after 40 others needs 41 learned positions"):
            model(torch.ones(1, 1, dtype=torch.long), past_key_values=cache)


def test_distances_beyond_the_last_row_take_it() -> None:
    by_distance = DistanceTable(4, 2, mean=0.0, std=1.0)
    assert torch.equal(by_distance(7), by_distance.weight[[0, 1, 2, 3, 3, 3, 3]])
    buckets = DistanceTable(8, 2, mean=0.0, std=1.0, max_distance=16)
    # Of eight buckets four hold one distance each, and the others grow by the root of 2.
    assert torch.equal(buckets(18), buckets.weight[[0, 1, 2, 3, 4, 4, 5, 5, 6, 6, 6, 6, *[7] * 6]])


@pytest.mark.parametrize(
    ("length", "past_tokens", "position_ids", "message"),
    [
        (2, 6, [[6, 7]], None),
        (2, 6, [[7, 8]], r"a segment of 2 tokens after 6 others needs 9 learned positions"),
        (1, 8, [[7]], None),  # padding is not counted
        (1, 8, [[8]], r"a segment of 1 tokens after 8 others needs 9 learned positions"),
        (2, 0, [[0, -1]], r"position_ids has -1; learned positions count from 0"),
    ],
)
def test_positions_are_rows_of_the_table(
    length: int, past_tokens: int, position_ids: list[list[int]], message: str | None
) -> None:
    with nullcontext() if message is None else pytest.raises(ValueError, match=message):
        check_learned_positions(length, past_tokens, torch.tensor(position_ids), limit=8)


@pytest.mark.parametrize(
    ("length", "past_tokens", "reads"), [(1, 7, False), (1, 8, True), (2, 7, True), (5, None, False)]
)
def test_positions_are_read_only_where_they_may_be_beyond_the_table(
    length: int, past_tokens: int | None, reads: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor on the meta device, where there is nothing to read."""
    position_ids, seen = torch.zeros(1, length, dtype=torch.long), []
    monkeypatch.setattr(Tensor, "tolist", lambda tensor: seen.append(tensor) or [0, 0])
    check_learned_positions(length, past_tokens, position_ids.to("meta"), limit=8)
    assert not seen
    check_learned_positions(length, past_tokens, position_ids, limit=8)
    assert bool(seen) == reads


def test_tables_limit_what_a_model_can_read() -> None:
    assert longest_readable(DCFormerConfig(position_scheme="learned", max_position_embeddings=48)) == 48
    assert longest_readable(DCFormerConfig(max_position_embeddings=48)) is None
    assert longest_readable(GPT2Config(n_positions=32)) == 32


@torch.no_grad()
def test_relative_positions_limit_what_a_model_without_a_window_can_read() -> None:
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    windowed = RCMHAConfig(**sizes, mem_len=3, max_position_embeddings=6)
    assert longest_readable(windowed) is None
    RCMHAForCausalLM(windowed)(torch.arange(20)[None])
    for fields in ({"mem_len": None}, {"mem_len": 3, "memory_type": "segment"}):
        config = RCMHAConfig(**sizes, **fields, max_position_embeddings=6)
        assert longest_readable(config) == 6
        with pytest.raises(ValueError, match="tables end at max_position_embeddings"):
            RCMHAForCausalLM(config)(torch.arange(7)[None])


@pytest.mark.parametrize(
    ("config", "length"),
    [
        (RobertaConfig(max_position_embeddings=34, pad_token_id=1), 32),  # 514 and 512 in the published models
        (Gemma3Config(text_config={"max_position_embeddings": 32}), 32),
        (BloomConfig(), None),
    ],
    ids=["positions behind the padding token", "a decoder that sees pictures", "ALiBi"],
)
def test_the_context_is_that_of_the_decoder(config: PreTrainedConfig, length: int | None) -> None:
    assert context_length(config) == length


@torch.no_grad()
def test_types_whose_positions_begin_behind_the_padding_token_read_just_their_context() -> None:
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
    config = RobertaConfig(**sizes, vocab_size=20, max_position_embeddings=12, pad_token_id=1, is_decoder=True)
    model, longest = RobertaForCausalLM(config), longest_readable(config)
    model(torch.full((1, longest), 5))
    with pytest.raises(RuntimeError, match="out of bounds"):
        model(torch.full((1, longest + 1), 5))


def test_positions_are_not_read_while_tracing() -> None:
    def check(position_ids: Tensor) -> Tensor:
        check_learned_positions(2, 0, position_ids, 8)
        check_position_range(position_ids, 8)
        return position_ids + 1

    compiled = torch.compile(check, backend="eager", fullgraph=True)
    assert compiled(torch.tensor([[0, 1]])).tolist() == [[1, 2]]


@pytest.mark.parametrize("name", ["sdpa", "flash_attention_2", "flex_attention"])
@pytest.mark.parametrize("fields", [{"position_scheme": "alibi"}, {"position_gain": "bucket"}])
def test_attention_that_would_ignore_tables_is_refused(name: str, fields: dict[str, Any]) -> None:
    config = DCFormerConfig(**OURS, **PLAIN, **fields, attn_implementation=name)
    with pytest.raises(ValueError, match=f"attn_implementation='{name}' would ignore the tables"):
        DCFormerForCausalLM(config)


def test_paged_caches_are_refused_where_phases_or_the_longest_request_matter() -> None:
    assert not DCFormerForCausalLM(DCFormerConfig(**SMALL, position_scheme="carope")).supports_paged_cache
    with pytest.raises(ValueError, match="needs more of earlier tokens than a paged cache keeps"):
        check_positions(DCFormerConfig(**SMALL, position_scheme="carope"))
    for scheme in ("none", "alibi", "t5", "learned"):
        assert DCFormerForCausalLM(DCFormerConfig(**SMALL, position_scheme=scheme)).supports_paged_cache
        check_positions(DCFormerConfig(**SMALL, position_scheme=scheme, position_gain="bucket"))
    nested = {"full_attention": dict(ROPES[5]), "sliding_attention": {"rope_theta": 1e4}}
    with pytest.raises(ValueError, match="rope_type 'longrope' rotates all tokens of a batch"):
        check_positions(DCFormerConfig(**SMALL, rope_parameters=nested))
    unread = {"full_attention": "none", "sliding_attention": "rope"}
    check_positions(DCFormerConfig(**SMALL, rope_parameters=nested, position_scheme=unread))


@pytest.mark.parametrize("rope_type", ["dynamic", "longrope"])
def test_scores_that_depend_on_the_batch_are_told(rope_type: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from dynattn.modeling.positions import rotary

    told: list[str] = []
    monkeypatch.setattr(rotary.logger, "warning_once", told.append)
    rope = next(rope for rope in ROPES if rope["rope_type"] == rope_type)
    RotaryEmbedding(DCFormerConfig(**OURS, rope_parameters=dict(rope)))
    assert len(told) == 1 and f"rope_type {rope_type!r} rotates all tokens of a batch by angles that depend" in told[0]


MISTAKES: list[tuple[dict[str, Any], str]] = [
    ({"position_scheme": "abili"}, r"position_scheme 'abili' does not exist; choose from \('rope', 'none'"),
    ({"position_scheme": {"full_attention": "none"}}, r"has the layer types \['full_attention'\], but the model has"),
    (
        {"position_scheme": {"full_attention": "none", "sliding_attention": "learned"}},
        "position_scheme 'learned' acts on embeddings",
    ),
    ({"position_scheme": "sinusoidal", "hidden_size": 49, "head_dim": 8}, r"hidden_size \(49\) must be even for sinus"),
    (
        {"position_scheme": "carope", "rope_parameters": {"rope_type": "linear", "factor": 2.0}},
        "do not go with position_scheme 'carope'",
    ),
    (
        {"position_scheme": "carope", "rope_parameters": {"partial_rotary_factor": 0.5}},
        r"rotate whole heads \(partial_rotary_factor 1.0\)",
    ),
    ({"position_gain": "rows"}, "position_gain 'rows' does not exist; choose from"),
    ({"rotary_dtype": "bfloat16"}, "rotary_dtype 'bfloat16' does not exist; choose from"),
    ({"compose_position_bias": True}, "needs a position_scheme with a bias"),
    ({"t5_num_buckets": 5}, r"t5_num_buckets \(5\) must be even"),
    ({"t5_num_buckets": 0}, r"t5_num_buckets \(0\) must be at least 2"),
    ({"t5_max_distance": 16}, r"t5_max_distance \(16\) must be greater than half of t5_num_buckets \(32\)"),
    ({"position_gain_length": 0}, r"position_gain_length \(0\) must be at least 1"),
]


@pytest.mark.parametrize(("fields", "message"), MISTAKES, ids=[message for _, message in MISTAKES])
@pytest.mark.parametrize("config_class", [DCFormerConfig, DCPythiaConfig])
def test_each_mistake_has_a_clear_error(config_class: type, fields: dict[str, Any], message: str) -> None:
    with pytest.raises((StrictDataclassError, ValueError), match=message):
        config_class(**{**OURS, **fields})


def test_a_configuration_without_the_fields_stays_what_it_was() -> None:
    old = DCFormerConfig(**OURS).to_dict()
    for field in ("position_scheme", "position_gain", "rotary_dtype", "t5_num_buckets", "compose_position_bias"):
        old.pop(field)
    config = DCFormerConfig.from_dict(old)
    assert config.position_scheme == "rope" and not config.has_distance_tables
    assert config.to_dict() == DCFormerConfig(**OURS).to_dict()


def test_only_what_rotates_needs_pairs() -> None:
    config = DCFormerConfig(**{**OURS, "head_dim": 7}, position_scheme="none")
    assert DCFormerForCausalLM(config)(torch.ones(1, 9, dtype=torch.long)).logits.isfinite().all()
    with pytest.raises((StrictDataclassError, ValueError), match=r"head_dim \(7\) must be even"):
        DCFormerConfig(**{**OURS, "head_dim": 7})
