"""DCBart: an encoder-decoder like BART and Marian, with dynamically composed attention heads (arXiv 2405.08553)."""

from typing import Any

from huggingface_hub.dataclasses import strict

from .composition_config import CompositionConfig
from .field_rules import check_choices
from .portable_config import model_size

POSITION_EMBEDDING_TYPES = ("sinusoidal", "learned")


@strict
class DCBartConfig(CompositionConfig):
    r"""
    Configuration of a DCBart model; the defaults are the shape of a Marian translator.

    With composition off the model computes what BART, mBART or Marian compute. BART has learned positions that begin
    in row 2 of their table, and normalizes its embeddings; mBART does the same and has pre-norm layers; Marian has
    sinusoidal positions.

    Args:
        num_hidden_layers (`int`, defaults to 6): layers of the encoder.
        decoder_layers (`int`, *optional*): layers of the decoder, by default as many.
        position_embedding_type (`str`, defaults to `"sinusoidal"`): `"sinusoidal"` or `"learned"`.
        position_offset (`int`, defaults to 0): row of the table of learned positions that holds the first one; 2 in
            BART.
        max_position_embeddings (`int`, defaults to 512): maximal number of tokens of a source, and of a target.
        scale_embedding (`bool`, defaults to `False`): multiply token embeddings by the square root of the hidden size.
        normalize_embedding (`bool`, defaults to `False`): normalize the sum of token and position embeddings.
        normalize_before (`bool`, defaults to `False`): norms before each sublayer and at the end, as in mBART, instead
            of after each residual.
        hidden_dropout, activation_dropout (`float`, default to 0.1 and 0.0): dropout of embeddings and sublayers'
            outputs, and of the MLP's activations.
        compose_encoder, compose_decoder, compose_cross (`bool`, default to `True`): whether the heads of the encoder's
            self-attention, of the decoder's, and of its cross-attention are composed.
        final_logits_bias (`bool`, defaults to `True`): add a bias to the logits that checkpoints hold but training does
            not change, as in BART.

    ```python
    >>> from dynattn import DCBartConfig, DCBartForConditionalGeneration
    >>> model = DCBartForConditionalGeneration(DCBartConfig.from_size("tiny"))
    ```
    """

    model_type = "dcbart"

    vocab_size: int = 32000
    hidden_size: int = 512
    intermediate_size: int = 2048
    num_hidden_layers: int = 6
    decoder_layers: int | None = None
    num_attention_heads: int = 8
    hidden_act: str = "gelu"
    position_embedding_type: str = "sinusoidal"
    position_offset: int = 0
    max_position_embeddings: int = 512
    scale_embedding: bool = False
    normalize_embedding: bool = False
    normalize_before: bool = False
    layer_norm_eps: float = 1e-5
    hidden_dropout: float | int = 0.1
    activation_dropout: float | int = 0.0
    attention_bias: bool = True
    use_qk_norm: bool = False
    compose_encoder: bool = True
    compose_decoder: bool = True
    compose_cross: bool = True
    initializer_range: float | int = 0.02
    use_cache: bool = True
    is_encoder_decoder: bool = True
    tie_word_embeddings: bool = True
    final_logits_bias: bool = True
    pad_token_id: int | None = 0
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = 1
    decoder_start_token_id: int | None = 0
    forced_eos_token_id: int | list[int] | None = None

    def fill_defaults(self) -> None:
        """Also sets `decoder_layers`: as many as the encoder has."""
        super().fill_defaults()
        if self.decoder_layers is None:
            self.decoder_layers = self.num_hidden_layers

    def mixes_heads(self) -> bool:
        """Whether heads are mixed in any attention of the model."""
        return super().mixes_heads() and (self.compose_encoder or self.compose_decoder or self.compose_cross)

    def composes_in(self, place: str) -> bool:
        """Whether one kind of attention mixes heads; `place` is `"encoder"`, `"decoder"` or `"cross"`."""
        return self.composes and getattr(self, f"compose_{place}")

    def validate_positions(self) -> None:
        """Part of the strict validation: the positions exist and fit the width."""
        check_choices(self, position_embedding_type=POSITION_EMBEDDING_TYPES)
        if self.position_embedding_type == "learned":
            return
        if self.hidden_size % 2:
            raise ValueError(
                f"hidden_size ({self.hidden_size}) must be even: sinusoidal positions are pairs of a sine and a cosine"
            )
        if self.position_offset:
            raise ValueError(
                f"position_offset ({self.position_offset}) is a row of learned positions; sinusoidal ones begin at 0"
            )


def _bart(hidden_size: int, layers: int, heads: int, **fields: Any) -> dict[str, Any]:
    """A published shape of BART, whose MLP is four times as wide as its hidden states."""
    shape = model_size(hidden_size, layers, heads, 4 * hidden_size, vocab_size=50265, max_position_embeddings=1024)
    positions = {"position_embedding_type": "learned", "position_offset": 2, "normalize_embedding": True}
    tokens = {"pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2, "decoder_start_token_id": 2}
    return {**shape, **positions, **tokens, "forced_eos_token_id": 2, **fields}


DCBartConfig.sizes = {
    "tiny": model_size(128, 2, 4, 512, vocab_size=2048),
    "translator": model_size(512, 6, 8, 2048),
    "base": _bart(768, 6, 12),
    "large": _bart(1024, 12, 16),
}

__all__ = ["DCBartConfig"]
