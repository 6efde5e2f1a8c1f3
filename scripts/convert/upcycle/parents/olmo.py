"""OLMo 2 and OLMo 3 as the plain model in a DCFormer whose layers normalize what they add."""

from typing import Any

from transformers import Olmo2Config, Olmo3Config

from .llama_like import LlamaFamily, LlamaLike

ALL = "OLMo 2 or 3"


def is_uniform(config: Any) -> bool:
    """Whether all layers see everything and rotate alike, as in OLMo 2."""
    return not config.has_nested_rope and "sliding_attention" not in config.layer_types


def rope_by_type(config: Any) -> dict[str, Any]:
    """Rotary parameters in OLMo 3's form, one set for each type of layers."""
    return {
        "rope_parameters": {layer_type: config.rope_of(layer_type) for layer_type in sorted(set(config.layer_types))}
    }


OLMO = LlamaFamily(
    {
        "norm_placement": "output",
        "mgate_dim": None,
        "use_qk_norm": True,
        "qk_norm_type": "joint_rms_norm",
    },
    (
        LlamaLike(ALL, Olmo2Config, takes=is_uniform),
        LlamaLike(ALL, Olmo3Config, more=rope_by_type),
    ),
    nested_rope=True,
).parent()
