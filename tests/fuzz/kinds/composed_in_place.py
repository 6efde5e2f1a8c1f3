"""Models of Transformers with composed heads: every way of running one gives the logits of the plain forward pass."""

from random import Random
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from dynattn import with_composed_heads
from dynattn.configuration.multihead_config import ComposeOptions
from dynattn.modeling.layers.head_composition import DynamicComposition, init_composition

from ..harness import Case, Kind
from .models import VOCAB, WAYS, attention_fields, check_model, random_layers

LATENTS = {"q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 6}
# What distinguishes each type: windows, projections in one or by a latent, positions, norms.
TYPES: dict[str, Case] = {
    "llama": {"hidden_size": 48},
    "qwen3": {"use_sliding_window": True},
    "gemma3_text": {"hidden_size": 48},
    "ministral": {},
    "olmo2": {"hidden_size": 48},
    "gpt2": {"hidden_size": 48, "attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0},
    "gpt_neox": {"hidden_size": 48, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}},
    "deepseek_v3": {**LATENTS, "head_dim": 4, "n_routed_experts": 2, "first_k_dense_replace": 9},
}
LAYERS_NAMED = "with_four_dimensional_mask"
WITH_WINDOWS = ("qwen3", "gemma3_text", "ministral")
SIZES = ("hidden_size", "head_dim", "intermediate_size", "num_hidden_layers", "num_attention_heads")


def generate(random: Random) -> Case:
    model_type = random.choice(list(TYPES))
    drawn = attention_fields(random)
    options = {name: drawn[name] for name in ComposeOptions.__annotations__.keys() & drawn.keys()}
    fields = {name: drawn[name] for name in (*SIZES, "num_key_value_heads", "initializer_range")} | TYPES[model_type]
    if model_type in WITH_WINDOWS:
        layers = random_layers(random, fields["num_hidden_layers"])
        fields |= {"layer_types": layers, "sliding_window": random.choice((2, 3, 7, 100))}
    if model_type == "deepseek_v3":
        fields["num_key_value_heads"] = fields["num_attention_heads"]
    length = random.choice((1, 2, 5, 17, 30, 41))
    way = random.choice(ways_of(model_type))
    return {
        "class": f"{model_type}, {way}",
        "type": model_type,
        "way": way,
        "fields": fields,
        "options": {name: options[name] for name in sorted(options.keys() - {"compose_init_scale"})},
        "scale": random.choice((1.0, 30.0)),
        "masks": random.choice(("sdpa", "eager", "chunked")),
        "length": length,
        "batch": random.choice((1, 2, 3)),
        "cut": random.randint(1, max(1, length - 1)),
        "seed": random.randrange(2**31),
    }


def ways_of(model_type: str) -> list[str]:
    """The ways that models of a type have.

    Without windows they do not name the types of their layers. Transformers takes documents apart by their positions
    only where there is no cache.
    """
    absent = ["packed", "packed_into_a_cache", "packed_by_borders"]
    return [way for way in WAYS if way not in (absent if model_type in WITH_WINDOWS else [*absent, LAYERS_NAMED])]


def check(case: Case) -> None:
    """As `models.check`."""
    torch.set_num_threads(1)
    torch.manual_seed(case["seed"])
    check_model(build(case), case)


def build(case: Case) -> PreTrainedModel:
    special: dict[str, Any] = {"vocab_size": VOCAB, "eos_token_id": None, "bos_token_id": None, "pad_token_id": 0}
    config = AutoConfig.for_model(case["type"], **special, **case["fields"])
    config._attn_implementation = case["masks"]
    plain = AutoModelForCausalLM._model_mapping[type(config)]
    model = with_composed_heads(plain, **case["options"])(config).eval()
    for module in model.modules():
        if isinstance(module, DynamicComposition):
            init_composition(module, case["scale"])
    return model


KIND = Kind("composed-in-place", generate, check, fast=8, batch=40)
