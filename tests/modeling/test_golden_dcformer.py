"""The official code's own numbers: attention in float64 with every gradient, logits and greedy tokens of whole models."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from dynattn import DCFormerConfig, DCFormerForCausalLM
from dynattn.modeling.modeling_dcformer import DCFormerAttention
from safetensors.torch import load_file
from torch import Tensor

GOLDEN = Path(__file__).parent.parent / "golden"
ATTENTION_CASES = sorted(path.name for path in GOLDEN.glob("dcmha_attn_*"))
MODEL_RUNS = [
    (case.name, run["tag"])
    for case in sorted(GOLDEN.glob("dcformer_*"))
    for run in json.loads((case / "meta.json").read_text())["runs"]
]

# Official key -> ours, inside one layer's attention.
COMPOSITION_KEYS = {
    "dyn_w_proj.dw1": "composition.hidden_weight",
    "dyn_w_proj.qkw": "composition.factor_weight",
    "dyn_w_proj.dd": "composition.gate_weight",
}


def read_case(name: str) -> tuple[dict[str, Any], dict[str, Tensor]]:
    folder = GOLDEN / name
    return json.loads((folder / "meta.json").read_text()), load_file(folder / "tensors.safetensors")


def attention_weights(official: dict[str, Tensor], query_wise_only: bool = False) -> dict[str, Tensor]:
    """One attention layer's official tensors under our names and shapes."""
    ours = dict(zip(("q_proj.weight", "k_proj.weight", "v_proj.weight"), official["wqkv.weight"].chunk(3), strict=True))
    ours["o_proj.weight"] = official["wo.weight"]
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


def model_weights(tensors: dict[str, Tensor], layers: int, qk_norm: bool) -> dict[str, Tensor]:
    official = {key.removeprefix("sd."): value for key, value in tensors.items() if key.startswith("sd.")}
    ours = {
        "model.embed_tokens.weight": official["tok_embeddings.weight"],
        "model.norm.weight": official["norm.weight"],
        "lm_head.weight": official["output.weight"],
    }
    for index in range(layers):
        here, there = f"layers.{index}.", f"model.layers.{index}."
        layer = {key.removeprefix(here): value for key, value in official.items() if key.startswith(here)}
        names = {"w1": "gate_proj", "w3": "up_proj", "w2": "down_proj", "mg": "mgate"}
        for theirs, name in names.items():
            if f"feed_forward.{theirs}.weight" in layer:
                ours[f"{there}mlp.{name}.weight"] = layer[f"feed_forward.{theirs}.weight"]
        ours[f"{there}input_layernorm.weight"] = layer["attention_norm.weight"]
        ours[f"{there}post_attention_layernorm.weight"] = layer["ffn_norm.weight"]
        attention = {k.removeprefix("attention."): v for k, v in layer.items() if k.startswith("attention.")}
        for key, value in attention_weights(attention).items():
            if qk_norm or not key.startswith(("q_norm", "k_norm")):
                ours[f"{there}self_attn.{key}"] = value
    return ours


def build_attention(meta: dict[str, Any]) -> DCFormerAttention:
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
        attn_implementation="eager",
    )
    return DCFormerAttention(config, layer_idx=0).double()


@pytest.mark.parametrize("name", ATTENTION_CASES)
def test_attention_equals_the_official_one_in_float64(name: str) -> None:
    meta, tensors = read_case(name)
    query_wise_only = meta["config"]["query_wise_only"]
    attention = build_attention(meta)
    official = {key.removeprefix("sd."): value for key, value in tensors.items() if key.startswith("sd.")}
    attention.load_state_dict(attention_weights(official, query_wise_only), strict=True)
    x = tensors["x"].requires_grad_()
    cos, sin = (torch.cat([tensors[key]] * 2, dim=-1)[None].double() for key in ("rope_cos", "rope_sin"))
    output, _ = attention(x, (cos, sin))
    torch.testing.assert_close(output, tensors["y"], atol=1e-9, rtol=0)

    (output * tensors["grad_y"]).sum().backward()
    torch.testing.assert_close(x.grad, tensors["grad.x"], atol=1e-8, rtol=0)
    official = {key.removeprefix("grad."): value for key, value in tensors.items() if key.startswith("grad.")}
    expected = attention_weights(official, query_wise_only)
    assert expected.keys() == dict(attention.named_parameters()).keys()
    for key, parameter in attention.named_parameters():
        torch.testing.assert_close(parameter.grad, expected[key], atol=1e-8, rtol=0, msg=lambda m, k=key: f"{k}: {m}")


def build_model(meta: dict[str, Any], tensors: dict[str, Tensor], run: dict[str, Any]) -> DCFormerForCausalLM:
    base = meta["base_config"]
    windows = run.get("keys_visible_incl_self") or run["layer_windows"]
    config = DCFormerConfig(
        vocab_size=base["vocab_size"],
        hidden_size=base["dim"],
        intermediate_size=base["intermediate_size"],
        num_hidden_layers=base["n_layer"],
        num_attention_heads=base["n_head"],
        max_position_embeddings=base["block_size"],
        rms_norm_eps=base["norm_eps"],
        rope_parameters={"rope_type": "default", "rope_theta": float(run.get("rope_base", base.get("rope_base", 1e4)))},
        use_qk_norm=run["use_qk_norm"],
        mgate_dim=base.get("mgate_dim"),
        sliding_window=next((window for window in windows if window), None),
        layer_types=["full_attention" if window is None else "sliding_attention" for window in windows],
    )
    model = DCFormerForCausalLM(config).eval()
    model.load_state_dict(model_weights(tensors, base["n_layer"], run["use_qk_norm"]), strict=True)
    return model


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
        torch.testing.assert_close(step_by_step(model, ids), expected, atol=3e-4, rtol=0)
        return
    prompt = ids[:, : run["prompt_len"]]
    mask = torch.ones_like(prompt)  # without it `generate` would take some prompt tokens for padding
    tokens = model.generate(
        prompt, attention_mask=mask, max_new_tokens=run["new_tokens"], do_sample=False, pad_token_id=0
    )
    expected = tensors[f"{tag}.tokens"] if f"{tag}.tokens" in tensors else tensors[f"{tag}.new_tokens"]
    assert torch.equal(tokens[:, -run["new_tokens"] :], expected[:, -run["new_tokens"] :])


def step_by_step(model: DCFormerForCausalLM, ids: Tensor) -> Tensor:
    cache, logits = None, []
    for position in range(ids.shape[1]):
        output = model(ids[:, position : position + 1], past_key_values=cache, use_cache=True)
        cache = output.past_key_values
        logits.append(output.logits)
    return torch.cat(logits, dim=1)
