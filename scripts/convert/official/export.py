"""Translates our configuration to the official one, or says why the official code cannot run such a model."""

import dataclasses
from collections.abc import Iterator
from typing import Any

import torch
from transformers import PreTrainedConfig

from dynattn.configuration.composed_config import ROTARY_ALONE, repeat_layer_types

from ...common.errors import UserError
from .config import DCFORMER_FIELDS, OFFICIAL_TYPES, OURS, PATTERNS, PYTHIA_FIELDS, OfficialConfig

ARCHITECTURES = {"dcformer": "DCFormer", "dcpythia": "DCPythia"}
# Our fields whose values are constants in the official code.
CONSTANTS: dict[str, Any] = {
    "compose_pre": True,
    "compose_post": True,
    "compose_query_wise": True,
    "compose_low_rank": True,
    "compose_gate": True,
    "compose_static": False,
    "differential_heads": False,
    "compose_rank": 2,
    "compose_groups": 1,
    "compose_act": "gelu",
    "compose_norm_eps": 1e-6,
    "attention_scaling": None,
    "tie_word_embeddings": False,
    **ROTARY_ALONE,
}
FAMILY_CONSTANTS: dict[str, dict[str, Any]] = {
    "dcformer": {"hidden_act": "silu", "attention_bias": False, "mlp_bias": False, "norm_placement": "input"},
    "dcpythia": {"hidden_act": "gelu"},
}


def to_official(config: PreTrainedConfig) -> OfficialConfig:
    """Returns the official configuration of the same model.

    Raises:
        UserError: the official code cannot run it; the message names the field.
    """
    if config.model_type not in OFFICIAL_TYPES:
        raise UserError(
            f"model_type {config.model_type!r} has no official format; only {' and '.join(OFFICIAL_TYPES)} have"
        )
    for name, value, needed in refusals(config):
        raise UserError(f"{name} is {value!r}, but the official code can only run {needed!r}")
    window_size, window_type = find_window(config)
    rope = config.rope_parameters
    pythia = config.model_type == "dcpythia"
    own: dict[str, Any] = {"norm_eps": config.layer_norm_eps if pythia else config.rms_norm_eps}
    if pythia:
        own |= {"use_parallel_residual": config.use_parallel_residual, "use_linear_bias": config.attention_bias}
        own |= {"rotary_pct": rope.get("partial_rotary_factor", 1.0)}
    elif config.mgate_dim is not None:
        own |= {"mgate": True, "mgate_dim": config.mgate_dim}
    return OfficialConfig(
        family=config.model_type,
        n_local_heads=config.num_attention_heads,
        rope_base=rope["rope_theta"],
        window_size=window_size,
        window_type=window_type,
        query_wise=not config.compose_key_wise,
        **{name: getattr(config, ours) for name, ours in OURS.items()},
        **own,
    )


def refusals(config: PreTrainedConfig) -> Iterator[tuple[str, Any, Any]]:
    """Fields that the official code cannot express: name, value, and what it could run."""
    heads = config.num_attention_heads
    needed = {
        **CONSTANTS,
        **FAMILY_CONSTANTS[config.model_type],
        "num_key_value_heads": heads,
        "num_attention_heads": heads + heads % 2,
        "head_dim": config.hidden_size // heads,
    }
    if config.model_type == "dcpythia":
        needed["mlp_bias"] = config.attention_bias
    if config.attention_output_bias is not None:
        needed["attention_output_bias"] = config.attention_bias
    if config.use_qk_norm:
        needed |= {"qk_norm_type": "rms_norm", "qk_norm_eps": 1e-6}
    if config.compose_hidden_size is not None:
        needed["compose_hidden_size"] = 4 * heads
    for name, value in needed.items():
        if getattr(config, name) != value:
            yield name, getattr(config, name), value
    if config.position_scheme != "rope":
        return
    if config.has_nested_rope:
        yield "rope_parameters", config.rope_parameters, "one set for all layers"
        return
    rope = {"rope_type": "default", "rope_theta": config.rope_parameters["rope_theta"]}
    factor = config.rope_parameters.get("partial_rotary_factor", 1.0)
    if config.model_type == "dcpythia" or factor == 1.0:
        rope["partial_rotary_factor"] = factor
    if {"partial_rotary_factor": 1.0, **config.rope_parameters} != {"partial_rotary_factor": 1.0, **rope}:
        yield "rope_parameters", config.rope_parameters, rope


def find_window(config: PreTrainedConfig) -> tuple[int | None, str | None]:
    """Returns the official `window_size` and `window_type` of our `layer_types`.

    Raises:
        UserError: there are none.
    """
    layers, window = config.num_hidden_layers, config.sliding_window
    if config.layer_types == repeat_layer_types("G", layers):
        return None, None
    for name, pattern in PATTERNS.items():
        if config.layer_types == repeat_layer_types(pattern, layers):
            return window, name
    raise UserError(f"layer_types fit none of the official patterns ({', '.join(map(str, PATTERNS))})")


def to_json(config: OfficialConfig, dtype: torch.dtype) -> dict[str, Any]:
    """The official `config.json`."""
    foreign = DCFORMER_FIELDS if config.family == "dcpythia" else PYTHIA_FIELDS
    fields = {name: value for name, value in dataclasses.asdict(config).items() if name not in foreign}
    return {
        "architectures": [ARCHITECTURES[config.family]],
        "model_type": fields.pop("family"),
        **fields,
        "head_dim": config.head_dim,
        "q_chunk_size": 128,
        "is_training": False,
        "use_gradient_checkpointing": False,
        "torch_dtype": str(dtype).removeprefix("torch."),
        **({"prefill_pad": True} if config.mgate else {}),
    }
