"""Images as tokens: patches, their positions, and tokens in front of them (ViT, arXiv 2010.11929)."""

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig

from ..ops.dtypes import at_least_float32


class ImageEmbeddings(nn.Module):
    """Patches and prefix tokens of an image, with positions.

    Tokens are in this order: class, registers, distillation, patches row by row. Registers have no positions; fixed
    sines and cosines are added to patches only.

    Weights:
        patch_embeddings: a convolution `[E, C, height, width]` whose stride is the size of a patch.
        class_token, distillation_token: `[1, 1, E]`.
        register_tokens: `[1, num_register_tokens, E]`.
        position_embeddings: `[1, class and distillation tokens + patches, E]`, if they are learned.
    """

    def __init__(self, config: PreTrainedConfig) -> None:
        super().__init__()
        self.config = config
        # Kept for the learned positions, which stay as they are when the configuration of a finished model is changed.
        self.image_size, self.grid = config.image_size, config.grid
        hidden, (rows, columns) = config.hidden_size, self.grid
        patch = config.patch_shape
        self.patch_embeddings = nn.Conv2d(config.num_channels, hidden, kernel_size=patch, stride=patch)
        self.class_token = _token(1, hidden, config.use_class_token)
        self.distillation_token = _token(1, hidden, config.use_distillation_token)
        self.register_tokens = _token(config.num_register_tokens, hidden, config.num_register_tokens > 0)
        placed = config.use_class_token + config.use_distillation_token + rows * columns
        self.position_embeddings = _token(placed, hidden, config.position_embedding_type == "learned")
        self.dropout = nn.Dropout(config.hidden_dropout)

    def forward(self, pixel_values: Tensor, interpolate_pos_encoding: bool | None = None) -> Tensor:
        """Returns the embedded tokens `[B, T, E]` of images `[B, C, h, w]`.

        Args:
            interpolate_pos_encoding: whether learned positions are interpolated for images of another size than
                configured; by default as configured.

        Raises:
            ValueError: the images are not multiples of a patch, or have another size than learned positions serve.
        """
        self._check(pixel_values)
        patches = self.patch_embeddings(pixel_values.to(self.patch_embeddings.weight.dtype))
        rows, columns = patches.shape[-2:]
        patches = patches.flatten(2).mT
        prefix = [token for token in (self.class_token, self.distillation_token) if token is not None]
        tokens = torch.cat([*(token.expand(patches.shape[0], -1, -1) for token in prefix), patches], dim=1)
        if self.position_embeddings is None:
            positions = sincos_positions(rows, columns, patches)
            positions = torch.cat([positions.new_zeros(len(prefix), positions.shape[-1]), positions])[None]
        else:
            positions = self._learned_positions(rows, columns, len(prefix), interpolate_pos_encoding)
        tokens = tokens + positions
        if self.register_tokens is not None:
            registers = self.register_tokens.expand(tokens.shape[0], -1, -1)
            first = 1 if self.class_token is not None else 0
            tokens = torch.cat([tokens[:, :first], registers, tokens[:, first:]], dim=1)
        return self.dropout(tokens)

    def _learned_positions(self, rows: int, columns: int, prefix: int, interpolate: bool | None) -> Tensor:
        """Learned positions `[1, prefix + rows * columns, E]`, those of patches interpolated to the grid if it differs.

        Args:
            interpolate: whether that is allowed, by default as configured.

        Raises:
            ValueError: the grid differs, and interpolation is not allowed.
        """
        assert self.position_embeddings is not None
        own = self.grid
        interpolate = self.config.interpolate_pos_encoding if interpolate is None else interpolate
        # A traced program serves images of all sizes, so it also interpolates to its own size, which changes nothing.
        serves_all = interpolate and (torch.compiler.is_exporting() or torch.jit.is_tracing())
        if not serves_all and (rows, columns) == own:
            return self.position_embeddings
        if not interpolate:
            height, width = (count * size for count, size in zip((rows, columns), self.config.patch_shape, strict=True))
            raise ValueError(
                f"the images are {height} x {width} pixels and learned positions are for image_size "
                f"{self.image_size}; pass interpolate_pos_encoding=True, or resize the images"
            )
        placed, patches = self.position_embeddings.split([prefix, own[0] * own[1]], dim=1)
        # In at least float32, because bicubic resampling in half precision would shift the positions. Channels are last
        # in memory: from other layouts PyTorch's antialiased resampling to a single column gives wrong values on a CPU.
        wide = patches.to(at_least_float32(patches.dtype)).unflatten(1, own).permute(0, 3, 1, 2)
        wide = nn.functional.interpolate(
            wide, size=(rows, columns), mode="bicubic", align_corners=False, antialias=self.config.interpolate_antialias
        )
        return torch.cat([placed, wide.to(patches.dtype).flatten(2).mT], dim=1)

    def _check(self, pixel_values: Tensor) -> None:
        """Raises ValueError unless these are floating-point images `[B, C, h, w]` made of whole patches."""
        channels, patch = self.config.num_channels, self.config.patch_shape
        shape = tuple(pixel_values.shape)
        if len(shape) != 4 or shape[1] != channels:
            raise ValueError(
                f"pixel_values must be [batch, num_channels = {channels}, height, width], not of shape {shape}"
            )
        if not pixel_values.is_floating_point():
            raise ValueError(f"pixel_values are {pixel_values.dtype}; run the image processor first, which scales them")
        if shape[2] % patch[0] or shape[3] % patch[1] or 0 in shape[2:]:
            raise ValueError(
                f"images of {shape[2]} x {shape[3]} pixels are not tiled by patches of {patch[0]} x {patch[1]}; resize "
                "or crop them to multiples"
            )


def sincos_positions(rows: int, columns: int, like: Tensor) -> Tensor:
    """Sines and cosines of column and row of each patch, `[rows * columns, E]` for tokens `like` `[B, T, E]`.

    A patch at row `y` and column `x` gets `[sin(x w), cos(x w), sin(y w), cos(y w)]` with `E / 4` frequencies `w` from
    1 down to 1/10000, as in the authors' code.
    """
    width = like.shape[-1] // 4
    wide = at_least_float32(like.dtype)
    frequencies = 10000.0 ** (-torch.arange(width, device=like.device, dtype=wide) / (width - 1))
    y = torch.arange(rows, device=like.device, dtype=wide).repeat_interleave(columns)[:, None] * frequencies
    x = torch.arange(columns, device=like.device, dtype=wide).repeat(rows)[:, None] * frequencies
    return torch.cat([x.sin(), x.cos(), y.sin(), y.cos()], dim=-1).to(like.dtype)


def _token(count: int, width: int, exists: bool) -> nn.Parameter | None:
    """A parameter `[1, count, width]` whose initial values the model draws; None unless it `exists`."""
    return nn.Parameter(torch.empty(1, count, width)) if exists else None
