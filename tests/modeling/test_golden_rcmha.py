"""Results of the official RCMHA code: attention in float64 with all gradients, models over segments."""

import re
from typing import Any

import pytest
import torch
from cases.golden import assert_gradients, case_names, read_case, tensors_under
from cases.rcmha import our_attention
from torch import Tensor
from transformers import DynamicCache

from dynattn import RCMHAConfig, RCMHAForCausalLM
from dynattn.modeling.layers.relative_attention import RCMHAAttention
from dynattn.modeling.layers.segment import Segment

KINDS = ("rcmha", "rmha", "mdha", "mha")
ATTENTION_CASES = case_names(*(f"{kind}_attn_*" for kind in KINDS))
MODEL_CASES = case_names(*(f"{kind}_model_*" for kind in KINDS))
LAYER_KEYS = {
    "self_attn.output": "self_attn.o_proj",
    "feed_forward.layer1": "mlp.up_proj",
    "feed_forward.layer2": "mlp.down_proj",
    "norm_self_attn": "input_layernorm",
    "norm_ff": "post_attention_layernorm",
}
MODEL_KEYS = {"src_embed": "model.embed_tokens", "transformer.norm": "model.norm", "generator": "lm_head"}


def case_config(meta: dict[str, Any], **fields: Any) -> RCMHAConfig:
    return RCMHAConfig(
        attention_type=meta["kind"],
        memory_type="segment",
        hidden_size=meta["d_model"],
        num_attention_heads=meta["heads"],
        mem_len=meta["mem_len"],
        max_position_embeddings=meta["P"],
        **fields,
    )


def our_model(official: dict[str, Tensor]) -> dict[str, Tensor]:
    ours = {}
    for key, value in official.items():
        if match := re.fullmatch(r"transformer\.layers\.(\d+)\.(.+)", key):
            layer, rest = match.groups()
            module, _, kind = rest.rpartition(".")
            if module in LAYER_KEYS:
                name = f"{LAYER_KEYS[module]}.{kind}"
            else:
                name, value = our_attention(rest.removeprefix("self_attn."), value)
                name = f"self_attn.{name}"
            ours[f"model.layers.{layer}.{name}"] = value
        else:
            module, _, kind = key.rpartition(".")
            ours[f"{MODEL_KEYS[module]}.{kind}"] = value
    return ours


@pytest.mark.parametrize("implementation", ["eager", "sdpa", "chunked"])
@pytest.mark.parametrize("name", ATTENTION_CASES)
def test_attention_has_official_outputs_and_gradients(name: str, implementation: str) -> None:
    meta, tensors = read_case(name)
    config = case_config(meta)
    config._attn_implementation = implementation
    attention = RCMHAAttention(config, layer_idx=0).double()
    attention.load_state_dict(dict(our_attention(*item) for item in tensors_under(tensors, "sd.").items()))

    context = tensors["key_value"].transpose(0, 1).requires_grad_()  # memory, then the segment
    output, probs = attention(context, Segment(tensors["query"].shape[0]))
    (output * tensors["grad_y"].transpose(0, 1)).sum().backward()

    torch.testing.assert_close(output.transpose(0, 1), tensors["y"], atol=1e-9, rtol=0)
    if probs is not None:
        torch.testing.assert_close(probs.permute(2, 3, 0, 1), tensors["attn"], atol=1e-9, rtol=0)
    grads = dict(
        our_attention(*item)
        for item in tensors_under(tensors, "grad.").items()
        if item[0] not in ("query", "key_value")
    )
    assert_gradients(attention, grads)
    # The official module takes the segment twice, as queries and as the last keys.
    expected = tensors["grad.key_value"].clone()
    expected[-tensors["query"].shape[0] :] += tensors["grad.query"]
    torch.testing.assert_close(context.grad.transpose(0, 1), expected, atol=1e-8, rtol=0)


@pytest.mark.parametrize("implementation", ["eager", "sdpa", "chunked"])
@pytest.mark.parametrize("name", MODEL_CASES)
def test_model_has_official_logits_and_memory_over_segments(name: str, implementation: str) -> None:
    meta, tensors = read_case(name)
    config = case_config(
        meta,
        vocab_size=meta["vocab"],
        intermediate_size=meta["d_ff"],
        num_hidden_layers=meta["n_layers"],
        hidden_act=meta["activation"],
    )
    config._attn_implementation = implementation
    model = RCMHAForCausalLM(config).eval()
    model.load_state_dict(our_model(tensors_under(tensors, "sd.")))

    memory, start = DynamicCache(config=config), 0
    tokens = tensors["tokens"].T
    for index, length in enumerate(meta["segments"]):
        segment, targets = tokens[:, start : start + length], tokens[:, start + 1 : start + length + 1]
        outputs = model(
            input_ids=segment, past_key_values=memory, use_cache=True, labels=segment, shift_labels=targets.contiguous()
        )
        start += length
        torch.testing.assert_close(outputs.logits.transpose(0, 1), tensors[f"seg{index}.logits"], atol=3e-4, rtol=0)
        assert outputs.loss.item() == pytest.approx(meta["losses"][index], abs=1e-4)
        for layer in range(meta["n_layers"]):
            torch.testing.assert_close(
                memory.layers[layer].keys[:, 0].transpose(0, 1),
                tensors[f"seg{index}.mem_after.{layer}"],
                atol=3e-4,
                rtol=0,
            )


def test_every_golden_case_is_tested() -> None:
    assert (len(ATTENTION_CASES), len(MODEL_CASES)) == (5, 5)
