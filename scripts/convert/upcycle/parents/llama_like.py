"""Plain models whose layers are those of a DCFormer without composition: one row of a table for each model type.

Tensors have the same names and layouts as ours, except that Phi-3, which Phi-4 is too, joins the projections that read
the same input.
"""

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from transformers import PreTrainedConfig

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
# Fields that only some of them have, and what the code of the others does, unless the table says something else.
ABSENT: dict[str, Any] = {
    "attention_bias": False,
    "mlp_bias": False,
    "use_qk_norm": False,
    "no_rope_layers": None,
}
LAYER = "model.layers.{layer}."
MLP = ("gate_proj", "up_proj", "down_proj")


@dataclass(frozen=True)
class LlamaLike:
    """One model type.

    Args:
        name: what messages call it.
        config_class: its configuration. Fields of ours that it has are taken over.
        takes: whether a plain DCFormer of a configuration goes back to this type, if no earlier row takes it.
        fixed: fields of ours that it has no field for, and the values that its code gives them.
        more: returns further fields of its own for a configuration of ours.
        turns_parts: whether it reads `partial_rotary_factor`.
        also: other model types with the same fields, whose models are of the same class.
    """

    name: str
    config_class: type[PreTrainedConfig]
    takes: Callable[[Any], bool] = lambda _: True
    fixed: Callable[[Any], dict[str, Any]] = lambda _: {}
    more: Callable[[Any], dict[str, Any]] = lambda _: {}
    turns_parts: bool = False
    also: tuple[str, ...] = ()

    @property
    def model_types(self) -> tuple[str, ...]:
        """The model types in `config.json` that this row reads."""
        return (self.config_class.model_type, *self.also)

    def has(self, name: str) -> bool:
        """Whether its configuration has a field."""
        return name in {own.name for own in dataclasses.fields(self.config_class)}


@dataclass(frozen=True)
class LlamaFamily:
    """The model types of one conversion.

    Args:
        fixed: fields of ours, and the values that the code of every type gives them.
        models: the rows, in the order in which `takes` is asked.
        nested_rope: whether layer types may have rotary parameters of their own.
        lacking: other model types, and what a DCFormer has no field for.
    """

    fixed: dict[str, Any]
    models: tuple[LlamaLike, ...]
    nested_rope: bool = False
    lacking: Mapping[str, str] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """What messages call all of them."""
        *names, last = sorted({model.name for model in self.models})
        return f"{', '.join(names)} or {last}" if names else last

    def parent(self) -> Parent:
        """The conversion."""
        model_types = sorted(name for model in self.models for name in model.model_types)
        return Parent(tuple(model_types), "dcformer", self.to_fields, self.restore, weight_map, lacking=self.lacking)

    def to_fields(self, config: Any) -> dict[str, Any]:
        """Our fields for the same model."""
        model = next(model for model in self.models if config.model_type in model.model_types)
        # A field that is in `config.json` alone is an attribute, too, but its code does not read it.
        absent = {**ABSENT, "sliding_window": None}
        own = {name: getattr(config, name) if model.has(name) else value for name, value in absent.items()}
        own |= {"no_rope_layers": _rotating_layers(own["no_rope_layers"], config.num_hidden_layers)}
        own |= self.fixed | model.fixed(config)
        kind = "full_attention" if own["sliding_window"] is None else "sliding_attention"
        return {
            **shared_fields(config, SHARED),
            "rope_parameters": config.rope_parameters if model.turns_parts else obeyed_rope(config.rope_parameters),
            "layer_types": list(config.layer_types) if model.has("layer_types") else [kind] * config.num_hidden_layers,
            "qk_norm_eps": config.rms_norm_eps,
            **own,
            "head_dim": getattr(config, "head_dim", None),
        }

    def restore(self, config: Any) -> PreTrainedConfig:
        """The configuration of the first type in the table that has what a DCFormer without composition has.

        Raises:
            UserError: none of them has it.
        """
        model = next(model for model in self.models if model.takes(config))
        self._check(config, model)
        fields = shared_fields(config, (*SHARED, "head_dim")) | _own_fields(config, model) | model.more(config)
        head = model.config_class.__name__.removesuffix("Config") + "ForCausalLM"
        return model.config_class(**fields, architectures=[head])

    def _check(self, config: Any, model: LlamaLike) -> None:
        """Raises UserError where a DCFormer has what the whole family lacks, or what a model type lacks."""
        fixed = self.fixed | model.fixed(config)
        everywhere = self.fixed | implied_attention(config)
        require_fields(config, {name: fixed.get(name, value) for name, value in everywhere.items()}, self.name)
        require_rotary(config, self.name, but=("no_rope_layers",), nested=self.nested_rope)
        slides = "sliding_attention" in config.layer_types and model.has("sliding_window")
        uniform = ["sliding_attention" if slides else "full_attention"] * config.num_hidden_layers
        eps = {"qk_norm_eps": config.rms_norm_eps} if config.use_qk_norm else {}
        absent = {
            name: value for name, value in {"layer_types": uniform, **ABSENT, **eps}.items() if not model.has(name)
        }
        require_fields(config, {**absent, **fixed}, model.name)


def _own_fields(config: Any, model: LlamaLike) -> dict[str, Any]:
    """Those of a DCFormer's fields that only some configurations have, for a model type that has them."""
    slides = "sliding_attention" in config.layer_types
    own = shared_fields(config, ("attention_bias", "mlp_bias", "layer_types", "no_rope_layers"))
    # An OLMo 3, whose rotary parameters are nested, makes a mask for its window even where no layer has one.
    own["sliding_window"] = config.sliding_window if slides or config.has_nested_rope else None
    own["use_sliding_window"] = slides
    return {name: value for name, value in own.items() if model.has(name)}


def turns_parts(config: Any) -> bool:
    """Whether a part of each head is rotated, as in Phi-3 alone."""
    return (config.rope_parameters or {}).get("partial_rotary_factor", 1.0) != 1.0


def _rotating_layers(rotates: list[int] | None, layers: int) -> list[int] | None:
    """A SmolLM3's list of which layers rotate, which may be longer than the model; None if all do."""
    own = [int(value) for value in (rotates or ())[:layers]]
    return None if all(own) else own


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
    rules += [*joined, *separate] if turns_parts(config) else [*separate, *joined]
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
