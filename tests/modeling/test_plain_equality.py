"""With composition off a DCFormer has the logits of Llama and of models like it, and a DCPythia those of GPT-NeoX."""

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    Exaone4Config,
    Exaone4ForCausalLM,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForQuestionAnswering,
    Olmo3Config,
    Olmo3ForCausalLM,
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForCausalLM,
    SmolLM3Config,
    SmolLM3ForCausalLM,
)

from dynattn import (
    DCFormerConfig,
    DCFormerForCausalLM,
    DCFormerForQuestionAnswering,
    DCPythiaConfig,
    DCPythiaForCausalLM,
)

SHARED = {
    "vocab_size": 101,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "initializer_range": 0.2,
    "rms_norm_eps": 1e-3,  # not the default of any class
}
SLIDING = ["full_attention", "sliding_attention", "sliding_attention"]
ROPE = {"rope_type": "default", "rope_theta": 500.0}
PARENTS: dict[str, tuple[type, type, dict[str, Any], dict[str, Any]]] = {
    "llama": (LlamaConfig, LlamaForCausalLM, {}, {"sliding_window": None}),
    "llama-bias-tied": (
        LlamaConfig,
        LlamaForCausalLM,
        {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True},
        {"sliding_window": None, "attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True},
    ),
    "llama-yarn": (
        LlamaConfig,
        LlamaForCausalLM,
        {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0}},
        {"sliding_window": None, "rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0}},
    ),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM, {"head_dim": 24}, {"head_dim": 24, "sliding_window": None}),
    "qwen3-sliding": (
        Qwen3Config,
        Qwen3ForCausalLM,
        {"head_dim": 16, "use_sliding_window": True, "sliding_window": 7, "layer_types": SLIDING},
        {"head_dim": 16, "sliding_window": 7, "layer_types": SLIDING},
    ),
    "smollm3": (
        SmolLM3Config,
        SmolLM3ForCausalLM,
        {"no_rope_layers": [1, 0, 1], "pad_token_id": None, "tie_word_embeddings": False, "rope_parameters": ROPE},
        {"no_rope_layers": [1, 0, 1], "sliding_window": None, "rope_parameters": ROPE},
    ),
    "exaone4": (
        Exaone4Config,
        Exaone4ForCausalLM,
        {"head_dim": 16, "sliding_window": 7, "layer_types": SLIDING, "rope_parameters": ROPE},
        {
            "sliding_window": 7,
            "layer_types": SLIDING,
            "rope_parameters": ROPE,
            "norm_placement": "output",
            "no_rope_layers": [0, 1, 1],
        },
    ),
    "olmo3": (
        Olmo3Config,
        Olmo3ForCausalLM,
        {"sliding_window": 7, "layer_types": SLIDING, "rope_parameters": dict.fromkeys(SLIDING, ROPE)},
        {
            "sliding_window": 7,
            "layer_types": SLIDING,
            "rope_parameters": ROPE,
            "norm_placement": "output",
            "qk_norm_type": "joint_rms_norm",
        },
    ),
}


NEOX_MODULES = {
    "gpt_neox.embed_in": "model.embed_tokens",
    "gpt_neox.final_layer_norm": "model.norm",
    "gpt_neox.": "model.",
    "attention.dense.": "self_attn.o_proj.",
    "mlp.dense_h_to_4h": "mlp.up_proj",
    "mlp.dense_4h_to_h": "mlp.down_proj",
}


def from_neox(weights: dict[str, Tensor], heads: int) -> dict[str, Tensor]:
    """GPT-NeoX keeps query, key and value of a head together."""
    ours = {}
    for key, value in weights.items():
        if ".attention.query_key_value." in key:
            parts = value.unflatten(0, (heads, 3, -1)).unbind(1)
            for name, part in zip(("q_proj", "k_proj", "v_proj"), parts, strict=True):
                there = key.replace("gpt_neox", "model").replace("attention.query_key_value", f"self_attn.{name}")
                ours[there] = part.flatten(0, 1)
            continue
        for theirs, name in NEOX_MODULES.items():
            key = key.replace(theirs, name)
        ours[key] = value
    return ours


