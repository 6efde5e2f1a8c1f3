"""RCMHA as an encoder-decoder: relative convolutional attention in both directions (arXiv 2308.03429)."""

from typing import ClassVar

from huggingface_hub.dataclasses import strict

from .field_rules import check_choices
from .portable_config import model_size
from .relative_config import RelativeConfig

SEQ2SEQ_SCHEMES = ("learned", "none")


@strict
class RCMHASeq2SeqConfig(RelativeConfig):
    r"""
    Configuration of an RCMHA encoder-decoder: the fields of `RelativeConfig` and those of two stacks of layers.

    The position tables of the encoder also have rows for later tokens. Cross-attention has no position tables, because
    there is no distance between a token of the source and one of the target.

    Args:
        num_hidden_layers (`int`, defaults to 4): layers of the encoder.
        decoder_layers (`int`, *optional*): layers of the decoder, by default as many as the encoder has.
        encoder_conv_is_causal (`bool`, defaults to `False`): whether the encoder's convolutions see earlier tokens
            only, as in the official code; otherwise they are centred, and `conv_kernel_size` must be odd.
        max_position_embeddings (`int`, defaults to 512): maximal number of tokens of a source, and of a target.
        position_scheme (`str`, *optional*): positions of `mdha` and `mha`, which have no relative positions:
            `"learned"`, by default, or `"none"`.

    ```python
    >>> from dynattn import RCMHASeq2SeqConfig, RCMHASeq2SeqForConditionalGeneration
    >>> model = RCMHASeq2SeqForConditionalGeneration(RCMHASeq2SeqConfig.from_size("tiny"))
    ```
    """

    model_type = "rcmha_seq2seq"
    # The decoder's cache reads these two fields: it keeps all earlier tokens.
    memory_type: ClassVar[str] = "streaming"
    sliding_window: ClassVar[None] = None

    vocab_size: int = 32000
    hidden_size: int = 256
    intermediate_size: int = 1024
    num_hidden_layers: int = 4
    decoder_layers: int | None = None
    num_attention_heads: int = 8
    encoder_conv_is_causal: bool = False
    max_position_embeddings: int = 512
    position_scheme: str | None = None
    is_encoder_decoder: bool = True
    tie_word_embeddings: bool = True
    pad_token_id: int | None = 0
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = 1
    decoder_start_token_id: int | None = 0

    def fill_defaults(self) -> None:
        """Also sets `decoder_layers`, and learned positions where attention has no relative ones."""
        super().fill_defaults()
        if self.decoder_layers is None:
            self.decoder_layers = self.num_hidden_layers
        if self.position_scheme is None:
            self.position_scheme = "none" if self.is_relative else "learned"

    @property
    def num_relative_positions(self) -> int:
        """Rows of the position tables for a token itself and those before it, one for each distance from 0.

        The encoder's tables have as many rows again, less one, for the tokens after it.
        """
        return self.max_position_embeddings

    @property
    def later_conv_tokens(self) -> int:
        """Number of tokens after a source token that the encoder's convolutions read together with it."""
        return 0 if self.encoder_conv_is_causal else (self.conv_kernel_size - 1) // 2

    def validate_choices(self) -> None:
        """Part of the strict validation: named options exist and may be combined."""
        check_choices(self, position_scheme=SEQ2SEQ_SCHEMES)
        super().validate_choices()

    def validate_convolution(self) -> None:
        """Part of the strict validation: a centred kernel has an odd size, so that one token is in its middle."""
        if self.convolves and not self.encoder_conv_is_causal and self.conv_kernel_size % 2 == 0:
            raise ValueError(
                f"conv_kernel_size ({self.conv_kernel_size}) must be odd: the encoder's convolutions are centred; or "
                "set encoder_conv_is_causal=True"
            )

    def validate_distances(self) -> None:
        """Part of the strict validation: the tables of relative attention have a row for a later token."""
        if self.is_relative and self.max_position_embeddings < 2:
            raise ValueError(
                f"max_position_embeddings ({self.max_position_embeddings}) must be at least 2 where attention is "
                "relative: the encoder's tables need a row for later tokens"
            )


RCMHASeq2SeqConfig.sizes = {
    "tiny": model_size(128, 2, 4, 256, vocab_size=2048, max_position_embeddings=256),
    "small": model_size(256, 4, 8, 1024),
    "translator": model_size(512, 6, 8, 2048),
}

__all__ = ["RCMHASeq2SeqConfig"]
