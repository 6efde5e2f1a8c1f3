"""The tensors of official RCMHA checkpoints, as one table (see `weight_map`)."""

from ..common.transforms import KEEP, CausalKernel, Select, Transform
from ..common.weight_map import Rule, WeightMap, renames
from .config import OfficialRCMHAConfig

LAYER, OUR_LAYER = "transformer.layers.{layer}.", "model.layers.{layer}."
ATTENTION, OUR_ATTENTION = LAYER + "self_attn.", OUR_LAYER + "self_attn."
MODULES = {
    "transformer.norm": "model.norm",
    "generator": "lm_head",
    ATTENTION + "output": OUR_ATTENTION + "o_proj",
    LAYER + "feed_forward.layer1": OUR_LAYER + "mlp.up_proj",
    LAYER + "feed_forward.layer2": OUR_LAYER + "mlp.down_proj",
    LAYER + "norm_self_attn": OUR_LAYER + "input_layernorm",
    LAYER + "norm_ff": OUR_LAYER + "post_attention_layernorm",
}
TABLES = {"key_pos_embeddings": "position_embeddings", "key_pos_bias": "position_bias"}
KINDS = ("weight", "bias")


def rcmha_map(config: OfficialRCMHAConfig, rows: int) -> WeightMap:
    """Returns the table for one model whose position tables have `rows` rows in ours."""
    rules = renames({"src_embed": "model.embed_tokens"}, ["weight"]) + renames(MODULES, KINDS)
    for name in ("query", "key", "value"):
        rules += projection_rules(config, name)
    if config.is_relative:
        distances = by_distance(config.P, rows)
        rules += [Rule((ATTENTION + theirs,), (OUR_ATTENTION + ours,), distances) for theirs, ours in TABLES.items()]
        rules.append(Rule((ATTENTION + "query_pos_bias",), (OUR_ATTENTION + "content_bias",)))
    return WeightMap(config.n_layers, tuple(rules))


def projection_rules(config: OfficialRCMHAConfig, name: str) -> list[Rule]:
    """The projection of queries, keys or values, and the convolution after it."""
    theirs, ours = f"{ATTENTION}{name}.", f"{OUR_ATTENTION}{name[0]}_"
    linear = theirs + ("0.linear" if config.convolves else "linear")
    has_bias = name == "value" or not config.is_relative
    rules = renames({linear: ours + "proj"}, KINDS if has_bias else ["weight"])
    if config.convolves:
        for kind, transform in (("weight", CausalKernel()), ("bias", KEEP)):
            rules.append(Rule((f"{theirs}1.conv.{kind}",), (f"{ours}conv.{kind}",), transform))
    return rules


def by_distance(positions: int, rows: int) -> Transform:
    """Official tables have `2 * positions` rows, that of distance `d` at `positions - d`; ours start at distance 0."""
    return Select(0, tuple(range(positions, positions - rows, -1)), 2 * positions)
