"""The official checkpoints' tensors, as one table (see `weight_map`).

`E` hidden size, `H` heads. The generator's four components are pre-query, pre-key, post-query, post-key, as in ours.
"""

import torch

from ..common.transforms import KEEP, Chain, Reshape, Select, Split, Stack, Transform
from ..common.weight_map import Drop, Rule, WeightMap, renames
from .config import OfficialConfig

COMPONENTS = 4
QUERY_SIDE = (0, 2)

OUTER = {"tok_embeddings": "model.embed_tokens", "output": "lm_head"}
LAYER = "layers.{layer}."
ATTENTION, OUR_ATTENTION = LAYER + "attention.", "model.layers.{layer}.self_attn."
DYNAMIC, OUR_DYNAMIC = ATTENTION + "dyn_w_proj.", OUR_ATTENTION + "composition."
STATIC, MERGED_STATIC = ("pre_proj.w", "post_proj.w"), "sw"
NORMS = {
    "norm": "model.norm",
    LAYER + "attention_norm": "model.layers.{layer}.input_layernorm",
    LAYER + "ffn_norm": "model.layers.{layer}.post_attention_layernorm",
}
# w1 is the gate projection of a DCFormer and the up projection of a DCPythia.
MLPS = {
    "dcformer": {"w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"},
    "dcpythia": {"w1": "up_proj", "w2": "down_proj"},
}
BUFFER = "buffers that are not in use"
CACHE = "caches of an earlier run"


def official_map(config: OfficialConfig, *, prefer_merged: bool = False, keep_static: bool = False) -> WeightMap:
    """Returns the table for one model.

    Args:
        config: the official configuration.
        prefer_merged: take the composition from the merged copies, and drop what they were merged from.
        keep_static: whether the static matrices become ours; else they are dropped, whatever is in them.
    """
    dynamic, merged = dynamic_rules(config), merged_rules(config)
    used, unused = (merged, dynamic) if prefer_merged else (dynamic, merged)
    drops = [Drop(key, "other copies of the composition") for rule in unused for key in rule.theirs]
    if not config.use_dcmha:
        used, drops = [], []
    if not config.use_qk_norm:
        drops += [Drop(f"{ATTENTION}{name}_norm.scale", "scales of the query-key norm, which is off") for name in "qk"]
    rules = [*block_rules(config), *attention_rules(config), *used]
    if keep_static:
        ours = (OUR_DYNAMIC + "static_weight",)  # `[1, H, H]` for each stage
        rules.append(Rule(tuple(DYNAMIC + name for name in STATIC), ours, Stack()))
    else:
        drops += [Drop(DYNAMIC + name, BUFFER, lambda: torch.eye(config.n_head)[None]) for name in STATIC]
    drops += [Drop(DYNAMIC + MERGED_STATIC, BUFFER), Drop(ATTENTION + "kv_cache.*", CACHE)]
    drops += [Drop(name, CACHE) for name in ("freqs_cis", "causal_mask")]
    return WeightMap(config.n_layer, tuple(rules), tuple(drops))


def block_rules(config: OfficialConfig) -> list[Rule]:
    """Everything outside the attention, which only changes its name."""
    names = {f"{theirs}.weight": f"{ours}.weight" for theirs, ours in OUTER.items()}
    for kind in ("weight", "bias") if config.family == "dcpythia" else ("weight",):
        names |= {f"{theirs}.{kind}": f"{ours}.{kind}" for theirs, ours in NORMS.items()}
    for kind in linear_kinds(config):
        for theirs, ours in MLPS[config.family].items():
            names[f"{LAYER}feed_forward.{theirs}.{kind}"] = f"model.layers.{{layer}}.mlp.{ours}.{kind}"
    if config.mgate:
        names[LAYER + "feed_forward.mg.weight"] = "model.layers.{layer}.mlp.mgate.weight"
    return renames(names)


def attention_rules(config: OfficialConfig) -> list[Rule]:
    """Projections, joined or separate, and the query-key norm."""
    rules: list[Rule] = []
    for kind in linear_kinds(config):
        ours = tuple(f"{OUR_ATTENTION}{name}_proj.{kind}" for name in "qkv")
        rules.append(Rule((f"{ATTENTION}wqkv.{kind}",), ours, Split((config.dim,) * 3)))
        rules += renames({f"{ATTENTION}w{name}": f"{OUR_ATTENTION}{name}_proj" for name in "qkvo"}, [kind])
    if config.use_qk_norm:
        rules += renames({f"{ATTENTION}{name}_norm.scale": f"{OUR_ATTENTION}{name}_norm.weight" for name in "qk"})
    return rules


def dynamic_rules(config: OfficialConfig) -> list[Rule]:
    """The generator of the composition."""
    hidden, heads = config.dim, config.n_head
    unflatten = Reshape(((hidden, 1, COMPONENTS * heads),), ((hidden, 1, COMPONENTS, heads),))
    return [
        Rule((DYNAMIC + "dw1",), (OUR_DYNAMIC + "hidden_weight",), used_components(config, 2)),
        Rule((DYNAMIC + "qkw",), (OUR_DYNAMIC + "factor_weight",), used_components(config, 1)),
        Rule((DYNAMIC + "dd",), (OUR_DYNAMIC + "gate_weight",), Chain((unflatten, used_components(config, 2)))),
    ]


def merged_rules(config: OfficialConfig) -> list[Rule]:
    """The same from the copies that the official training path makes: `[E, 16 H + 4 H]` and `[4, 4 H, 4 H]`."""
    hidden, heads = config.dim, config.n_head
    width = COMPONENTS * heads
    split = Split((COMPONENTS * width, width), dim=1)
    unflatten = Reshape(
        ((hidden, COMPONENTS * width), (hidden, width)),
        ((hidden, 1, COMPONENTS, width), (hidden, 1, COMPONENTS, heads)),
    )
    factors = Reshape(((COMPONENTS, width, width),), ((1, COMPONENTS, width, 4, heads),))
    inputs = (OUR_DYNAMIC + "hidden_weight", OUR_DYNAMIC + "gate_weight")
    return [
        Rule((DYNAMIC + "dw_m",), inputs, Chain((split, unflatten, used_components(config, 2)))),
        Rule((DYNAMIC + "qkw_m",), (OUR_DYNAMIC + "factor_weight",), Chain((factors, used_components(config, 1)))),
    ]


def used_components(config: OfficialConfig, dim: int) -> Transform:
    """All components, or those of the query side."""
    return Select(dim, QUERY_SIDE, COMPONENTS) if config.query_wise else KEEP


def linear_kinds(config: OfficialConfig) -> tuple[str, ...]:
    """The parameters of a projection."""
    has_biases = config.family == "dcpythia" and config.use_linear_bias
    return ("weight", "bias") if has_biases else ("weight",)
