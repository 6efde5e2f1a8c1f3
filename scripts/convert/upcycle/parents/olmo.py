"""OLMo 2 and OLMo 3 as the plain model in a DCFormer whose layers normalize what they add.

Tensors have the same names and layouts as ours.
"""

from typing import Any

from transformers import Olmo2Config, Olmo3Config, PreTrainedConfig

from .interface import Parent, implied_attention, obeyed_rope, require_fields, require_rotary, shared_fields
from .llama import SHARED, weight_map

ALL = "OLMo 2 or 3"


def to_fields(config: Any) -> dict[str, Any]:
    """Our fields for the same model."""
    rope = config.rope_parameters
    slides = config.model_type == "olmo3"
    return {
        **shared_fields(config, SHARED),
        "head_dim": getattr(config, "head_dim", None),
        "rope_parameters": {name: obeyed_rope(own) for name, own in rope.items()} if slides else obeyed_rope(rope),
        "attention_bias": config.attention_bias,
        "sliding_window": config.sliding_window if slides else None,
        "layer_types": list(config.layer_types) if slides else ["full_attention"] * config.num_hidden_layers,
        "norm_placement": "output",
        "use_qk_norm": True,
        "qk_norm_type": "joint_rms_norm",
        "qk_norm_eps": config.rms_norm_eps,
    }


def restore(config: Any) -> PreTrainedConfig:
    """The configuration of the parent that has what a DCFormer without composition has.

    Raises:
        UserError: none of them has it.
    """
    norms = {"use_qk_norm": True, "qk_norm_type": "joint_rms_norm", "qk_norm_eps": config.rms_norm_eps}
    block = {"norm_placement": "output", "mgate_dim": None, "mlp_bias": False}
    require_fields(config, {**block, **implied_attention(config), **norms}, ALL)
    require_rotary(config, ALL, nested=True)
    fields = shared_fields(config, (*SHARED, "head_dim", "attention_bias"))
    if not config.has_nested_rope and "sliding_attention" not in config.layer_types:
        return Olmo2Config(**fields, architectures=["Olmo2ForCausalLM"])
    own = shared_fields(config, ("layer_types", "sliding_window"))
    own["rope_parameters"] = {layer_type: config.rope_of(layer_type) for layer_type in sorted(set(config.layer_types))}
    return Olmo3Config(**{**fields, **own}, architectures=["Olmo3ForCausalLM"])


OLMO = Parent(("olmo2", "olmo3"), "dcformer", to_fields, restore, weight_map)
