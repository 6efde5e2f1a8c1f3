"""Results of the official DCMHA code: attention in float64 with all gradients, logits and greedy tokens of models."""

import re
from typing import Any

import pytest
import torch
from cases.golden import assert_gradients, case_names, read_case, read_meta, tensors_under
from cases.models import decode
from torch import Tensor
from transformers import PreTrainedModel

from dynattn import DCFormerConfig, DCFormerForCausalLM, DCPythiaConfig, DCPythiaForCausalLM
from dynattn.modeling.layers.composed_attention import ComposedAttention

ATTENTION_CASES = case_names("dcmha_attn_*")
MODEL_RUNS = [(case, run["tag"]) for case in case_names("dcformer_*", "dcpythia_*") for run in read_meta(case)["runs"]]

# Official key -> ours, inside one layer's attention.
COMPOSITION_KEYS = {
    "dyn_w_proj.dw1": "composition.hidden_weight",
    "dyn_w_proj.qkw": "composition.factor_weight",
    "dyn_w_proj.dd": "composition.gate_weight",
}


def attention_weights(official: dict[str, Tensor], query_wise_only: bool = False) -> dict[str, Tensor]:
    """One attention layer's official tensors under our names and shapes."""
    ours: dict[str, Tensor] = {}
    for kind in ("weight", "bias"):
        if f"wqkv.{kind}" in official:
            names = (f"q_proj.{kind}", f"k_proj.{kind}", f"v_proj.{kind}")
            ours.update(zip(names, official[f"wqkv.{kind}"].chunk(3), strict=True))
            ours[f"o_proj.{kind}"] = official[f"wo.{kind}"]
    for name in ("q_norm", "k_norm"):
        if f"{name}.scale" in official:
            ours[f"{name}.weight"] = official[f"{name}.scale"]
    for theirs, name in COMPOSITION_KEYS.items():
        weight = official[theirs]
        if theirs.endswith("dd"):
            weight = weight.unflatten(-1, (4, -1))
        component = 0 if theirs.endswith("qkw") else 1
        if query_wise_only:
            keep = torch.tensor([0, 2])
            weight = weight.index_select(1 if component == 0 else 2, keep)
        ours[name] = weight
    if "dyn_w_proj.pre_proj.w" in official:
        ours["composition.static_weight"] = torch.stack(
            [official["dyn_w_proj.pre_proj.w"], official["dyn_w_proj.post_proj.w"]]
        )
    return ours


def model_weights(tensors: dict[str, Tensor], meta: dict[str, Any], qk_norm: bool) -> dict[str, Tensor]:
    """A whole official model under our names. DCFormer's w1 is the MLP's gate, DCPythia's is its only way up."""
    official = tensors_under(tensors, "sd.")
    mlp = {"w1": "up_proj"} if meta["family"] == "dcpythia" else {"w1": "gate_proj", "w3": "up_proj", "mg": "mgate"}
    modules = {
        "tok_embeddings": "model.embed_tokens",
        "norm": "model.norm",
        "output": "lm_head",
        "attention_norm": "input_layernorm",
        "ffn_norm": "post_attention_layernorm",
        **{f"feed_forward.{theirs}": f"mlp.{name}" for theirs, name in {**mlp, "w2": "down_proj"}.items()},
    }
    ours: dict[str, Tensor] = {}
    attention: dict[str, dict[str, Tensor]] = {}
    for key, value in official.items():
        layer, rest = re.fullmatch(r"(layers\.\d+\.)?(.*)", key).groups(default="")
        prefix = f"model.{layer}" if layer else ""
        if rest.startswith("attention."):
            attention.setdefault(prefix, {})[rest.removeprefix("attention.")] = value
        else:
            module, parameter = rest.rsplit(".", 1)
            ours[f"{prefix}{modules[module]}.{parameter}"] = value
    for prefix, weights in attention.items():
        for key, value in attention_weights(weights).items():
            if qk_norm or not key.startswith(("q_norm", "k_norm")):
                ours[f"{prefix}self_attn.{key}"] = value
    return ours


def build_attention(meta: dict[str, Any], implementation: str) -> ComposedAttention:
    official = meta["config"]
    window = official["window_keys_incl_self"]
    config = DCFormerConfig(
        hidden_size=official["dim"],
        num_attention_heads=official["n_head"],
        num_hidden_layers=1,
        use_qk_norm=official["use_qk_norm"],
        sliding_window=window,
        layer_types=["full_attention" if window is None else "sliding_attention"],
        compose_static=official["use_sw"],
        compose_key_wise=not official["query_wise_only"],
        attn_implementation=implementation,
    )
    return ComposedAttention(config, layer_idx=0).double()


