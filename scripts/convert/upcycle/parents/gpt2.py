"""GPT-2 as the plain model inside a DCPythia with learned positions and one residual after the other.

Its matrices are stored as `[in, out]`, and queries, keys and values are one tensor. Files name weights with the prefix
`transformer.`, or, as those of the original models do, without it.
"""

from dataclasses import replace
from typing import Any

from transformers import GPT2Config, PreTrainedConfig

from ...common.transforms import Chain, Split, Transpose
from ...common.weight_map import Drop, Rule, WeightMap, renames
from .interface import EMBEDDING, HEAD, Parent, head_rules, plain_heads, require_fields, shared_fields

SHARED = (
    *("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "max_position_embeddings"),
    *("initializer_range", "use_cache", "tie_word_embeddings", "bos_token_id", "eos_token_id", "pad_token_id"),
)
# Fields of ours in which GPT-2 has no choice.
FIXED = {
    "position_scheme": "learned",
    "position_gain": None,
    "use_parallel_residual": False,
    "attention_bias": True,
    "attention_output_bias": True,
    "mlp_bias": True,
}
PREFIX = "transformer."
LAYER, OUR_LAYER = "h.{layer}.", "model.layers.{layer}."
NORMS = {
    "ln_f": "model.norm",
    LAYER + "ln_1": OUR_LAYER + "input_layernorm",
    LAYER + "ln_2": OUR_LAYER + "post_attention_layernorm",
}
MATRICES = {
    LAYER + "attn.c_proj": OUR_LAYER + "self_attn.o_proj",
    LAYER + "mlp.c_fc": OUR_LAYER + "mlp.up_proj",
    LAYER + "mlp.c_proj": OUR_LAYER + "mlp.down_proj",
}
KINDS = ("weight", "bias")
BUFFERS = ("attn.bias", "attn.masked_bias")


def to_fields(config: GPT2Config) -> dict[str, Any]:
    """Our fields for the same model.

    Raises:
        UserError: it has cross-attention, or scales the scores of each layer in another way.
    """
    alone = {"add_cross_attention": False, "scale_attn_weights": True, "scale_attn_by_inverse_layer_idx": False}
    require_fields(config, alone, "DCPythia")
    return {
        **shared_fields(config, SHARED),
        **FIXED,
        "intermediate_size": config.n_inner or 4 * config.hidden_size,
        "hidden_act": config.activation_function,
        "layer_norm_eps": config.layer_norm_epsilon,
        "sliding_window": None,
        "use_qk_norm": False,
    }


def restore(config: Any) -> PreTrainedConfig:
    """The GPT-2 configuration of a DCPythia that composes nothing.

    Raises:
        UserError: GPT-2 lacks something that the model has.
    """
    everywhere = ["full_attention"] * config.num_hidden_layers
    needed = {**plain_heads(config), "layer_types": everywhere, "attention_scaling": None, **FIXED}
    if config.attention_output_bias is None:  # as attention_bias says
        del needed["attention_output_bias"]
    require_fields(config, needed, "GPT-2")
    return GPT2Config(
        **shared_fields(config, SHARED),
        n_inner=config.intermediate_size,
        activation_function=config.hidden_act,
        layer_norm_epsilon=config.layer_norm_eps,
        architectures=["GPT2LMHeadModel"],
    )


def weight_map(config: Any) -> WeightMap:
    """The table for one DCPythia configuration."""
    rules, drops = head_rules(config, (HEAD,), PREFIX + "wte.weight")
    rules += [named for rule in _body_rules(config) for named in (_prefixed(rule), rule)]
    rules.append(Rule(("wte.weight",), (EMBEDDING,)))
    drops += [
        Drop(f"{prefix}{LAYER}{name}", "buffers that old versions stored")
        for name in BUFFERS
        for prefix in (PREFIX, "")
    ]
    return WeightMap(config.num_hidden_layers, tuple(rules), tuple(drops))


def _body_rules(config: Any) -> list[Rule]:
    """The rules of everything but the embedding and the head, without the prefix."""
    thirds = Split((config.hidden_size,) * 3)
    rules = [*renames({"wpe.weight": "model.embed_positions.weight"}), *renames(NORMS, KINDS)]
    for kind in KINDS:
        layout = (Transpose(),) if kind == "weight" else ()
        rules += [Rule((f"{theirs}.{kind}",), (f"{ours}.{kind}",), Chain(layout)) for theirs, ours in MATRICES.items()]
        ours = tuple(f"{OUR_LAYER}self_attn.{name}_proj.{kind}" for name in "qkv")
        rules.append(Rule((f"{LAYER}attn.c_attn.{kind}",), ours, Chain((*layout, thirds))))
    return rules


def _prefixed(rule: Rule) -> Rule:
    return replace(rule, theirs=tuple(PREFIX + name for name in rule.theirs))


GPT2 = Parent(("gpt2",), "dcpythia", to_fields, restore, weight_map)
