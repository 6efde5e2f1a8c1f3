"""The values that fields of configurations and parameters of rotary embeddings may have: one rule for each name."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields
from difflib import get_close_matches
from typing import Any, NamedTuple

from transformers.activations import ACT2FN
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

# The types of layers, by their letters in a pattern of layers.
LAYER_TYPES = {"L": "sliding_attention", "G": "full_attention"}
# Values of `position_scheme` whose positions are added to the embeddings, once for the whole model.
ABSOLUTE_SCHEMES = ("learned", "sinusoidal")
# These add a bias to the scores that depends on the distance between query and key.
BIAS_SCHEMES = ("alibi", "t5")
# Names that configurations of other families, such as BART, GPT-2 and T5, have for fields of ours.
NAMES_ELSEWHERE = {
    **dict.fromkeys(("d_model", "n_embd"), "hidden_size"),
    **dict.fromkeys(("encoder_layers", "n_layer", "n_layers", "num_layers"), "num_hidden_layers"),
    **dict.fromkeys(
        ("encoder_attention_heads", "decoder_attention_heads", "n_head", "n_heads", "num_heads"), "num_attention_heads"
    ),
    **dict.fromkeys(("d_ff", "encoder_ffn_dim", "decoder_ffn_dim", "n_inner"), "intermediate_size"),
    **dict.fromkeys(("n_ctx", "n_positions"), "max_position_embeddings"),
    **dict.fromkeys(("n_kv_heads", "num_kv_heads"), "num_key_value_heads"),
    **dict.fromkeys(("activation_function", "hidden_activation"), "hidden_act"),
    **dict.fromkeys(("dropout", "hidden_dropout_prob"), "hidden_dropout"),
    "attention_probs_dropout_prob": "attention_dropout",
    "global_attn_every_n_layers": "layer_types",
    "init_std": "initializer_range",
    "qkv_bias": "attention_bias",
}
# Fields of other libraries, or of some of our families, that a family may lack. The warning about one of these suggests
# no other name, since a field that is spelled like it means something else.
ABSENT_HERE = (
    "attn_logit_softcapping",
    "decoder_layerdrop",
    "encoder_layerdrop",
    "final_logit_softcapping",
    "hidden_dropout",
    "layerdrop",
    "mem_len",
    "mixer",
    "no_rope_layers",
    "norm_placement",
    "num_key_value_heads",
    "position_gain",
    "position_scheme",
    "use_parallel_residual",
    "use_qk_norm",
)


class Range(NamedTuple):
    """The numbers from `low` to `high`, both included unless `low_open` or `high_open` is set."""

    low: float = -math.inf
    high: float = math.inf
    low_open: bool = False
    high_open: bool = False

    def check(self, name: str, value: Any) -> None:
        """Raises ValueError unless `value` is a finite number of the range."""
        is_number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
        too_low = is_number and (value < self.low or (self.low_open and value == self.low))
        too_high = is_number and (value > self.high or (self.high_open and value == self.high))
        if not is_number or too_low or too_high:
            raise ValueError(f"{name} ({_short(value)!r}) must be {self}")

    def __str__(self) -> str:
        low = f"greater than {self.low:g}" if self.low_open else f"at least {self.low:g}"
        high = f"smaller than {self.high:g}" if self.high_open else f"at most {self.high:.0f}"
        limits = [text for text, limit in ((low, self.low), (high, self.high)) if math.isfinite(limit)]
        return " and ".join(limits) or "a finite number"


SIZE, COUNT = Range(1, 2**31 - 1), Range(0, 2**31 - 1)
NUMBER, POSITIVE = Range(), Range(0, low_open=True)
DROPOUT = Range(0, 1, high_open=True)

# The rule of a numeric field, in whichever configuration it occurs. None is always allowed here: the value then follows
# from other fields, or what it sets is switched off.
FIELD_RANGES: dict[str, Range] = {
    "vocab_size": SIZE,
    "hidden_size": SIZE,
    "intermediate_size": SIZE,
    "representation_size": SIZE,
    "num_attention_heads": SIZE,
    "num_key_value_heads": SIZE,
    "head_dim": SIZE,
    "num_channels": SIZE,
    "max_position_embeddings": SIZE,
    "sliding_window": SIZE,
    "conv_kernel_size": SIZE,
    "mgate_dim": SIZE,
    "compose_groups": SIZE,
    "compose_hidden_size": SIZE,
    "t5_max_distance": SIZE,
    "position_gain_length": SIZE,
    "position_offset": COUNT,
    "mem_len": COUNT,
    "num_register_tokens": COUNT,
    "num_hidden_layers": Range(1, 10_000),
    "decoder_layers": Range(1, 10_000),
    "t5_num_buckets": Range(2, 2**31 - 1),
    "local_attention": Range(2, 2**31 - 1),
    "norm_eps": POSITIVE,
    "layer_norm_eps": POSITIVE,
    "rms_norm_eps": POSITIVE,
    "qk_norm_eps": POSITIVE,
    "head_norm_eps": POSITIVE,
    "compose_norm_eps": POSITIVE,
    "rope_theta": POSITIVE,
    "attention_scaling": POSITIVE,
    "initializer_cutoff_factor": POSITIVE,
    "attention_dropout": DROPOUT,
    "hidden_dropout": DROPOUT,
    "activation_dropout": DROPOUT,
    "embedding_dropout": DROPOUT,
    "mlp_dropout": DROPOUT,
    "classifier_dropout": DROPOUT,
    "compose_dropout": DROPOUT,
    "drop_path_rate": DROPOUT,
    "position_scale": NUMBER,
    "layer_scale_init": Range(-1000, 1000),
    # Up to these limits the logits of a new model are finite in float32.
    "initializer_range": Range(0, 1000),
    "compose_init_scale": Range(0, 1_000_000),
}
ACTIVATIONS = ("hidden_act", "compose_act", "classifier_activation")

ROPE_TYPES = frozenset({"default", "truncated", "power", *ROPE_INIT_FUNCTIONS})
ROPE_RANGES: dict[str, Range] = {
    "rope_theta": POSITIVE,
    "factor": POSITIVE,
    "partial_rotary_factor": Range(0, 1, low_open=True),
    "original_max_position_embeddings": POSITIVE,
    "attention_factor": NUMBER,
    "beta_fast": Range(0),
    "beta_slow": Range(0),
    "low_freq_factor": POSITIVE,
    "high_freq_factor": POSITIVE,
    "mscale": NUMBER,
    "mscale_all_dim": NUMBER,
    "truncate_length": POSITIVE,
    "power_factor": Range(0),
}
ROPE_REQUIRED: dict[str, tuple[str, ...]] = {
    "linear": ("factor",),
    "dynamic": ("factor",),
    "yarn": ("factor",),
    "longrope": ("short_factor", "long_factor", "original_max_position_embeddings"),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "truncated": ("truncate_length",),
    "power": ("power_factor",),
}
# Parameters that may be None, because Transformers has a default for them.
ROPE_OPTIONAL = ("attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim")


def check_fields(config: Any) -> None:
    """Raises ValueError, with field, value and limit, for the first field of a configuration that breaks its rule."""
    for field in fields(config):
        value = getattr(config, field.name)
        if field.name in FIELD_RANGES and value is not None:
            FIELD_RANGES[field.name].check(field.name, value)
        if field.name in ACTIVATIONS and value not in ACT2FN:
            raise ValueError(f"{field.name} {_short(value)!r} does not exist; choose from {sorted(ACT2FN)}")


def check_choices(config: Any, **choices: Sequence[str | None]) -> None:
    """Raises ValueError for the first of these fields of a configuration that has none of its choices."""
    for name, allowed in choices.items():
        if getattr(config, name) not in allowed:
            raise ValueError(f"{name} {_short(getattr(config, name))!r} does not exist; choose from {list(allowed)}")


def check_layer_types(config: Any) -> None:
    """Raises ValueError if `layer_types` of a configuration names a type that our models do not have."""
    if unknown := sorted(set(config.layer_types or ()) - set(LAYER_TYPES.values())):
        raise ValueError(f"layer_types has {unknown}; only {sorted(LAYER_TYPES.values())} exist here")


def describe_misspellings(config: Any, names: Iterable[str]) -> list[str]:
    """A warning for each name that is no field of the configuration, but looks like one.

    Transformers keeps arguments that it does not know as attributes, so a misspelled field would silently change
    nothing. Names that resemble no field get no warning: checkpoints of other versions have such names.
    """
    own = [field.name for field in fields(config)]
    warnings = []
    for name in names:
        elsewhere, is_absent = NAMES_ELSEWHERE.get(name), name in ABSENT_HERE
        near = [elsewhere] if elsewhere in own else get_close_matches(name, own, n=1, cutoff=0.8)
        if is_absent:
            near = []
        if (near or is_absent or name.startswith("compose_")) and name not in config.attribute_map:
            suggestion = f"; did you mean {near[0]}?" if near else ""
            warnings.append(f"{type(config).__name__} has no field {name}, which changes nothing{suggestion}")
    return warnings


def check_buckets(config: Any) -> None:
    """Raises ValueError unless T5's buckets fit each other.

    Their number is even, because half of them hold one distance each. The maximal distance lies beyond that half,
    because the others grow logarithmically up to it.
    """
    buckets, furthest = config.t5_num_buckets, config.t5_max_distance
    if buckets % 2:
        raise ValueError(f"t5_num_buckets ({buckets}) must be even: half hold one distance each")
    if furthest <= buckets // 2:
        raise ValueError(
            f"t5_max_distance ({furthest}) must be greater than half of t5_num_buckets ({buckets}), the distances that "
            "have buckets of their own"
        )


def check_rope_parameters(rope: Any, head_dim: int) -> None:
    """Raises ValueError, with field, value and limit, unless these are complete parameters of one rotary embedding.

    Args:
        rope: `rope_parameters` in Transformers' form, with its defaults filled in.
        head_dim: width of a head, of which `partial_rotary_factor` is rotated.
    """
    rope_type = rope.get("rope_type", "default")
    if not isinstance(rope_type, str) or rope_type not in ROPE_TYPES:
        raise ValueError(f"rope_type {_short(rope_type)!r} does not exist; choose from {sorted(ROPE_TYPES)}")
    if missing := [name for name in ("rope_theta", *ROPE_REQUIRED.get(rope_type, ())) if name not in rope]:
        raise ValueError(f"rope_parameters of rope_type {rope_type!r} lack {missing}")
    for name in rope.keys() & ROPE_RANGES.keys():
        if rope[name] is not None or name not in ROPE_OPTIONAL:
            ROPE_RANGES[name].check(f"rope_parameters: {name}", rope[name])
    width = rotated_width(rope, head_dim)
    if rope_type == "dynamic" and width < 4:
        raise ValueError(f"rope_type 'dynamic' must rotate at least 4 dimensions of head_dim ({head_dim}), not {width}")
    if rope_type == "yarn" and rope["rope_theta"] <= 1:
        raise ValueError(f"rope_parameters: rope_theta ({rope['rope_theta']}) must be greater than 1 for 'yarn'")
    if rope_type == "llama3" and rope["low_freq_factor"] == rope["high_freq_factor"]:
        raise ValueError(
            f"rope_parameters: low_freq_factor ({rope['low_freq_factor']}) and high_freq_factor are equal; 'llama3' "
            "needs two that differ"
        )
    if rope_type == "longrope":
        _check_longrope(rope, width // 2)


def check_content_rope(rope: Mapping[str, Any], head_dim: int) -> None:
    """Raises ValueError unless checked rotary parameters fit CARoPE, which takes only the base, for a new model."""
    own = {name: value for name, value in rope.items() if value is not None}
    turns_whole_heads = own.pop("partial_rotary_factor", 1.0) == 1
    if own.keys() - {"type"} != {"rope_theta", "rope_type"} or not turns_whole_heads:
        raise ValueError(
            f"rope_parameters ({rope}) do not go with position_scheme 'carope', whose frequencies come from the "
            "content; give rope_theta alone, which sets them in a new model, and rotate whole heads "
            "(partial_rotary_factor 1.0)"
        )
    if own["rope_theta"] ** (2 / head_dim) <= 1:
        raise ValueError(f"rope_parameters: rope_theta ({own['rope_theta']}) must be greater than 1 for 'carope'")


def check_even_heads(config: Any) -> int:
    """The width of a head, which rotary embedding divides into pairs; raises ValueError if it cannot."""
    if config.head_dim is None or config.head_dim % 2:
        raise ValueError(
            f"head_dim ({config.head_dim}) must be even: rotary embedding rotates pairs of channels; by default it "
            f"is hidden_size ({config.hidden_size}) / num_attention_heads ({config.num_attention_heads})"
        )
    return int(config.head_dim)


def check_rope_mapping(rope: Any) -> bool:
    """Returns whether `rope_parameters` have a dictionary for each layer type; otherwise they are one for all layers.

    A layer type that does not rotate may have None, as in Transformers.

    Args:
        rope: the parameters as given.

    Raises:
        ValueError: `rope` or the entry of a layer type is not a dictionary, or `rope` mixes both forms.
    """
    if not isinstance(rope, Mapping):
        raise ValueError(f"rope_parameters ({_short(rope)}) must be a dictionary")
    layer_types = set(LAYER_TYPES.values())
    by_layer = sorted(layer_types & rope.keys())
    if not by_layer:
        return False
    if others := sorted(rope.keys() - layer_types):
        raise ValueError(
            f"rope_parameters has {others} beside {by_layer}; give one set for all layers, or one for each layer type"
        )
    for name in by_layer:
        if rope[name] is not None and not isinstance(rope[name], Mapping):
            raise ValueError(f"rope_parameters of {name!r} ({_short(rope[name])}) must be a dictionary")
    return True


def rotated_width(rope: Mapping[str, Any], head_dim: int) -> int:
    """The number of rotated dimensions of a head.

    Raises:
        ValueError: the number is odd or less than 2, so there are no pairs to rotate.
    """
    factor = rope.get("partial_rotary_factor", 1.0)
    # "proportional" rotates all pairs; those beyond the factor get an angle of 0.
    width = head_dim if rope.get("rope_type") == "proportional" else int(head_dim * factor)
    if width < 2 or width % 2:
        raise ValueError(
            f"rope_parameters: partial_rotary_factor ({factor}) of head_dim ({head_dim}) rotates {width} dimensions; "
            "they must be even and at least 2"
        )
    return width


def _check_longrope(rope: Mapping[str, Any], pairs: int) -> None:
    """Raises ValueError unless LongRoPE has a positive factor for each rotated pair and a trained length over 1."""
    for name in ("short_factor", "long_factor"):
        factors = rope[name]
        if not isinstance(factors, list) or len(factors) != pairs:
            raise ValueError(
                f"rope_parameters: {name} ({_short(factors)}) must be a list of {pairs} numbers, one for each pair"
            )
        for factor in factors:
            POSITIVE.check(f"rope_parameters: {name}", factor)
    original = rope["original_max_position_embeddings"]
    if original <= 1:
        raise ValueError(
            f"rope_parameters: original_max_position_embeddings ({original}) must be greater than 1 for 'longrope'"
        )


def _short(value: Any) -> Any:
    """A value for an error message: cut to 60 characters."""
    text = value if isinstance(value, str) else repr(value)
    return f"{text[:60]}..." if len(text) > 60 else value
