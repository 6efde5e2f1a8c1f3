"""DCModernBert: a bidirectional encoder with dynamically composable attention heads (arXiv 2405.08553)."""

from typing import Any, ClassVar

from huggingface_hub.dataclasses import strict

from .composition_config import CompositionConfig
from .field_rules import check_choices, check_layer_types, check_rope_mapping, check_rope_parameters
from .portable_config import model_size
from .tensor_parallel_plans import GATED_MLP_PLAN

THETAS = {"full_attention": 160_000.0, "sliding_attention": 10_000.0}
POOLINGS = ("cls", "mean")


@strict
class DCModernBertConfig(CompositionConfig):
    r"""
    Configuration of a DCModernBert; the defaults are ModernBERT-base with composed heads. Attention and composition
    fields are documented in `CompositionConfig`.

    Args:
        local_attention (`int`, defaults to 128): window of sliding layers; a token sees `local_attention // 2` tokens
            on either side.
        layer_types (`list[str]`, *optional*): `"full_attention"` or `"sliding_attention"` for each layer; by default
            every third layer, from the first on, is full.
        rope_parameters (`dict`, *optional*): the rotary embedding of each layer type, in any `rope_type` of a
            DCFormer; `rope_theta` is by default 160,000 in full layers and 10,000 in sliding ones.
        norm_bias, mlp_bias, classifier_bias, decoder_bias (`bool`): biases of norms, MLPs, the layer in front of heads,
            and the masked language modeling head; only the last has one by default.
        embedding_dropout, mlp_dropout, classifier_dropout (`float`, default to 0.0): dropout of embeddings, of the
            MLP's activations, and of what classifiers read.
        classifier_pooling (`str`, defaults to `"cls"`): whether sequence classification reads the first real token, or
            the `"mean"` of all real tokens.
        initializer_cutoff_factor (`float`, defaults to 2.0): initial weights come from a normal distribution truncated
            at this number of standard deviations.

    ```python
    >>> from dynattn import DCModernBertConfig, DCModernBertForMaskedLM
    >>> model = DCModernBertForMaskedLM(DCModernBertConfig.from_size("base"))
    ```
    """

    model_type = "dcmodernbert"
    base_model_tp_plan: ClassVar[dict[str, Any] | None] = GATED_MLP_PLAN

    vocab_size: int = 50368
    hidden_size: int = 768
    intermediate_size: int = 1152
    num_hidden_layers: int = 22
    num_attention_heads: int = 12
    hidden_act: str = "gelu"
    max_position_embeddings: int = 8192
    initializer_range: float | int = 0.02
    initializer_cutoff_factor: float | int = 2.0
    norm_eps: float = 1e-5
    norm_bias: bool = False
    mlp_bias: bool = False
    local_attention: int = 128
    layer_types: list[str] | None = None
    rope_parameters: dict | None = None
    embedding_dropout: float | int = 0.0
    mlp_dropout: float | int = 0.0
    classifier_pooling: str = "cls"
    classifier_dropout: float | int = 0.0
    classifier_bias: bool = False
    classifier_activation: str = "gelu"
    decoder_bias: bool = True
    tie_word_embeddings: bool = True
    use_qk_norm: bool = False
    pad_token_id: int | None = 50283
    bos_token_id: int | None = 50281
    eos_token_id: int | list[int] | None = 50282
    cls_token_id: int | None = 50281
    sep_token_id: int | None = 50282

    def __post_init__(self, **kwargs: Any) -> None:
        thetas = {"rope_theta", "global_rope_theta", "local_rope_theta"}
        if derived := sorted({"sliding_window", "rope_scaling", "partial_rotary_factor", *thetas} & kwargs.keys()):
            raise ValueError(
                f"{derived} are no fields: local_attention is twice the window, and rope_parameters has a rope_theta "
                "for each layer type"
            )
        super().__post_init__(**kwargs)

    @property
    def sliding_window(self) -> int:
        """Number of tokens that a token of a sliding layer sees on either side."""
        return self.local_attention // 2

    def fill_defaults(self) -> None:
        """Also sets `layer_types`: every third layer, from the first on, is full."""
        super().fill_defaults()
        if self.layer_types is None:
            every = range(self.num_hidden_layers)
            self.layer_types = ["sliding_attention" if layer % 3 else "full_attention" for layer in every]

    def convert_rope_params_to_dict(self, **kwargs: Any) -> dict[str, Any]:
        """Fills in the rotary parameters of each layer type; called by `PreTrainedConfig`."""
        given: Any = self.rope_parameters or {}
        check_rope_mapping(given)
        if unknown := sorted(given.keys() - THETAS.keys()):
            raise ValueError(f"rope_parameters has {unknown}; it must have parameters for each of {sorted(THETAS)}")
        self.rope_parameters = {
            layer_type: self.completed_rope({"rope_theta": theta, **(given.get(layer_type) or {})}, {})
            for layer_type, theta in THETAS.items()
        }
        self.validate_rotary()
        return kwargs

    def validate_layers(self) -> None:
        """Part of the strict validation: layer types and pooling exist."""
        check_layer_types(self)
        check_choices(self, classifier_pooling=POOLINGS)

    def validate_rotary(self) -> None:
        """Part of the strict validation: the rotary parameters of both layer types are complete and fit the heads."""
        for rope in (self.rope_parameters or {}).values():
            check_rope_parameters(rope, self.head_dim or 0)


_TINY_TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "cls_token_id": 1, "eos_token_id": 2, "sep_token_id": 2}
DCModernBertConfig.sizes = {
    "tiny": model_size(
        128, 4, 4, 192, vocab_size=2048, max_position_embeddings=512, local_attention=32, **_TINY_TOKENS
    ),
    "base": model_size(768, 22, 12, 1152),
    "large": model_size(1024, 28, 16, 2624),
}

__all__ = ["DCModernBertConfig"]
