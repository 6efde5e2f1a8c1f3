"""The attention fields that RCMHA's language models and encoder-decoders share."""

from huggingface_hub.dataclasses import strict

from .field_rules import check_choices
from .portable_config import PortableConfig, default_head_dim

ATTENTION_TYPES = ("rcmha", "rmha", "mdha", "mha")


@strict
class RelativeConfig(PortableConfig):
    r"""
    Relative convolutional attention (RCMHA, arXiv 2308.03429) and the baselines that its paper compares.

    Args:
        attention_type (`str`, defaults to `"rcmha"`): `"rcmha"` (relative positions and convolutions), `"rmha"`
            (relative positions), `"mdha"` (convolutions) or `"mha"` (neither).
        conv_kernel_size (`int`, defaults to 3): number of tokens that the depthwise convolution after the query, key
            and value projections reads, the token itself included.
        qk_bias (`bool`, *optional*): bias of the query and key projections; by default, as in the official code, only
            `mdha` and `mha` have it. The value and output projections always have a bias.
        hidden_act (`str`, defaults to `"relu2"`): activation of the MLP, by default squared ReLU; the official script
            runs `"relu"`.
        hidden_dropout, attention_dropout (`float`, default to 0.0): dropout of the outputs of attention and MLP, and of
            the attention probabilities.
        lm_head_bias (`bool`, defaults to `True`): bias of the head, as in the official code.
    """

    head_dim: int | None = None
    attention_type: str = "rcmha"
    conv_kernel_size: int = 3
    qk_bias: bool | None = None
    hidden_act: str = "relu2"
    hidden_dropout: float | int = 0.0
    attention_dropout: float | int = 0.0
    layer_norm_eps: float = 1e-5
    initializer_range: float | int = 0.02
    lm_head_bias: bool = True
    use_cache: bool = True

    def fill_defaults(self) -> None:
        """Also sets the width of a head, and whether queries and keys have a bias."""
        if self.head_dim is None:
            self.head_dim = default_head_dim(self.hidden_size, self.num_attention_heads)
        if self.qk_bias is None:
            self.qk_bias = not self.is_relative

    @property
    def is_relative(self) -> bool:
        """Whether scores depend on the distance between query and key through learned tables."""
        return self.attention_type in ("rcmha", "rmha")

    @property
    def convolves(self) -> bool:
        """Whether queries, keys and values are convolved."""
        return self.attention_type in ("rcmha", "mdha")

    def validate_choices(self) -> None:
        """Part of the strict validation: the attention type exists and fits the subclass's `position_scheme`."""
        check_choices(self, attention_type=ATTENTION_TYPES)
        if self.is_relative and self.position_scheme != "none":
            raise ValueError(
                f"position_scheme {self.position_scheme!r} is for 'mdha' and 'mha'; {self.attention_type!r} has "
                "relative positions of its own, so leave it at 'none'"
            )
