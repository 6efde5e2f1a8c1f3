"""DCFormer: a LLaMA-style decoder with dynamically composable attention heads (arXiv 2405.08553)."""

from typing import Any, ClassVar

from huggingface_hub.dataclasses import strict

from .composed_config import ComposedConfig, repeat_layer_types
from .field_rules import check_choices
from .portable_config import model_size
from .tensor_parallel_plans import GATED_MLP_PLAN

NORM_PLACEMENTS = ("input", "output")


@strict
class DCFormerConfig(ComposedConfig):
    r"""
    Configuration of a DCFormer; the defaults are those of the released DCFormer-2.8B. Attention and composition fields
    are documented in `ComposedConfig`.

    Args:
        mlp_bias (`bool`, defaults to `False`): biases of the MLP.
        mgate_dim (`int`, *optional*): number of groups into which the MLP's activations are split. A softmax over the
            groups, computed from the token's hidden state, scales each of them.
        norm_placement (`str`, defaults to `"input"`): what each layer normalizes: the inputs of attention and MLP, or
            the `"output"` of both before it is added to the hidden states, as in OLMo 2, where the factors of the
            composition are computed from hidden states that are not normalized.
        initializer_range (`float`, defaults to 0.006): standard deviation of all matrices outside the composition, as
            in the JAX trainer.

    ```python
    >>> from dynattn import DCFormerConfig, DCFormerForCausalLM
    >>> config = DCFormerConfig.from_size("405m", sliding_window=128)
    >>> model = DCFormerForCausalLM(config)
    ```
    """

    model_type = "dcformer"
    base_model_tp_plan: ClassVar[dict[str, Any] | None] = GATED_MLP_PLAN

    vocab_size: int = 50257
    hidden_size: int = 2560
    intermediate_size: int = 6912
    num_hidden_layers: int = 32
    num_attention_heads: int = 32
    hidden_act: str = "silu"
    max_position_embeddings: int = 2048
    initializer_range: float | int = 0.006
    rms_norm_eps: float = 1e-6
    use_cache: bool = True
    tie_word_embeddings: bool = False
    mlp_bias: bool = False
    mgate_dim: int | None = None
    norm_placement: str = "input"
    pad_token_id: int | None = None
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None

    def __post_init__(self, **kwargs: Any) -> None:
        if self.mgate_dim is not None:
            # No tensor parallelism for the MLP: a device would hold the activations of some groups, but gates for all.
            # Embeddings are split, because the head is, which may have the same weight; Transformers adds them only to
            # plans that are not empty.
            self.base_model_tp_plan = {"embed_tokens": "embedding_rowwise"}  # type: ignore[misc]
        super().__post_init__(**kwargs)

    def validate_norm_placement(self) -> None:
        """Part of the strict validation: there is such a place for norms."""
        check_choices(self, norm_placement=NORM_PLACEMENTS)

    def validate_mgate(self) -> None:
        """Part of the strict validation: the gate's groups divide the activations."""
        if self.mgate_dim is not None and self.intermediate_size % self.mgate_dim:
            raise ValueError(f"mgate_dim ({self.mgate_dim}) must divide intermediate_size ({self.intermediate_size})")


# "405m" is the JAX trainer's DCFormer++ setting; "2.8b" and "8b" are the released configurations, with the context
# length of the trainer (2048) and of the inference code (4096); "6.9b" is DCPythia-6.9B's shape with this block's MLP.
DCFormerConfig.sizes = {
    "tiny": model_size(
        128, 4, 4, 352, vocab_size=2048, max_position_embeddings=512, sliding_window=64, initializer_range=0.02
    ),
    "405m": model_size(1024, 24, 16, 2816, vocab_size=50256, rms_norm_eps=1e-5, qk_norm_eps=1e-5),
    "2.8b": model_size(2560, 32, 32, 6912),
    "6.9b": model_size(4096, 32, 32, 11008),
    "8b": model_size(
        4096,
        48,
        32,
        5632,
        vocab_size=152064,
        max_position_embeddings=4096,
        rope_parameters={"rope_theta": 500000.0, "rope_type": "default"},
        mgate_dim=44,
        layer_types=repeat_layer_types("LGLL", 48),
    ),
}

__all__ = ["DCFormerConfig"]
