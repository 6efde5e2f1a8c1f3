"""The attention fields that the configurations of all decoders with composed heads share."""

from typing import Any, ClassVar

from huggingface_hub.dataclasses import strict
from transformers.modeling_rope_utils import RopeParameters

from .composition_config import CompositionConfig
from .field_rules import (
    ABSOLUTE_SCHEMES,
    BIAS_SCHEMES,
    LAYER_TYPES,
    check_buckets,
    check_choices,
    check_content_rope,
    check_even_heads,
    check_layer_types,
    check_rope_mapping,
    check_rope_parameters,
)

POSITION_SCHEMES = ("rope", "none", "alibi", "t5", "learned", "sinusoidal", "carope")
# These rotate queries and keys.
ROTARY_SCHEMES = ("rope", "carope")
POSITION_GAINS = (None, "distance", "bucket")
ROTARY_DTYPES = (None, "float32")
# What these fields hold where positions work as in Transformers' rotary models (Llama, GPT-NeoX).
ROTARY_ALONE = {"position_scheme": "rope", "no_rope_layers": None, "position_gain": None, "rotary_dtype": None}
# Keywords that Transformers moves into `rope_parameters`.
ROPE_ARGUMENTS = ("rope_theta", "partial_rotary_factor")


@strict
class ComposedConfig(CompositionConfig):
    r"""
    A decoder with dynamically composed heads: what `CompositionConfig` has, with rotary embedding and windows.

    Args:
        sliding_window (`int`, *optional*, defaults to 256): keys that a token of a sliding layer sees, itself included;
            at least 2.
        layer_types (`list[str]`, *optional*): `"sliding_attention"` or `"full_attention"` for each layer; by default
            even layers slide and odd layers are full, or all are full when `sliding_window` is None.
        position_scheme (`str` or `dict`, defaults to `"rope"`): how the model knows the order of tokens: `"rope"`;
            `"alibi"` (arXiv 2108.12409); `"t5"`, a learned bias for each bucket of distances; `"learned"` or
            `"sinusoidal"`, added to the embeddings; `"carope"` (arXiv 2507.23083), whose rotary frequencies depend on
            the content; or `"none"`, where the causal mask alone tells the order. A dictionary gives each layer type in
            use a scheme of its own.
        no_rope_layers (`list[int]`, *optional*): with `"rope"`, 1 for each layer that rotates and 0 for each that does
            not and has no positions, as in SmolLM3; by default all rotate.
        compose_position_bias (`bool`, defaults to `False`): add the bias of `"alibi"` or `"t5"` to the scores before
            they are composed, so that composition mixes it too; by default it is added after.
        t5_num_buckets, t5_max_distance (`int`, default to 32 and 128): number of T5's buckets, and the distance up to
            which they are spread; all longer distances are in the last one.
        position_gain (`str`, *optional*): URPE (arXiv 2205.13401): learned factors on the probabilities, one for each
            `"distance"` or one for each of T5's buckets (`"bucket"`). Goes with any scheme.
        position_gain_length (`int`, *optional*): number of distances that have a factor of their own in `"distance"`;
            longer distances take the last one. By default `max_position_embeddings`.
        position_scale (`float`, *optional*): factor on sinusoidal positions, by default `initializer_range`, so that
            they are as large as newly initialized embeddings.
        rope_parameters (`dict`, *optional*): the rotary embedding, in Transformers' form, for all layers or for each
            layer type. Besides Transformers' `rope_type`s there are Giraffe's (arXiv 2308.10882): `"truncated"` with
            `truncate_length`, the trained length, and `"power"` with `power_factor`.
        rotary_dtype (`str`, *optional*): `"float32"` rotates queries and keys in at least float32 and rounds the result
            to the model's dtype; by default the rotation itself runs in the model's dtype.
    """

    base_model_pp_plan: ClassVar[dict[str, Any]] = {
        "embed_tokens": (["input_ids"], ["inputs_embeds"]),
        "layers": (["hidden_states", "attention_mask"], ["hidden_states"]),
        "norm": (["hidden_states"], ["hidden_states"]),
    }

    position_scheme: str | dict[str, str] = "rope"
    no_rope_layers: list[int] | None = None
    compose_position_bias: bool = False
    t5_num_buckets: int = 32
    t5_max_distance: int = 128
    position_gain: str | None = None
    position_gain_length: int | None = None
    position_scale: float | int | None = None
    rope_parameters: RopeParameters | dict | None = None
    rotary_dtype: str | None = None
    sliding_window: int | None = 256
    layer_types: list[str] | None = None

    def fill_defaults(self) -> None:
        """Also sets `layer_types`: sliding and full layers in turn, or only full ones without `sliding_window`."""
        super().fill_defaults()
        if self.layer_types is None:
            pattern = "G" if self.sliding_window is None else "LG"
            self.layer_types = repeat_layer_types(pattern, self.num_hidden_layers)

    def convert_rope_params_to_dict(self, **kwargs: Any) -> dict[str, Any]:
        """Brings rotary parameters into Transformers' form, and checks them; called by `PreTrainedConfig`."""
        self.validate_position_scheme()
        self.validate_heads()
        given: Any = kwargs.pop("rope_scaling", None) or self.rope_parameters or {}
        others = {name: value for name, value in kwargs.items() if name not in ROPE_ARGUMENTS}
        if not self.rotates:
            self.rope_parameters = None
            return others
        if check_rope_mapping(given):
            own = {name: rope for name, rope in given.items() if rope is not None}
            self.rope_parameters = {name: self.completed_rope(rope, kwargs) for name, rope in own.items()}
        else:
            self.rope_parameters = self.completed_rope(given, kwargs)
        self.validate_rotary()
        return others

    def scheme_of(self, layer_type: str) -> str:
        """The position scheme of the layers of a type."""
        return self.position_scheme if isinstance(self.position_scheme, str) else self.position_scheme[layer_type]

    def rope_of(self, layer_type: str) -> dict[str, Any]:
        """The rotary parameters of the layers of a type."""
        rope: dict[str, Any] = {**(self.rope_parameters or {})}
        return rope[layer_type] if self.has_nested_rope else rope

    @property
    def schemes(self) -> set[str]:
        """The position schemes in use."""
        return {self.scheme_of(layer_type) for layer_type in set(self.layer_types or ())}

    @property
    def rotates(self) -> bool:
        """Whether any layer turns queries and keys."""
        return not self.schemes.isdisjoint(ROTARY_SCHEMES)

    @property
    def has_nested_rope(self) -> bool:
        """Whether there are `rope_parameters` for each layer type."""
        return not (self.rope_parameters or {}).keys().isdisjoint(LAYER_TYPES.values())

    @property
    def has_distance_tables(self) -> bool:
        """Whether any layer reads a table by distance, which only implementations of this package take."""
        return self.position_gain is not None or not self.schemes.isdisjoint(BIAS_SCHEMES)

    @property
    def needs_own_ops(self) -> bool:
        """Whether heads are composed, or layers read tables by distance."""
        return self.composes or self.has_distance_tables

    def has_separate_heads(self) -> bool:
        """As the base; not where positions have a row or a rotation for each of all heads."""
        return super().has_separate_heads() and not self.has_distance_tables and "carope" not in self.schemes

    def validate_sliding_window(self) -> None:
        """Part of the strict validation: layer types exist, and sliding layers have a window."""
        check_layer_types(self)
        if "sliding_attention" not in (self.layer_types or ()):
            return
        if self.sliding_window is None:
            raise ValueError(
                "layer_types has 'sliding_attention' but sliding_window is None; say how many keys it sees"
            )
        if self.sliding_window < 2:
            # Transformers' dynamic cache, which keeps all but one key of a window, would keep all keys for one of 1.
            raise ValueError(
                f"sliding_window ({self.sliding_window}) must be at least 2: a token of a sliding layer would have "
                "nothing but itself to attend to; give it more, or make no layer slide"
            )

    def validate_position_scheme(self) -> None:
        """Part of the strict validation: every layer type has a known scheme, and the fields of that scheme fit."""
        if not isinstance(self.position_scheme, str):
            self._check_schemes_by_layer_type(self.position_scheme)
        if unknown := sorted(self.schemes - set(POSITION_SCHEMES)):
            raise ValueError(f"position_scheme {unknown[0]!r} does not exist; choose from {POSITION_SCHEMES}")
        check_choices(self, position_gain=POSITION_GAINS, rotary_dtype=ROTARY_DTYPES)
        if self.compose_position_bias and self.schemes.isdisjoint(BIAS_SCHEMES):
            raise ValueError(
                f"compose_position_bias=True needs a position_scheme with a bias, one of {BIAS_SCHEMES}, not "
                f"{self.position_scheme!r}"
            )
        if "sinusoidal" in self.schemes and self.hidden_size % 2:
            raise ValueError(
                f"hidden_size ({self.hidden_size}) must be even for sinusoidal positions: sines and cosines"
            )
        check_buckets(self)

    def validate_no_rope_layers(self) -> None:
        """Part of the strict validation: `no_rope_layers` says 0 or 1 for each layer, where layers have `"rope"`."""
        if self.no_rope_layers is None:
            return
        if self.position_scheme != "rope":
            raise ValueError(
                f"no_rope_layers needs position_scheme 'rope', not {self.position_scheme!r}; leave one of them out"
            )
        if len(self.no_rope_layers) != self.num_hidden_layers or not {0, 1}.issuperset(self.no_rope_layers):
            raise ValueError(
                f"no_rope_layers ({self.no_rope_layers}) must have a 1 for each of the {self.num_hidden_layers} layers "
                "that rotates, and a 0 for each that does not"
            )

    def _check_schemes_by_layer_type(self, schemes: dict[str, str]) -> None:
        """Raises ValueError unless each layer type of the model, and no other, has a scheme that acts on layers."""
        types = set(self.layer_types or ())
        if schemes.keys() != types:
            raise ValueError(
                f"position_scheme has the layer types {sorted(schemes)}, but the model has {sorted(types)}; give "
                "one scheme for each of these, or one for all"
            )
        if absolute := sorted(set(schemes.values()) & set(ABSOLUTE_SCHEMES)):
            raise ValueError(
                f"position_scheme {absolute[0]!r} acts on embeddings, which no layer type has of its own; use it "
                "for all layers"
            )

    def validate_rotary(self) -> None:
        """Part of the strict validation: the rotary parameters are complete, in range and fit the heads."""
        if not self.rotates:
            return
        head_dim, given = check_even_heads(self), self.rope_parameters or {}
        is_nested = self.has_nested_rope or not given  # nothing is left of parameters that are None for each type
        for layer_type in sorted(set(self.layer_types or ())):
            scheme = self.scheme_of(layer_type)
            if scheme not in ROTARY_SCHEMES:
                continue
            if is_nested and layer_type not in given:
                raise ValueError(f"rope_parameters lack {layer_type!r}, whose layers rotate; they have {sorted(given)}")
            check_rope_parameters(self.rope_of(layer_type), head_dim)
            if scheme == "carope":
                check_content_rope(self.rope_of(layer_type), head_dim)


def repeat_layer_types(pattern: str, num_hidden_layers: int) -> list[str]:
    """Returns `layer_types` from a repeated pattern of letters: "LG" is local (sliding), global (full), local, ..."""
    return [LAYER_TYPES[pattern[layer % len(pattern)]] for layer in range(num_hidden_layers)]
