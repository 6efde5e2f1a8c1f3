"""Llama, Mistral, Phi-3, Qwen2, Qwen3 and SmolLM3 as the plain model in a DCFormer.

Tensors have the same names and layouts as ours, except that Phi-3, which Phi-4 is too, joins the projections that read
the same input.
"""

from typing import Any

from transformers import (
    LlamaConfig,
    MistralConfig,
    Phi3Config,
    PreTrainedConfig,
    Qwen2Config,
    Qwen3Config,
    SmolLM3Config,
)

from ...common.transforms import Split
from ...common.weight_map import Drop, Rule, WeightMap, renames
from .interface import (
    EMBEDDING,
    HEAD,
    Parent,
    head_rules,
    implied_attention,
    obeyed_rope,
    require_fields,
    require_rotary,
    shared_fields,
)

SHARED = (
    *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
    *("num_key_value_heads", "hidden_act", "max_position_embeddings", "initializer_range", "rms_norm_eps"),
    *("use_cache", "tie_word_embeddings", "rope_parameters", "bos_token_id", "eos_token_id", "pad_token_id"),
)
# Fields of ours for which these families have none, and the values that their code gives them.
BLOCK = {"mgate_dim": None, "norm_placement": "input"}
LAYER = "model.layers.{layer}."
MLP = ("gate_proj", "up_proj", "down_proj")
ALL = "Llama, Mistral, Phi-3, Qwen2, Qwen3 or SmolLM3"


def to_fields(config: Any) -> dict[str, Any]:
    """Our fields for the same model."""
    rope = config.rope_parameters
    has_types = config.model_type in ("qwen2", "qwen3", "smollm3")
    window = getattr(config, "sliding_window", None)
    kind = "full_attention" if window is None else "sliding_attention"
    # Qwen2 has biases of queries, keys and values alone, without a field that says so.
    biases = {"attention_bias": True, "attention_output_bias": False} if config.model_type == "qwen2" else {}
    return {
        **shared_fields(config, SHARED),
        "head_dim": getattr(config, "head_dim", None),
        "rope_parameters": rope if config.model_type == "phi3" else obeyed_rope(rope),
        "attention_bias": getattr(config, "attention_bias", False),
        **biases,
        "mlp_bias": getattr(config, "mlp_bias", False),
        "sliding_window": window,
        "layer_types": list(config.layer_types) if has_types else [kind] * config.num_hidden_layers,
        "no_rope_layers": _no_rope_layers(config),
        "use_qk_norm": config.model_type == "qwen3",
        "qk_norm_eps": config.rms_norm_eps,
    }


def _no_rope_layers(config: Any) -> list[int] | None:
    """Which layers of a SmolLM3 rotate, or None if all do; its list may be longer than the model."""
    rotates = list(map(int, getattr(config, "no_rope_layers", ())[: config.num_hidden_layers]))
    return None if all(rotates) else rotates


def restore(config: Any) -> PreTrainedConfig:
    """The configuration of the parent that has what a DCFormer without composition has.

    Raises:
        UserError: none of them has it.
    """
    fields = shared_fields(config, (*SHARED, "head_dim"))
    slides = "sliding_attention" in config.layer_types
    has_qwen2_biases = config.attention_bias and config.attention_output_bias is False
    is_qwen2 = has_qwen2_biases and not config.use_qk_norm and config.no_rope_layers is None
    own_bias = {"attention_output_bias": False} if is_qwen2 else {}
    require_fields(config, {**BLOCK, **implied_attention(config), **own_bias}, ALL)
    require_rotary(config, ALL, but=("no_rope_layers",))
    uniform = {"layer_types": ["sliding_attention" if slides else "full_attention"] * config.num_hidden_layers}
    if _turns_parts(config):
        return _phi3(config, fields, uniform)
    if config.no_rope_layers is not None:
        return _smollm3(config, fields)
    if config.use_qk_norm:
        require_fields(config, {"mlp_bias": False, "qk_norm_eps": config.rms_norm_eps}, "Qwen3")
        own = shared_fields(config, ("attention_bias", "layer_types", "sliding_window"))
        return Qwen3Config(**fields, **own, use_sliding_window=slides, architectures=["Qwen3ForCausalLM"])
    if is_qwen2:
        require_fields(config, {"mlp_bias": False}, "Qwen2")
        own = shared_fields(config, ("layer_types", "sliding_window"))
        return Qwen2Config(**fields, **own, use_sliding_window=slides, architectures=["Qwen2ForCausalLM"])
    if slides:
        require_fields(config, {**uniform, "attention_bias": False, "mlp_bias": False}, "Mistral")
        return MistralConfig(**fields, sliding_window=config.sliding_window, architectures=["MistralForCausalLM"])
    own = shared_fields(config, ("attention_bias", "mlp_bias"))
    return LlamaConfig(**fields, **own, architectures=["LlamaForCausalLM"])


