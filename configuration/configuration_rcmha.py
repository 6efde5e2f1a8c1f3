"""RCMHA: relative convolutional multi-head attention on a Transformer-XL backbone (arXiv 2308.03429)."""

from typing import Any, ClassVar

from huggingface_hub.dataclasses import strict

from .field_rules import check_buckets, check_choices, check_even_heads
from .portable_config import model_size
from .relative_config import RelativeConfig
from .tensor_parallel_plans import MLP_PLAN

MEMORY_TYPES = ("streaming", "segment")
MEMORY_SCHEMES = ("none", "rope", "alibi", "t5", "learned", "sinusoidal")


@strict
class RCMHAConfig(RelativeConfig):
    r"""
    Configuration of an RCMHA language model: the fields of `RelativeConfig` and those of the memory. The defaults are
    the shape of the official training script.

    Args:
        conv_is_causal (`bool`, defaults to `True`): whether convolutions see earlier tokens only. `False` is refused,
            since a decoder must not see later tokens.
        memory_type (`str`, defaults to `"streaming"`): what a segment sees of the tokens before it.
            `"streaming"`: a token sees itself and the `mem_len` tokens before it, and convolutions see across segments,
            so that any segmentation of the same tokens gives the same logits.
            `"segment"`: the official code. A token sees its own segment and the `mem_len` tokens before the segment;
            queries are convolved inside the segment only, keys and values inside memory and segment.
        mem_len (`int`, *optional*, defaults to 128): tokens kept from before a segment; None keeps all of them, up to
            `max_position_embeddings`.
        max_position_embeddings (`int`, defaults to 2048): number of tokens that attention may reach over, and rows of
            the tables of relative and of learned positions; with a streaming memory the former have `mem_len + 1` rows.
        position_scheme (`str`, defaults to `"none"`): positions of `mdha` and `mha`, which have no relative positions:
            `"none"` (the paper's), `"rope"`, `"alibi"`, `"t5"`, a learned bias for each bucket of distances,
            `"learned"`, or `"sinusoidal"`, scaled by `initializer_range`.
        t5_num_buckets, t5_max_distance (`int`, default to 32 and 128): as in `ComposedConfig`.
        rope_theta (`float`, defaults to 10000.0): base of the angles of `"rope"`.

    ```python
    >>> from dynattn import RCMHAConfig, RCMHAForCausalLM
    >>> model = RCMHAForCausalLM(RCMHAConfig(attention_type="rcmha", mem_len=128))
    ```
    """

    model_type = "rcmha"
    base_model_tp_plan: ClassVar[dict[str, Any] | None] = MLP_PLAN

    vocab_size: int = 65
    hidden_size: int = 128
    intermediate_size: int = 256
    num_hidden_layers: int = 6
    num_attention_heads: int = 8
    conv_is_causal: bool = True
    memory_type: str = "streaming"
    mem_len: int | None = 128
    max_position_embeddings: int = 2048
    position_scheme: str = "none"
    rope_theta: float | int = 10000.0
    t5_num_buckets: int = 32
    t5_max_distance: int = 128
    tie_word_embeddings: bool = False
    pad_token_id: int | None = None
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None

    def __post_init__(self, **kwargs: Any) -> None:
        if derived := sorted({"sliding_window", "layer_types"} & kwargs.keys()):
            raise ValueError(f"{derived} follow from memory_type and mem_len; set those instead")
        if rotary := sorted({"rope_parameters", "rope_scaling", "partial_rotary_factor"} & kwargs.keys()):
            raise ValueError(f"{rotary} are no fields of this family, whose 'rope' turns whole heads; set rope_theta")
        super().__post_init__(**kwargs)

    @property
    def sliding_window(self) -> int | None:
        """Number of keys that a token of a streaming model sees, itself included; None where it has no bound."""
        return None if self.memory_type == "segment" or self.mem_len is None else self.mem_len + 1

    @property
    def layer_types(self) -> list[str]:
        """The type of each layer, which Transformers' masks and caches read."""
        kind = "full_attention" if self.sliding_window is None else "sliding_attention"
        return [kind] * self.num_hidden_layers

    @property
    def schemes(self) -> set[str]:
        """The position schemes in use."""
        return {self.position_scheme}

    @property
    def num_relative_positions(self) -> int:
        """Rows of the relative position tables: one for each distance that a query can reach, from 0."""
        return self.sliding_window or self.max_position_embeddings

    def validate_choices(self) -> None:
        """Part of the strict validation: named options exist and may be combined."""
        check_choices(self, memory_type=MEMORY_TYPES, position_scheme=MEMORY_SCHEMES)
        super().validate_choices()
        check_buckets(self)

    def validate_heads(self) -> None:
        """Part of the strict validation: rotary embedding has an even number of channels to rotate."""
        if self.position_scheme == "rope":
            check_even_heads(self)

    def validate_convolution(self) -> None:
        """Part of the strict validation: the kernel covers no later token."""
        if not self.conv_is_causal:
            raise ValueError(
                "conv_is_causal=False would let a token see later ones, and a language model predict what it was "
                "shown; leave it at True"
            )

    def validate_memory(self) -> None:
        """Part of the strict validation: the memory fits the positions, and a streaming memory is not empty."""
        if self.mem_len is None:
            return
        if self.mem_len >= self.max_position_embeddings:
            raise ValueError(
                f"mem_len ({self.mem_len}) must be smaller than max_position_embeddings "
                f"({self.max_position_embeddings}): the memory and at least one token fit into it"
            )
        if self.mem_len == 0 and self.memory_type == "streaming":
            raise ValueError(
                "mem_len=0 would leave a streaming token nothing but itself to attend to; use memory_type='segment' "
                "for segments without memory, or mem_len=None for all earlier tokens"
            )


RCMHAConfig.sizes = {
    "tiny": model_size(128, 4, 4, 256, vocab_size=2048, mem_len=64, max_position_embeddings=512),
    "paper": model_size(128, 6, 8, 256, mem_len=32, memory_type="segment"),
    "paper-streaming": model_size(128, 6, 8, 256),
}

__all__ = ["RCMHAConfig"]
