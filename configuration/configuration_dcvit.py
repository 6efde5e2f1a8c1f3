"""DCViT: a vision transformer with dynamically composable attention heads (arXiv 2405.08553)."""

from typing import Any, ClassVar

from huggingface_hub.dataclasses import strict

from .composition_config import CompositionConfig
from .field_rules import check_choices
from .portable_config import model_size
from .tensor_parallel_plans import GATED_MLP_PLAN, MLP_PLAN

CHOICES = {
    "mlp_type": ("mlp", "swiglu"),
    "position_embedding_type": ("sincos2d", "learned"),
    "classifier_pooling": ("mean", "cls", "cls_mean"),
}


@strict
class DCViTConfig(CompositionConfig):
    r"""
    Configuration of a DCViT; the defaults are the authors' DCViT-S/16. Attention and composition fields are documented
    in `CompositionConfig`.

    Args:
        image_size, patch_size (`int` or pair of `int`, default to 224 and 16): height and width in pixels; those of an
            image are multiples of those of a patch.
        mlp_type (`str`, defaults to `"mlp"`): `"mlp"` has two projections, `"swiglu"` three, one of them a gate.
        position_embedding_type (`str`, defaults to `"sincos2d"`): fixed sines and cosines of row and column, for images
            of any size, or `"learned"`.
        interpolate_pos_encoding (`bool`, defaults to `False`): whether learned positions are interpolated for images of
            another size; the forward pass has an argument of this name that comes first.
        interpolate_antialias (`bool`, defaults to `False`): whether that interpolation is antialiased, as in DINOv2
            with registers.
        use_class_token, use_distillation_token (`bool`, default to `False`): learned tokens in front of the patches.
        num_register_tokens (`int`, defaults to 0): number of learned tokens without positions, after the class token.
        classifier_pooling (`str`, defaults to `"mean"`): what the classifier reads: the mean over patches, the class
            token (`"cls"`), or both (`"cls_mean"`).
        representation_size (`int`, *optional*, defaults to 384): width of a linear layer with tanh in front of the
            classifier; None for no such layer.
        layer_scale_init (`float`, *optional*): initial value of LayerScale, a learned factor on each channel of what
            attention and MLP add to the hidden states; by default there is none.
        hidden_dropout, drop_path_rate (`float`, default to 0.0): dropout of embeddings and of what attention and MLP
            add; probability that an example skips such an addition in training (stochastic depth).
        initializer_range (`float`, *optional*): standard deviation of truncated normal weights, as in ViT;
            by default weights are drawn as the authors draw them, the class token and the classifier start at zero, and
            registers and the distillation token with a deviation of 0.02.

    ```python
    >>> from dynattn import DCViTConfig, DCViTForImageClassification
    >>> model = DCViTForImageClassification(DCViTConfig.from_size("s16", num_labels=1000))
    ```
    """

    model_type = "dcvit"
    base_model_tp_plan: ClassVar[dict[str, Any] | None] = MLP_PLAN

    image_size: int | list[int] | tuple[int, int] = 224
    patch_size: int | list[int] | tuple[int, int] = 16
    num_channels: int = 3
    hidden_size: int = 384
    intermediate_size: int = 1536
    num_hidden_layers: int = 12
    num_attention_heads: int = 6
    hidden_act: str = "gelu_pytorch_tanh"
    mlp_type: str = "mlp"
    layer_norm_eps: float = 1e-6
    position_embedding_type: str = "sincos2d"
    interpolate_pos_encoding: bool = False
    interpolate_antialias: bool = False
    use_class_token: bool = False
    use_distillation_token: bool = False
    num_register_tokens: int = 0
    classifier_pooling: str = "mean"
    representation_size: int | None = 384
    layer_scale_init: float | int | None = None
    hidden_dropout: float | int = 0.0
    drop_path_rate: float | int = 0.0
    initializer_range: float | int | None = None
    attention_bias: bool = True
    qk_norm_type: str = "layer_norm"
    compose_static: bool = True
    compose_act: str = "gelu_pytorch_tanh"

    def __post_init__(self, **kwargs: Any) -> None:
        if self.mlp_type == "swiglu":
            self.base_model_tp_plan = GATED_MLP_PLAN  # type: ignore[misc]
        super().__post_init__(**kwargs)

    @property
    def image_shape(self) -> tuple[int, int]:
        """Height and width of an image, in pixels."""
        return as_pair("image_size", self.image_size)

    @property
    def patch_shape(self) -> tuple[int, int]:
        """Height and width of a patch, in pixels."""
        return as_pair("patch_size", self.patch_size)

    @property
    def grid(self) -> tuple[int, int]:
        """Number of patches along height and width."""
        (height, width), (down, across) = self.image_shape, self.patch_shape
        return height // down, width // across

    @property
    def num_prefix_tokens(self) -> int:
        """Number of tokens in front of the patches."""
        return self.use_class_token + self.use_distillation_token + self.num_register_tokens

    def validate_image(self) -> None:
        """Part of the strict validation: height and width of an image are multiples of those of a patch."""
        for name, pixels, patch in zip(("height", "width"), self.image_shape, self.patch_shape, strict=True):
            if pixels % patch:
                raise ValueError(
                    f"image_size ({self.image_size}): its {name} must be a multiple of patch_size ({patch})"
                )

    def validate_choices(self) -> None:
        """Part of the strict validation: named options exist, and positions and tokens fit each other."""
        check_choices(self, **CHOICES)
        if self.position_embedding_type == "sincos2d" and (self.hidden_size % 4 or self.hidden_size < 8):
            raise ValueError(
                f"hidden_size ({self.hidden_size}) must be a multiple of 4, and at least 8, for sines and cosines of "
                "rows and columns; or take position_embedding_type='learned'"
            )
        if self.use_class_token:
            return
        if self.classifier_pooling != "mean":
            raise ValueError(
                f"classifier_pooling ({self.classifier_pooling!r}) reads the class token; set use_class_token=True"
            )
        if self.use_distillation_token:
            raise ValueError("use_distillation_token=True needs the class token; set use_class_token=True")


def as_pair(name: str, value: int | list[int] | tuple[int, int]) -> tuple[int, int]:
    """Height and width from the field `name`, whose `value` is one number for both or a pair.

    Raises:
        ValueError: the value is not one or two positive numbers.
    """
    pair = (value, value) if isinstance(value, int) else tuple(value)
    if len(pair) != 2 or min(pair) < 1:
        raise ValueError(f"{name} ({value}) must be a positive number, or two: height and width")
    return pair


def _vit(hidden_size: int, layers: int, heads: int, **fields: Any) -> dict[str, Any]:
    """A shape of the ViT papers: MLPs are four times as wide as hidden states, the classifier's layer is as wide."""
    return model_size(hidden_size, layers, heads, 4 * hidden_size, representation_size=hidden_size, **fields)


# "s16" and "m16" are the authors'; the others are ViT's shapes.
DCViTConfig.sizes = {
    "tiny": _vit(64, 4, 4, image_size=16, patch_size=4),
    "ti16": _vit(192, 12, 3),
    "s16": _vit(384, 12, 6),
    "m16": _vit(512, 12, 8),
    "b16": _vit(768, 12, 12),
    "l16": _vit(1024, 24, 16),
}

__all__ = ["DCViTConfig"]