def _turns_parts(config: Any) -> bool:
    """Whether a part of each head is rotated, as in Phi-3 alone."""
    return config.rope_parameters.get("partial_rotary_factor", 1.0) != 1.0


def _phi3(config: Any, fields: dict[str, Any], needed: dict[str, Any]) -> Phi3Config:
    """The Phi-3 that has the shared `fields` of ours, which also has to have those `needed`.

    Raises:
        UserError: Phi-3 lacks something that the model has.
    """
    head_dim = config.hidden_size // config.num_attention_heads
    absent = {"attention_bias": False, "mlp_bias": False, "use_qk_norm": False, "no_rope_layers": None}
    require_fields(config, {**needed, **absent, "head_dim": head_dim}, "Phi-3")
    trained = config.rope_parameters.get("original_max_position_embeddings", config.max_position_embeddings)
    window = config.sliding_window if "sliding_attention" in config.layer_types else None
    return Phi3Config(
        **fields, original_max_position_embeddings=trained, sliding_window=window, architectures=["Phi3ForCausalLM"]
    )


def _smollm3(config: Any, fields: dict[str, Any]) -> SmolLM3Config:
    """The SmolLM3 that has the shared `fields` of ours.

    Raises:
        UserError: SmolLM3 lacks something that the model has.
    """
    require_fields(config, {"use_qk_norm": False}, "SmolLM3")
    own = shared_fields(config, ("attention_bias", "mlp_bias", "layer_types", "no_rope_layers"))
    window = config.sliding_window if "sliding_attention" in config.layer_types else None
    return SmolLM3Config(
        **fields,
        **own,
        use_sliding_window=window is not None,
        sliding_window=window,
        architectures=["SmolLM3ForCausalLM"],
    )


def weight_map(config: Any) -> WeightMap:
    """The table for one DCFormer configuration."""
    rules, drops = head_rules(config, (HEAD,), EMBEDDING)
    own_norm = "post_feedforward_layernorm" if config.norm_placement == "output" else "input_layernorm"
    names = ["model.norm.weight", f"{LAYER}post_attention_layernorm.weight", f"{LAYER}{own_norm}.weight"]
    for kind in ("weight", "bias"):
        if kind == "weight" or config.attention_bias:
            names += [f"{LAYER}self_attn.{name}_proj.{kind}" for name in "qkv"]
        if kind == "weight" or config.has_output_bias:
            names += [f"{LAYER}self_attn.o_proj.{kind}"]
        if kind == "weight" or config.mlp_bias:
            names += [f"{LAYER}mlp.{name}.{kind}" for name in MLP]
    if config.use_qk_norm:
        names += [f"{LAYER}self_attn.{name}_norm.weight" for name in "qk"]
    separate, joined = renames({name: name for name in names}), _joined_rules(config)
    rules += [*joined, *separate] if _turns_parts(config) else [*separate, *joined]
    drops.append(Drop(LAYER + "self_attn.rotary_emb.inv_freq", "buffers that old versions stored"))
    return WeightMap(config.num_hidden_layers, tuple(rules), tuple(drops))


def _joined_rules(config: Any) -> list[Rule]:
    """The rules of the projections that Phi-3, which has no biases, joins into one tensor."""
    if config.attention_bias or config.mlp_bias:
        return []
    queries, keys = (heads * config.head_dim for heads in (config.num_attention_heads, config.num_key_value_heads))
    projections = tuple(f"{LAYER}self_attn.{name}_proj.weight" for name in "qkv")
    gate_and_up = tuple(f"{LAYER}mlp.{name}.weight" for name in MLP[:2])
    return [
        Rule((LAYER + "self_attn.qkv_proj.weight",), projections, Split((queries, keys, keys))),
        Rule((LAYER + "mlp.gate_up_proj.weight",), gate_and_up, Split((config.intermediate_size,) * 2)),
    ]


LLAMA = Parent(("llama", "mistral", "phi3", "qwen2", "qwen3", "smollm3"), "dcformer", to_fields, restore, weight_map)
