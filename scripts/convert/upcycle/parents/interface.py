"""What a family of plain models defines so that it can be converted to one of ours, and back.

Each family has a module beside this one. A walkthrough in CONTRIBUTING.md says how to add one.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from transformers import PreTrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from dynattn.configuration.composed_config import ROTARY_ALONE

from ....common.errors import UserError
from ...common.decoder_probe import TEXT
from ...common.probe import Probe
from ...common.weight_map import Drop, Rule, WeightMap

HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"


@dataclass(frozen=True)
class Parent:
    """One family of plain models.

    Args:
        model_types: the model types of Transformers that belong to it.
        ours: our model type that computes the same with composition off.
        fields: returns the fields of our configuration for the same model, given theirs.
        restore: returns their configuration, given ours; raises UserError if they cannot run such a model.
        weight_map: returns the table of weights for one of our configurations, without the composition.
        probe: how both models are run for the comparison.
        lacking: model types like those of the family, and what ours has no field for.
        needs: files beside the weights that users of the result need; their absence is warned of.
    """

    model_types: tuple[str, ...]
    ours: str
    fields: Callable[[Any], dict[str, Any]]
    restore: Callable[[Any], PreTrainedConfig]
    weight_map: Callable[[Any], WeightMap]
    probe: Probe = TEXT
    needs: tuple[str, ...] = ()
    lacking: Mapping[str, str] = field(default_factory=dict)


def shared_fields(config: PreTrainedConfig, names: tuple[str, ...]) -> dict[str, Any]:
    """The fields that have the same name in both configurations."""
    return {name: getattr(config, name) for name in names}


def head_rules(config: PreTrainedConfig, names: tuple[str, ...], embedding: str) -> tuple[list[Rule], list[Drop]]:
    """The embedding and the head, which has no weights of its own where it is tied.

    Args:
        config: ours.
        names: what files call the head; the first is what we write.
        embedding: what they call the embedding.
    """
    rules = [Rule((embedding,), (EMBEDDING,))]
    if config.tie_word_embeddings:
        return rules, [Drop(name, "heads that are tied to the embedding", copy_of=embedding) for name in names]
    return [*rules, *(Rule((name,), (HEAD,)) for name in names)], []


def class_head(config: Any, heads: tuple[str, ...]) -> str:
    """Which of `heads` ends the class name in `architectures`, of theirs or ours; the first where there is no name.

    Raises:
        UserError: none of them does.
    """
    family = type(config).__name__.removesuffix("Config")
    (name, *_) = config.architectures or [heads[0]]
    for head in heads:
        if name.endswith(head):
            return head
    known = " or ".join(family + head for head in heads)
    raise UserError(f"{name} has a head that is not known here; load its weights into {known}, and save that")


def obeyed_rope(rope: dict[str, Any]) -> dict[str, Any]:
    """Rotary parameters of a parent that rotates whole heads, whatever they say, where they have the default type.

    There may be one set for each type of layers. Transformers then ignores values beside them.
    """
    if any(isinstance(value, dict) for value in rope.values()):
        return {layer_type: obeyed_rope(own) for layer_type, own in rope.items() if isinstance(own, dict)}
    if rope.get("rope_type", "default") != "default":
        return rope
    return {name: value for name, value in rope.items() if name != "partial_rotary_factor"}


def require_rotary(config: PreTrainedConfig, family: str, *, but: tuple[str, ...] = (), nested: bool = False) -> None:
    """Raises UserError unless the positions of ours are those of Transformers' rotary models of a `family`.

    Args:
        but: fields that some models of the family have, and that are not looked at.
        nested: whether its layer types may have parameters of their own.
    """
    require_fields(config, {name: value for name, value in ROTARY_ALONE.items() if name not in but}, family)
    used = {config.rope_of(layer_type).get("rope_type", "default") for layer_type in config.layer_types}
    if (config.has_nested_rope and not nested) or used - {"default", *ROPE_INIT_FUNCTIONS}:
        number, rope = "sets" if nested else "one set", config.rope_parameters
        raise UserError(f"rope_parameters is {rope!r}, but {family} models have {number}, of a type that they know")


def plain_heads(config: PreTrainedConfig) -> dict[str, Any]:
    """Fields of ours, and their values, for parents whose heads divide the hidden size and have keys of their own."""
    heads = config.num_attention_heads
    return {"use_qk_norm": False, "num_key_value_heads": heads, "head_dim": config.hidden_size // heads}


def implied_attention(config: PreTrainedConfig) -> dict[str, Any]:
    """Fields of our attention for which the parents have none, and the values that their code gives them."""
    implied: dict[str, Any] = {"attention_scaling": None}
    if config.attention_output_bias is not None:
        implied["attention_output_bias"] = config.attention_bias
    if config.use_qk_norm:
        implied["qk_norm_type"] = "rms_norm"
    return implied


def require_fields(config: PreTrainedConfig, needed: dict[str, Any], family: str) -> None:
    """Raises UserError where a field of ours has another value than the only one that `family` can run."""
    for name, value in needed.items():
        if getattr(config, name) != value:
            raise UserError(f"{name} is {getattr(config, name)!r}, but {family} models can only have {value!r}")
