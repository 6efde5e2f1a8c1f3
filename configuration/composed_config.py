"""The attention fields that the configurations of all DCMHA families share."""

from typing import Any, ClassVar, Self

from huggingface_hub.dataclasses import strict
from transformers.modeling_rope_utils import RopeParameters

from .field_rules import check_one_rope, check_rope_parameters
from .mixers import mixer_fields
from .portable_config import PortableConfig, default_head_dim

LAYER_TYPES = {"L": "sliding_attention", "G": "full_attention"}


@strict
class ComposedConfig(PortableConfig):
    r"""
    Attention with dynamically composed heads (DCMHA, arXiv 2405.08553).

    Args:
        num_key_value_heads (`int`, *optional*): fewer than `num_attention_heads` is grouped-query attention: keys and
            values are repeated, composition is over all query heads.
        head_dim (`int`, *optional*): by default `hidden_size // num_attention_heads`.
        sliding_window (`int`, *optional*, defaults to 256): keys that a token of a sliding layer sees, itself included;
            at least 2.
        layer_types (`list[str]`, *optional*): `"sliding_attention"` or `"full_attention"` for each layer; by default
            even layers slide and odd layers are full, or all are full when `sliding_window` is None.
        use_qk_norm (`bool`, defaults to `True`): RMS norm of each query and key head before the rotary embedding.
        qk_norm_eps (`float`, defaults to 1e-6): its epsilon, as in the released PyTorch code.
        compose_pre (`bool`, defaults to `True`): compose the scores, before the softmax.
        compose_post (`bool`, defaults to `True`): compose the probabilities, after the softmax.
        compose_query_wise (`bool`, defaults to `True`): terms that depend on the query token.
        compose_key_wise (`bool`, defaults to `True`): terms that depend on the key token; their factors are cached.
        compose_low_rank (`bool`, defaults to `True`): the dynamic low-rank head mixing.
        compose_gate (`bool`, defaults to `True`): the dynamic per-head gate.
        compose_static (`bool`, defaults to `False`): a learned input-independent head mixing (talking heads).
        differential_heads (`bool`, defaults to `False`): differential attention (arXiv 2410.05258). Head `i` and head
            `i + num_attention_heads / 2` are a pair with one value of double width, half of it in each head. The
            second's probabilities, times a learned scalar, are subtracted from the first's, and the output of a pair is
            normed. Takes `compose_post`, one group and an even number of heads of keys.
        head_norm_eps (`float`, defaults to 1e-5): epsilon of that norm.
        compose_rank (`int`, defaults to 2): rank of the low-rank mixing, at most the heads of a group.
        compose_groups (`int`, defaults to 1): heads are mixed only inside each of so many consecutive groups.
        compose_hidden_size (`int`, *optional*): hidden width of the factor generator for each group and component;
            by default `2 * compose_rank * heads of a group`, as released.
        compose_act (`str`, defaults to `"gelu"`): activation of the generator; the JAX trainer used
            `"gelu_pytorch_tanh"`, the released PyTorch code the exact `"gelu"`.
        compose_norm_eps (`float`, defaults to 1e-6): epsilon of the norm of the down factors over heads.
        compose_init_scale (`float`, defaults to 1.0): multiplies the initial up factors, gates and static mixing. At 0
            the composition of a new model starts as the identity, and all of its parameters still learn.
            (`differential_heads` starts as its paper says.)

    `from_size(..., mixer="talking_heads")` sets these fields for a published attention.
    """

    keys_to_ignore_at_inference: ClassVar[list[str]] = ["past_key_values"]
    base_model_pp_plan: ClassVar[dict[str, Any]] = {
        "embed_tokens": (["input_ids"], ["inputs_embeds"]),
        "layers": (["hidden_states", "attention_mask"], ["hidden_states"]),
        "norm": (["hidden_states"], ["hidden_states"]),
    }

    num_key_value_heads: int | None = None
    head_dim: int | None = None
    attention_bias: bool = False
    rope_parameters: RopeParameters | dict | None = None
    sliding_window: int | None = 256
    layer_types: list[str] | None = None
    use_qk_norm: bool = True
    qk_norm_eps: float = 1e-6
    compose_pre: bool = True
    compose_post: bool = True
    compose_query_wise: bool = True
    compose_key_wise: bool = True
    compose_low_rank: bool = True
    compose_gate: bool = True
    compose_static: bool = False
    differential_heads: bool = False
    head_norm_eps: float = 1e-5
    compose_rank: int = 2
    compose_groups: int = 1
    compose_hidden_size: int | None = None
    compose_act: str = "gelu"
    compose_norm_eps: float = 1e-6
    compose_init_scale: float | int = 1.0

    def __post_init__(self, **kwargs: Any) -> None:
        if "mixer" in kwargs:
            raise ValueError(
                f"mixer={kwargs['mixer']!r} is an option of from_size; here, give the fields that it stands for: "
                f"{type(self).__name__}(**dynattn.mixer_fields({kwargs['mixer']!r}), ...)"
            )
        self.validate_fields()
        if self.num_key_value_heads is None:
            self.num_key_value_heads = self.num_attention_heads
        if self.head_dim is None:
            self.head_dim = default_head_dim(self.hidden_size, self.num_attention_heads)
        if self.layer_types is None:
            pattern = "G" if self.sliding_window is None else "LG"
            self.layer_types = repeat_layer_types(pattern, self.num_hidden_layers)
        super().__post_init__(**kwargs)

    @classmethod
    def from_size(cls, name: str, *, mixer: str | None = None, **overrides: Any) -> Self:
        """Returns the configuration of a named size (see `sizes`), with fields overridden by keyword.

        Args:
            mixer: a published attention (see `MIXERS`), whose fields keywords override too.

        Raises:
            ValueError: the size or the attention does not exist, or fields do not fit.
        """
        fields = {} if mixer is None else mixer_fields(mixer)
        return super().from_size(name, **{**fields, **overrides})

    def convert_rope_params_to_dict(self, **kwargs: Any) -> dict[str, Any]:
        """Brings rotary parameters into Transformers' form, and checks them; called by `PreTrainedConfig`."""
        self.rope_parameters = kwargs.pop("rope_scaling", None) or self.rope_parameters or {}
        check_one_rope(self.rope_parameters, tuple(LAYER_TYPES.values()))
        self.rope_parameters = dict(self.rope_parameters)
        kwargs = super().convert_rope_params_to_dict(**kwargs)
        self.validate_heads()
        self.validate_rotary()
        return kwargs

    @property
    def compose_stages(self) -> tuple[str, ...]:
        """The stages that are composed, in the order of the weights."""
        return tuple(stage for stage in ("pre", "post") if getattr(self, f"compose_{stage}"))

    @property
    def compose_sides(self) -> tuple[str, ...]:
        """The sides (query, key) whose tokens dynamic terms depend on, in the order of the weights; else empty."""
        if not (self.compose_low_rank or self.compose_gate):
            return ()
        return tuple(side for side in ("query", "key") if getattr(self, f"compose_{side}_wise"))

    @property
    def composes(self) -> bool:
        """Whether heads are mixed at all; if not, the model is a plain Transformer."""
        terms = bool(self.compose_sides) or self.compose_static or self.differential_heads
        return bool(self.compose_stages) and terms

    @property
    def composes_keys(self) -> bool:
        """Whether cached tokens need their composition factors."""
        return bool(self.compose_stages) and "key" in self.compose_sides

    def validate_heads(self) -> None:
        """Part of the strict validation: head counts and widths fit each other."""
        heads, kv_heads = self.num_attention_heads, self.num_key_value_heads
        if kv_heads is None or heads % kv_heads:
            raise ValueError(f"num_key_value_heads ({kv_heads}) must divide num_attention_heads ({heads})")
        if self.head_dim is None or self.head_dim % 2:
            raise ValueError(
                f"head_dim ({self.head_dim}) must be even: rotary embedding turns pairs; by default it is hidden_size "
                f"({self.hidden_size}) / num_attention_heads ({heads})"
            )

    def validate_composition(self) -> None:
        """Part of the strict validation: groups and rank fit the heads."""
        heads = self.num_attention_heads
        if heads % self.compose_groups:
            raise ValueError(f"compose_groups ({self.compose_groups}) must divide num_attention_heads ({heads})")
        group = heads // self.compose_groups
        if not self.composes:
            return
        if group < 2:
            raise ValueError(
                f"num_attention_heads ({heads}) / compose_groups ({self.compose_groups}) leaves {group} to a group; "
                "composing takes at least 2 heads, or switch it off (compose_pre=False, compose_post=False)"
            )
        if self.compose_low_rank and not 1 <= self.compose_rank <= group:
            raise ValueError(f"compose_rank ({self.compose_rank}) must be from 1 to the heads of a group ({group})")

    def validate_differential(self) -> None:
        """Part of the strict validation: differential attention has probabilities and pairs of heads."""
        if not self.differential_heads:
            return
        if not self.compose_post:
            raise ValueError("differential_heads subtracts probabilities, but compose_post is False; set it to True")
        if self.compose_groups != 1:
            raise ValueError(
                f"compose_groups ({self.compose_groups}) must be 1 for differential_heads, whose pairs lie in the "
                "first and in the second half of the heads"
            )
        if self.num_key_value_heads is None or self.num_key_value_heads % 2:
            raise ValueError(
                f"num_key_value_heads ({self.num_key_value_heads}) must be even for differential_heads: the first "
                "half has the first keys of all pairs, the second half the second"
            )

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
        check_rope_parameters(self.rope_parameters or {}, self.head_dim or 0)


def repeat_layer_types(pattern: str, num_hidden_layers: int) -> list[str]:
    """Returns `layer_types` from a repeated pattern of letters: "LG" is local (sliding), global (full), local, ..."""
    return [LAYER_TYPES[pattern[layer % len(pattern)]] for layer in range(num_hidden_layers)]
