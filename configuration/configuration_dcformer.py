"""DCFormer: a LLaMA-style decoder with dynamically composable attention heads (arXiv 2405.08553)."""

from typing import Any, ClassVar

from huggingface_hub.dataclasses import strict
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS, RopeParameters

from .configuration_composition import ComposedConfig, alternating_layer_types


@strict
class DCFormerConfig(ComposedConfig):
    r"""
    Configuration of a DCFormer; the defaults are those of the released DCFormer-2.8B. The composition fields are
    documented in `ComposedConfig`.

    Args:
        num_key_value_heads (`int`, *optional*): fewer than `num_attention_heads` is grouped-query attention: keys and
            values are repeated, composition is over all query heads.
        head_dim (`int`, *optional*): by default `hidden_size // num_attention_heads`.
        sliding_window (`int`, *optional*, defaults to 256): keys that a token of a sliding layer sees, itself included.
        layer_types (`list[str]`, *optional*): `"sliding_attention"` or `"full_attention"` for each layer; by default
            even layers slide and odd layers see everything, or all see everything when `sliding_window` is None.
        use_qk_norm (`bool`, defaults to `True`): RMS norm of each query and key head before the rotary embedding.
        qk_norm_eps (`float`, defaults to 1e-6): its epsilon (the released PyTorch code; the JAX trainer used
            `rms_norm_eps`).
        mgate_dim (`int`, *optional*): splits the MLP's activations into so many groups, each scaled by one entry of a
            softmax over groups that depends on the token.
        initializer_range (`float`, defaults to 0.006): standard deviation of all other matrices, as in the JAX trainer.

    ```python
    >>> from dynattn import DCFormerConfig, DCFormerForCausalLM
    >>> config = DCFormerConfig.from_size("405m", sliding_window=128)
    >>> model = DCFormerForCausalLM(config)
    ```
    """

    model_type = "dcformer"
    keys_to_ignore_at_inference: ClassVar[list[str]] = ["past_key_values"]
    base_model_pp_plan: ClassVar[dict[str, Any]] = {
        "embed_tokens": (["input_ids"], ["inputs_embeds"]),
        "layers": (["hidden_states", "attention_mask"], ["hidden_states"]),
        "norm": (["hidden_states"], ["hidden_states"]),
    }

    vocab_size: int = 50257
    hidden_size: int = 2560
    intermediate_size: int = 6912
    num_hidden_layers: int = 32
    num_attention_heads: int = 32
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    hidden_act: str = "silu"
    max_position_embeddings: int = 2048
    initializer_range: float | int = 0.006
    rms_norm_eps: float = 1e-6
    use_cache: bool = True
    tie_word_embeddings: bool = False
    rope_parameters: RopeParameters | dict | None = None
    attention_bias: bool = False
    mlp_bias: bool = False
    use_qk_norm: bool = True
    qk_norm_eps: float = 1e-6
    mgate_dim: int | None = None
    sliding_window: int | None = 256
    layer_types: list[str] | None = None
    pad_token_id: int | None = None
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None

    def __post_init__(self, **kwargs: Any) -> None:
        if self.num_key_value_heads is None:
            self.num_key_value_heads = self.num_attention_heads
        if self.head_dim is None and self.num_attention_heads > 0:
            self.head_dim = self.hidden_size // self.num_attention_heads
        if self.layer_types is None:
            self.layer_types = alternating_layer_types(
                self.num_hidden_layers, "G" if self.sliding_window is None else "LG"
            )
        super().__post_init__(**kwargs)

    def validate_heads(self) -> None:
        """Part of the strict validation: head counts and widths fit each other."""
        heads, kv_heads = self.num_attention_heads, self.num_key_value_heads
        if heads < 1 or kv_heads is None or kv_heads < 1 or heads % kv_heads:
            raise ValueError(f"num_key_value_heads ({kv_heads}) must divide num_attention_heads ({heads})")
        if self.head_dim is None or self.head_dim < 2 or self.head_dim % 2:
            raise ValueError(f"head_dim ({self.head_dim}) must be even and positive: rotary embedding turns pairs")
        if self.head_dim == self.hidden_size // heads and self.hidden_size % heads:
            raise ValueError(
                f"hidden_size ({self.hidden_size}) must be a multiple of num_attention_heads ({heads}), or give head_dim"
            )

    def validate_rope_type(self) -> None:
        """Part of the strict validation: the rotary variant exists."""
        known = {"default", *ROPE_INIT_FUNCTIONS}
        if self.rope_parameters is not None and self.rope_parameters.get("rope_type", "default") not in known:
            raise ValueError(
                f"rope_type {self.rope_parameters['rope_type']!r} does not exist; choose from {sorted(known)}"
            )

    def validate_mgate(self) -> None:
        """Part of the strict validation: the gate's groups divide the activations."""
        if self.mgate_dim is not None and (self.mgate_dim < 1 or self.intermediate_size % self.mgate_dim):
            raise ValueError(f"mgate_dim ({self.mgate_dim}) must divide intermediate_size ({self.intermediate_size})")


def _size(hidden_size: int, layers: int, heads: int, intermediate_size: int, **fields: Any) -> dict[str, Any]:
    return {
        "hidden_size": hidden_size,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "intermediate_size": intermediate_size,
        **fields,
    }


# "405m" is the JAX trainer's DCFormer++ setting, "2.8b" and "8b" are the released configurations (their context lengths,
# 2048 and 4096, are the trainer's and the inference code's), "6.9b" is DCPythia-6.9B's shape with this block's MLP width.
DCFormerConfig.sizes = {
    "tiny": _size(
        128, 4, 4, 352, vocab_size=2048, max_position_embeddings=512, sliding_window=64, initializer_range=0.02
    ),
    "405m": _size(1024, 24, 16, 2816, vocab_size=50256, rms_norm_eps=1e-5, qk_norm_eps=1e-5),
    "2.8b": _size(2560, 32, 32, 6912),
    "6.9b": _size(4096, 32, 32, 11008),
    "8b": _size(
        4096,
        48,
        32,
        5632,
        vocab_size=152064,
        max_position_embeddings=4096,
        rope_parameters={"rope_theta": 500000.0, "rope_type": "default"},
        mgate_dim=44,
        layer_types=alternating_layer_types(48, "LGLL"),
    ),
}

__all__ = ["DCFormerConfig"]
