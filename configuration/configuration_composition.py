"""The composition fields that every DCMHA model has, whatever its block looks like."""

from typing import Any, ClassVar, Self

from huggingface_hub.dataclasses import strict
from transformers import PreTrainedConfig


@strict
class ComposedConfig(PreTrainedConfig):
    r"""
    What dynamic head composition (DCMHA, arXiv 2405.08553) adds to a decoder configuration.

    Args:
        compose_pre (`bool`, defaults to `True`): compose the scores, before the softmax.
        compose_post (`bool`, defaults to `True`): compose the probabilities, after the softmax.
        compose_query_wise (`bool`, defaults to `True`): terms that depend on the query token.
        compose_key_wise (`bool`, defaults to `True`): terms that depend on the key token; their factors are cached.
        compose_low_rank (`bool`, defaults to `True`): the dynamic low-rank head mixing.
        compose_gate (`bool`, defaults to `True`): the dynamic per-head gate.
        compose_static (`bool`, defaults to `False`): a learned input-independent head mixing (talking heads).
        compose_rank (`int`, defaults to 2): rank of the low-rank mixing, at most the heads of a group.
        compose_groups (`int`, defaults to 1): heads are mixed only inside each of so many consecutive groups.
        compose_hidden_size (`int`, *optional*): hidden width of the factor generator for each group and component;
            by default `2 * compose_rank * heads of a group`, as released.
        compose_act (`str`, defaults to `"gelu"`): activation of the generator; the JAX trainer used
            `"gelu_pytorch_tanh"`, the released PyTorch code the exact `"gelu"`.
        compose_norm_eps (`float`, defaults to 1e-6): epsilon of the norm over heads of the first factors.
        compose_init_scale (`float`, defaults to 1.0): multiplies the initial second factors, gates and static mixing.
            At 0 a new model composes nothing at first, and still every composition parameter learns.
    """

    sizes: ClassVar[dict[str, dict[str, Any]]] = {}

    compose_pre: bool = True
    compose_post: bool = True
    compose_query_wise: bool = True
    compose_key_wise: bool = True
    compose_low_rank: bool = True
    compose_gate: bool = True
    compose_static: bool = False
    compose_rank: int = 2
    compose_groups: int = 1
    compose_hidden_size: int | None = None
    compose_act: str = "gelu"
    compose_norm_eps: float = 1e-6
    compose_init_scale: float | int = 1.0

    @classmethod
    def from_size(cls, name: str, **overrides: Any) -> Self:
        """Returns the configuration of a named size (see `sizes`), with fields overridden by keyword.

        Raises:
            ValueError: the size does not exist.
        """
        if name not in cls.sizes:
            raise ValueError(f"{cls.__name__} has no size {name!r}; choose from {sorted(cls.sizes)}")
        return cls(**{**cls.sizes[name], **overrides})

    @property
    def compose_stages(self) -> tuple[str, ...]:
        """The stages that are composed, in the order of the weights."""
        return tuple(stage for stage in ("pre", "post") if getattr(self, f"compose_{stage}"))

    @property
    def compose_sides(self) -> tuple[str, ...]:
        """The tokens that dynamic terms depend on, in the order of the weights; empty where no term is dynamic."""
        if not (self.compose_low_rank or self.compose_gate):
            return ()
        return tuple(side for side in ("query", "key") if getattr(self, f"compose_{side}_wise"))

    @property
    def composes(self) -> bool:
        """Whether heads are mixed at all; without it the model is a plain Transformer."""
        return bool(self.compose_stages) and (bool(self.compose_sides) or self.compose_static)

    @property
    def composes_keys(self) -> bool:
        """Whether cached tokens need their composition factors."""
        return bool(self.compose_stages) and "key" in self.compose_sides

    def validate_composition(self) -> None:
        """Part of the strict validation: rank, groups and epsilon."""
        heads = self.num_attention_heads
        if self.compose_groups < 1 or heads % self.compose_groups:
            raise ValueError(f"compose_groups ({self.compose_groups}) must divide num_attention_heads ({heads})")
        group = heads // self.compose_groups
        if not self.composes:
            return
        if group < 2:
            raise ValueError(
                f"num_attention_heads ({heads}) / compose_groups ({self.compose_groups}) leaves {group} head to compose; "
                "use at least 2, or switch composition off (compose_pre=False, compose_post=False)"
            )
        if self.compose_low_rank and not 1 <= self.compose_rank <= group:
            raise ValueError(f"compose_rank ({self.compose_rank}) must be from 1 to the heads of a group ({group})")
        if self.compose_hidden_size is not None and self.compose_hidden_size < 1:
            raise ValueError(f"compose_hidden_size ({self.compose_hidden_size}) must be positive, or None")
        if self.compose_norm_eps <= 0:
            raise ValueError(f"compose_norm_eps ({self.compose_norm_eps}) must be positive")

    def validate_sliding_window(self) -> None:
        """Part of the strict validation: sliding layers have a window of at least the token itself."""
        sliding = "sliding_attention" in (self.layer_types or ())
        if sliding and self.sliding_window is None:
            raise ValueError(
                "layer_types has 'sliding_attention' but sliding_window is None; give the keys a token sees"
            )
        if self.sliding_window is not None and self.sliding_window < 1:
            raise ValueError(f"sliding_window ({self.sliding_window}) must be at least 1 (the token itself), or None")
        if unknown := sorted(set(self.layer_types or ()) - {"full_attention", "sliding_attention"}):
            raise ValueError(f"layer_types has {unknown}; only 'full_attention' and 'sliding_attention' exist here")


def alternating_layer_types(num_hidden_layers: int, pattern: str) -> list[str]:
    """Returns `layer_types` from a repeated pattern of letters: "LG" is local (sliding), global (full), local, ..."""
    names = {"L": "sliding_attention", "G": "full_attention"}
    return [names[pattern[layer % len(pattern)]] for layer in range(num_hidden_layers)]