@pytest.mark.parametrize("implementation", ["eager", "chunked"])
@pytest.mark.parametrize("name", ATTENTION_CASES)
def test_attention_equals_the_official_one_in_float64(name: str, implementation: str) -> None:
    meta, tensors = read_case(name)
    query_wise_only = meta["config"]["query_wise_only"]
    attention = build_attention(meta, implementation)
    official = tensors_under(tensors, "sd.")
    attention.load_state_dict(attention_weights(official, query_wise_only), strict=True)
    x = tensors["x"].requires_grad_()
    cos, sin = (torch.cat([tensors[key]] * 2, dim=-1)[None].double() for key in ("rope_cos", "rope_sin"))
    output, _ = attention(x, (cos, sin))
    torch.testing.assert_close(output, tensors["y"], atol=1e-9, rtol=0)

    (output * tensors["grad_y"]).sum().backward()
    torch.testing.assert_close(x.grad, tensors["grad.x"], atol=1e-8, rtol=0)
    assert_gradients(attention, attention_weights(tensors_under(tensors, "grad."), query_wise_only))


def build_model(meta: dict[str, Any], tensors: dict[str, Tensor], run: dict[str, Any]) -> PreTrainedModel:
    base = meta["base_config"]
    windows = run.get("keys_visible_incl_self") or run["layer_windows"]
    shared = {
        "vocab_size": base["vocab_size"],
        "hidden_size": base["dim"],
        "intermediate_size": base["intermediate_size"],
        "num_hidden_layers": base["n_layer"],
        "num_attention_heads": base["n_head"],
        "max_position_embeddings": base["block_size"],
        "use_qk_norm": run["use_qk_norm"],
        "eos_token_id": None,
        "sliding_window": next((window for window in windows if window), None),
        "layer_types": ["full_attention" if window is None else "sliding_attention" for window in windows],
    }
    rope = {"rope_type": "default", "rope_theta": float(run.get("rope_base", base.get("rope_base", 1e4)))}
    model: PreTrainedModel
    if meta["family"] == "dcpythia":
        bias = base["use_linear_bias"]
        config = DCPythiaConfig(
            **shared,
            layer_norm_eps=base["norm_eps"],
            rope_parameters={**rope, "partial_rotary_factor": base["rotary_pct"]},
            use_parallel_residual=base["use_parallel_residual"],
            attention_bias=bias,
            mlp_bias=bias,
        )
        model = DCPythiaForCausalLM(config)
    else:
        mgate_dim = base.get("mgate_dim")
        model = DCFormerForCausalLM(
            DCFormerConfig(**shared, rms_norm_eps=base["norm_eps"], rope_parameters=rope, mgate_dim=mgate_dim)
        )
    model.load_state_dict(model_weights(tensors, meta, run["use_qk_norm"]), strict=True)
    return model.eval()


@pytest.mark.parametrize(("name", "tag"), MODEL_RUNS, ids=lambda value: value)
@torch.no_grad()
def test_model_equals_the_official_one(name: str, tag: str) -> None:
    meta, tensors = read_case(name)
    run = next(run for run in meta["runs"] if run["tag"] == tag)
    model = build_model(meta, tensors, run)
    ids = tensors["input_ids"]
    if f"{tag}.logits" in tensors:
        expected = tensors[f"{tag}.logits"]
        torch.testing.assert_close(model(ids).logits, expected, atol=3e-4, rtol=0)
        torch.testing.assert_close(decode(model, ids), expected, atol=3e-4, rtol=0)
        return
    prompt = ids[:, : run["prompt_len"]]
    mask = torch.ones_like(prompt)  # without it `generate` would take some prompt tokens for padding
    tokens = model.generate(
        prompt, attention_mask=mask, max_new_tokens=run["new_tokens"], do_sample=False, pad_token_id=0
    )
    expected = tensors[f"{tag}.tokens"] if f"{tag}.tokens" in tensors else tensors[f"{tag}.new_tokens"]
    assert torch.equal(tokens[:, -run["new_tokens"] :], expected[:, -run["new_tokens"] :])
