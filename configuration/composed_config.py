"""The attention fields that the configurations of all decoders with composed heads share."""

from typing import Any, ClassVar

from huggingface_hub.dataclasses import strict
from transformers.modeling_rope_utils import RopeParameters

from .composition_config import CompositionConfig
from .field_rules import check_one_rope, check_rope_parameters

LAYER_TYPES = {"L": "sliding_attention", "G": "full_attention"}


@strict
class ComposedConfig(CompositionConfig):
    r"""
    A decoder with dynamically composed heads: what `CompositionConfig` has, with rotary embedding and windows.

    Args:
        sliding_window (`int`, *optional*, defaults to 256): keys that a token of a sliding layer sees, itself included;
            at least 2.
        layer_types (`list[str]`, *optional*): `"sliding_attention"` or `"full_attention"` for each layer; by default
            even layers slide and odd layers are full, or all are full when `sliding_window` is None.
        rope_parameters (`dict`, *optional*): the rotary embedding, in Transformers' form.
    """

    keys_to_ignore_at_inference: ClassVar[list[str]] = ["past_key_values"]
    base_model_pp_plan: ClassVar[dict[str, Any]] = {
        "embed_tokens": (["input_ids"], ["inputs_embeds"]),
        "layers": (["hidden_states", "attention_mask"], ["hidden_states"]),
        "norm": (["hidden_states"], ["hidden_states"]),
    }

    rope_parameters: RopeParameters | dict | None = None
    sliding_window: int | None = 256
    layer_types: list[str] | None = None

    def fill_defaults(self) -> None:
        """As the base; with windows, local and global layers take turns."""
        super().fill_defaults()
        if self.layer_types is None:
            pattern = "G" if self.sliding_window is None else "LG"
            self.layer_types = repeat_layer_types(pattern, self.num_hidden_layers)

    def convert_rope_params_to_dict(self, **kwargs: Any) -> dict[str, Any]:
        """Brings rotary parameters into Transformers' form, and checks them; called by `PreTrainedConfig`."""
        self.rope_parameters = kwargs.pop("rope_scaling", None) or self.rope_parameters or {}
        check_one_rope(self.rope_parameters, tuple(LAYER_TYPES.values()))
        self.rope_parameters = dict(self.rope_parameters)
        kwargs = super().convert_rope_params_to_dict(**kwargs)
        self.validate_heads()
        self.validate_rotary()
        return kwargs

    def validate_sliding_window(self) -> None:
        """Part of the strict validation: layer types exist, and sliding layers have a window."""
        types = set(self.layer_types or ())
        if unknown := sorted(types - set(LAYER_TYPES.values())):
            raise ValueError(f"layer_types has {unknown}; only {sorted(LAYER_TYPES.values())} exist here")
        if "sliding_attention" not in types:
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

    def validate_rotary(self) -> None:
        """Part of the strict validation: the rotary parameters are complete, in range and fit the heads."""
        if self.head_dim is None or self.head_dim % 2:
            raise ValueError(
                f"head_dim ({self.head_dim}) must be even: rotary embedding turns pairs; by default it is hidden_size "
                f"({self.hidden_size}) / num_attention_heads ({self.num_attention_heads})"
            )
        check_rope_parameters(self.rope_parameters or {}, self.head_dim)


def repeat_layer_types(pattern: str, num_hidden_layers: int) -> list[str]:
    """Returns `layer_types` from a repeated pattern of letters: "LG" is local (sliding), global (full), local, ..."""
    return [LAYER_TYPES[pattern[layer % len(pattern)]] for layer in range(num_hidden_layers)]
