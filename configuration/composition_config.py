"""The fields of attention and composition that every configuration of a model with composed heads has."""

from collections.abc import Mapping
from typing import Any, Self

from huggingface_hub.dataclasses import strict

from .field_rules import check_choices
from .mixers import mixer_fields
from .portable_config import PortableConfig, default_head_dim
from .tensor_parallel_plans import ATTENTION_PLAN

QK_NORM_TYPES = ("rms_norm", "layer_norm", "joint_rms_norm")


@strict
class CompositionConfig(PortableConfig):
    r"""
    Attention with dynamically composed heads (DCMHA, arXiv 2405.08553), for decoders and bidirectional models.

    Args:
        num_key_value_heads (`int`, *optional*): fewer than `num_attention_heads` is grouped-query attention: keys and
            values are repeated, composition is over all query heads.
        head_dim (`int`, *optional*): by default `hidden_size // num_attention_heads`.
        attention_bias (`bool`, defaults to `False`): biases of the query, key and value projections.
        attention_output_bias (`bool`, *optional*): bias of the output projection, by default as `attention_bias` says.
        attention_scaling (`float`, *optional*): factor on the scores, by default `head_dim ** -0.5`.
        attention_dropout (`float`, defaults to 0.0): dropout of the attention probabilities. Must be 0 where heads are
            composed, because those models never have all probabilities in memory.
        use_qk_norm (`bool`, defaults to `True`): normalize each query and key head, before any rotary embedding.
        qk_norm_type (`str`, defaults to `"rms_norm"`): kind of that norm; or `"layer_norm"`, with a scale and without a
            bias, as in the authors' vision transformers; or `"joint_rms_norm"`, which normalizes the queries of all
            heads together, and likewise the keys, as in OLMo 2.
        qk_norm_eps (`float`, defaults to 1e-6): epsilon of that norm, as in the released PyTorch code.
        compose_pre (`bool`, defaults to `True`): compose the scores, before the softmax.
        compose_post (`bool`, defaults to `True`): compose the probabilities, after the softmax.
        compose_query_wise (`bool`, defaults to `True`): use terms that depend on the query token.
        compose_key_wise (`bool`, defaults to `True`): use terms that depend on the key token; caches keep their factors
            beside keys and values.
        compose_low_rank (`bool`, defaults to `True`): the dynamic low-rank head mixing.
        compose_gate (`bool`, defaults to `True`): the dynamic per-head gate.
        compose_static (`bool`, defaults to `False`): a learned input-independent head mixing (talking heads).
        differential_heads (`bool`, defaults to `False`): differential attention (arXiv 2410.05258). Heads `i` and
            `i + num_attention_heads / 2` form a pair with one value of double width, half of it in each head. The
            probabilities of the second head, times a learned scalar, are subtracted from those of the first, and the
            output of the pair is normalized. Needs `compose_post=True`, `compose_groups=1` and an even number of key
            heads.
        head_norm_eps (`float`, defaults to 1e-5): epsilon of the norm of `differential_heads`.
        compose_rank (`int`, defaults to 2): rank of the low-rank mixing, at most the number of heads in a group.
        compose_groups (`int`, defaults to 1): number of groups of consecutive heads; heads mix only inside their group,
            so that tensor parallelism can give the groups to several devices.
        compose_hidden_size (`int`, *optional*): hidden width of the factor generator for each group and component;
            by default `2 * compose_rank * heads of a group`, as released.
        compose_act (`str`, defaults to `"gelu"`): activation of the generator; the JAX trainer used
            `"gelu_pytorch_tanh"`, the released PyTorch code the exact `"gelu"`.
        compose_norm_eps (`float`, defaults to 1e-6): epsilon of the norm of the down factors over heads.
        compose_init_scale (`float`, defaults to 1.0): multiplies the initial up factors, gates and static mixing. At 0
            the composition of a new model starts as the identity, and all of its parameters still learn.
            (`differential_heads` starts as its paper says.)
        compose_dropout (`float`, defaults to 0.0): dropout of the gates and of the generator's hidden activations.

    `from_size(..., mixer="talking_heads")` sets these fields for a published attention.
    """

    num_key_value_heads: int | None = None
    head_dim: int | None = None
    attention_bias: bool = False
    attention_output_bias: bool | None = None
    attention_scaling: float | int | None = None
    attention_dropout: float | int = 0.0
    use_qk_norm: bool = True
    qk_norm_type: str = "rms_norm"
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
    compose_dropout: float | int = 0.0

    def __post_init__(self, **kwargs: Any) -> None:
        if "mixer" in kwargs:
            raise ValueError(
                f"mixer={kwargs['mixer']!r} is an option of from_size; here, give the fields that it stands for: "
                f"{type(self).__name__}(**dynattn.mixer_fields({kwargs['mixer']!r}), ...)"
            )
        super().__post_init__(**kwargs)
        if self.base_model_tp_plan is not None and self.has_separate_heads():
            parts = {"_norm": self.use_qk_norm, "composition": self.composes}
            missing = tuple(name for name, exists in parts.items() if not exists)
            attention = {rule: style for rule, style in ATTENTION_PLAN.items() if not rule.endswith(missing)}
            self.base_model_tp_plan = {**self.base_model_tp_plan, **attention}  # type: ignore[misc]

    def fill_defaults(self) -> None:
        """Also sets the number of key heads and the width of a head."""
        if self.num_key_value_heads is None:
            self.num_key_value_heads = self.num_attention_heads
        if self.head_dim is None:
            self.head_dim = default_head_dim(self.hidden_size, self.num_attention_heads)

    @classmethod
    def from_size(cls, name: str, *, mixer: str | None = None, **overrides: Any) -> Self:
        """Returns the configuration of a size that the model card lists (`sizes`), with fields overridden by keyword.

        Args:
            mixer: name of a published attention, a key of `MIXERS`, that sets `compose_*` fields; keywords come first.

        Raises:
            ValueError: the size or the attention does not exist, or fields do not fit.
        """
        fields = {} if mixer is None else mixer_fields(mixer)
        return super().from_size(name, **{**fields, **overrides})

    @property
    def compose_stages(self) -> tuple[str, ...]:
        """The stages ("pre", "post") that are composed, in the order in which weights and packed terms hold them."""
        return tuple(stage for stage in ("pre", "post") if getattr(self, f"compose_{stage}"))

    @property
    def compose_sides(self) -> tuple[str, ...]:
        """The sides ("query", "key") whose tokens generate dynamic terms, in the order of the weights.

        Empty if there are no dynamic terms.
        """
        if not (self.compose_low_rank or self.compose_gate):
            return ()
        return tuple(side for side in ("query", "key") if getattr(self, f"compose_{side}_wise"))

    @property
    def has_output_bias(self) -> bool:
        """Whether the output projection has a bias, as `attention_output_bias` says, or else `attention_bias`."""
        return self.attention_bias if self.attention_output_bias is None else self.attention_output_bias

    @property
    def composes(self) -> bool:
        """Whether heads are mixed at all; if not, the model is a plain Transformer."""
        return self.mixes_heads()

    def mixes_heads(self) -> bool:
        """What `composes` says, for subclasses to extend: `torch.compile` cannot read a property of `super()`."""
        terms = bool(self.compose_sides) or self.compose_static or self.differential_heads
        return bool(self.compose_stages) and terms

    def has_separate_heads(self) -> bool:
        """Whether some heads can attend without the others, so that tensor parallelism splits attention.

        Composition mixes heads inside their group. Several groups can be apart if the key heads can, too.
        """
        if self.num_key_value_heads is None or (self.use_qk_norm and self.qk_norm_type == "joint_rms_norm"):
            return False
        groups = self.compose_groups if self.composes else self.num_key_value_heads
        return groups > 1 and self.num_key_value_heads % groups == 0

    @property
    def needs_own_ops(self) -> bool:
        """Whether only attention implementations of this package compute what the layers ask for."""
        return self.composes

    @property
    def composes_keys(self) -> bool:
        """Whether cached tokens need their composition factors."""
        return bool(self.compose_stages) and "key" in self.compose_sides

    def validate_heads(self) -> None:
        """Part of the strict validation: the number of key heads divides the number of query heads."""
        heads, kv_heads = self.num_attention_heads, self.num_key_value_heads
        if kv_heads is None or heads % kv_heads:
            raise ValueError(f"num_key_value_heads ({kv_heads}) must divide num_attention_heads ({heads})")

    def validate_attention(self) -> None:
        """Part of the strict validation: the norm exists, and no dropout acts on probabilities of composed heads."""
        check_choices(self, qk_norm_type=QK_NORM_TYPES)
        if self.attention_dropout and self.composes:
            others = " or ".join(name for name in ("hidden_dropout", "compose_dropout") if hasattr(self, name))
            raise ValueError(
                f"attention_dropout ({self.attention_dropout}) must be 0 where heads are composed: it drops entries of "
                f"maps that are never all in memory; use {others}"
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
        """Part of the strict validation: differential attention composes probabilities, and heads form pairs."""
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

    def completed_rope(self, rope: Mapping[str, Any], arguments: Mapping[str, Any]) -> dict[str, Any]:
        """Rotary parameters of all layers, or of those of a type, with Transformers' defaults.

        Transformers 5.17 itself completes only flat parameters.
        """
        self.rope_parameters = {**rope}
        super().convert_rope_params_to_dict(**arguments)
        return {**self.rope_parameters}

    def _validate_truncated_rope_parameters(self, rope: Any, ignore_keys: Any = None) -> None:
        """Does nothing: Transformers calls a method of this name, but `validate_rotary` has checked the parameters."""

    _validate_power_rope_parameters = _validate_truncated_rope_parameters