def make_neox_pair(name: str, implementation: str) -> tuple[PreTrainedModel, PreTrainedModel]:
    shape = {k: v for k, v in SHARED.items() if k not in ("num_key_value_heads", "rms_norm_eps")}
    shape["layer_norm_eps"] = SHARED["rms_norm_eps"]
    shape["use_parallel_residual"] = name != "neox-sequential"
    shape["attention_bias"] = name != "neox-no-bias"
    rope = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5 if name == "neox" else 1.0}
    parent = GPTNeoXForCausalLM(GPTNeoXConfig(**shape, rope_parameters=rope, attn_implementation=implementation))
    config = DCPythiaConfig(
        **shape,
        rope_parameters=rope,
        sliding_window=None,
        use_qk_norm=False,
        compose_pre=False,
        compose_post=False,
        attn_implementation=implementation,
    )
    model = DCPythiaForCausalLM(config).eval()
    model.load_state_dict(from_neox(parent.state_dict(), SHARED["num_attention_heads"]), strict=True)
    return parent.eval(), model


def make_pair(name: str, implementation: str) -> tuple[PreTrainedModel, PreTrainedModel]:
    if name.startswith("neox"):
        return make_neox_pair(name, implementation)
    config_class, model_class, theirs, ours = PARENTS[name]
    parent = model_class(config_class(**SHARED, **theirs, attn_implementation=implementation)).eval()
    qk_norm = {"use_qk_norm": name.startswith(("qwen3", "exaone4", "olmo3")), "qk_norm_eps": SHARED["rms_norm_eps"]}
    off = {"compose_pre": False, "compose_post": False}
    config = DCFormerConfig(**{**SHARED, **ours, **qk_norm, **off}, attn_implementation=implementation)
    model = DCFormerForCausalLM(config).eval()
    model.load_state_dict(parent.state_dict(), strict=True)
    return parent, model


def assert_same(ours: Tensor, theirs: Tensor) -> None:
    torch.testing.assert_close(ours, theirs, atol=2e-5 * float(theirs.abs().max()), rtol=0)


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
@pytest.mark.parametrize("name", [*PARENTS, "neox", "neox-sequential", "neox-no-bias"])
@torch.no_grad()
def test_same_logits_in_every_way_of_running(name: str, implementation: str) -> None:
    parent, model = make_pair(name, implementation)
    ids = torch.randint(0, 101, (3, 20))
    assert_same(model(ids).logits, parent(ids).logits)

    for mask in (padding_mask([0, 5, 11], "left"), padding_mask([0, 5, 11], "right")):
        positions = (mask.cumsum(-1) - 1).clamp(min=0)
        inputs = {"input_ids": ids, "attention_mask": mask, "position_ids": positions}
        real = mask.bool()
        assert_same(model(**inputs).logits[real], parent(**inputs).logits[real])

    ours, theirs = (net(ids[:, :6], use_cache=True) for net in (model, parent))
    for step in range(6, 20):
        ours = model(ids[:, step : step + 1], past_key_values=ours.past_key_values)
        theirs = parent(ids[:, step : step + 1], past_key_values=theirs.past_key_values)
        assert_same(ours.logits, theirs.logits)


def padding_mask(pads: list[int], side: str) -> Tensor:
    length = 20
    positions = torch.arange(length)
    rows = [positions >= pad if side == "left" else positions < length - pad for pad in pads]
    return torch.stack(rows).long()


@pytest.mark.parametrize("name", ["qwen3-sliding", "exaone4", "olmo3"])
def test_same_gradients(name: str) -> None:
    parent, model = make_pair(name, "eager")
    ids = torch.randint(0, 101, (2, 20))
    for net in (parent, model):
        net(ids, labels=ids).loss.backward()
    theirs = dict(parent.named_parameters())
    for name, parameter in model.named_parameters():
        assert_same(parameter.grad, theirs[name].grad)


@torch.no_grad()
def test_ends_of_answers_are_scored_as_in_llama() -> None:
    parent = LlamaForQuestionAnswering(LlamaConfig(**SHARED)).eval()
    off = {"compose_pre": False, "compose_post": False, "use_qk_norm": False, "sliding_window": None}
    model = DCFormerForQuestionAnswering(DCFormerConfig(**SHARED, **off)).eval()
    weights = {name.replace("transformer.", "model."): weight for name, weight in parent.state_dict().items()}
    model.load_state_dict(weights, strict=True)
    ids, answers = torch.randint(0, 101, (3, 20)), {"start_positions": torch.tensor([2, 0, 20])}
    given = {"attention_mask": padding_mask([0, 5, 11], "right"), **answers, "end_positions": torch.tensor([4, 0, 20])}
    ours, theirs = (net(ids, **given) for net in (model, parent))
    for name in ("loss", "start_logits", "end_logits"):
        assert_same(ours[name], theirs[name])


def test_default_implementation_is_sdpa_without_composition() -> None:
    _, model = make_pair("llama", "sdpa")
    assert DCFormerForCausalLM(model.config).config._attn_implementation == "sdpa"
