"""GPT-NeoX, and with it Pythia, as the plain model inside a DCPythia."""

from typing import Any

from transformers import GPTNeoXConfig, PreTrainedConfig

from ...common.transforms import Interleaved
from ...common.weight_map import Drop, Rule, WeightMap, renames
from .interface import Parent, head_rules, implied_attention, plain_heads, require_fields, require_rotary, shared_fields

SHARED = (
    *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "hidden_act"),
    *("max_position_embeddings", "initializer_range", "layer_norm_eps", "use_cache", "tie_word_embeddings"),
    *("use_parallel_residual", "attention_bias", "rope_parameters", "bos_token_id", "eos_token_id", "pad_token_id"),
)
LAYER, OUR_LAYER = "gpt_neox.layers.{layer}.", "model.layers.{layer}."
MODULES = {
    "gpt_neox.final_layer_norm": "model.norm",
    LAYER + "input_layernorm": OUR_LAYER + "input_layernorm",
    LAYER + "post_attention_layernorm": OUR_LAYER + "post_attention_layernorm",
    LAYER + "mlp.dense_h_to_4h": OUR_LAYER + "mlp.up_proj",
    LAYER + "mlp.dense_4h_to_h": OUR_LAYER + "mlp.down_proj",
}
BUFFERS = ("bias", "masked_bias", "rotary_emb.inv_freq")


def to_fields(config: GPTNeoXConfig) -> dict[str, Any]:
    """Our fields for the same model."""
    return {**shared_fields(config, SHARED), "sliding_window": None, "use_qk_norm": False, "mlp_bias": True}


def restore(config: Any) -> PreTrainedConfig:
    """The GPT-NeoX configuration of a DCPythia that composes nothing.

    Raises:
        UserError: GPT-NeoX lacks something that the model has.
    """
    needed = {
        **plain_heads(config),
        "mlp_bias": True,
        "layer_types": ["full_attention"] * config.num_hidden_layers,
        **implied_attention(config),
    }
    require_fields(config, needed, "GPT-NeoX")
    require_rotary(config, "GPT-NeoX")
    return GPTNeoXConfig(**shared_fields(config, SHARED), architectures=["GPTNeoXForCausalLM"])


def weight_map(config: Any) -> WeightMap:
    """The table for one DCPythia configuration."""
    rules, drops = head_rules(config, ("embed_out.weight", "lm_head.weight"), "gpt_neox.embed_in.weight")
    for kind in ("weight", "bias"):
        rules += renames(MODULES, [kind])
    per_head = Interleaved(config.num_attention_heads, parts=3)
    for kind in ("weight", "bias") if config.attention_bias else ("weight",):
        ours = tuple(f"{OUR_LAYER}self_attn.{name}_proj.{kind}" for name in "qkv")
        rules.append(Rule((f"{LAYER}attention.query_key_value.{kind}",), ours, per_head))
        rules.append(Rule((f"{LAYER}attention.dense.{kind}",), (f"{OUR_LAYER}self_attn.o_proj.{kind}",)))
    drops += [Drop(f"{LAYER}attention.{name}", "buffers that old versions stored") for name in BUFFERS]
    return WeightMap(config.num_hidden_layers, tuple(rules), tuple(drops))


NEOX = Parent(("gpt_neox",), "dcpythia", to_fields, restore, weight_map)
