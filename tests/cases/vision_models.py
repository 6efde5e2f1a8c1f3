"""Small vision models of Transformers and timm in float64, and what they are asked."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import DetrConfig, DetrForObjectDetection, ResNetConfig

from dynattn.modeling.layers.head_composition import init_composition
from dynattn.modeling.other_models.side_generators import SideGenerators

Ask = Callable[[nn.Module], Tensor]
DETR_NAMES = [
    "model.encoder.layers.0.self_attn",
    "model.decoder.layers.0.self_attn",
    "model.decoder.layers.0.encoder_attn",
]
TIMM_NAMES = ["blocks.0.attn", "blocks.1.attn"]


def detr(**options: Any) -> tuple[nn.Module, Ask]:
    """A small one with a random backbone; the second picture is padded."""
    backbone = ResNetConfig(
        embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], layer_type="basic", out_features=["stage2"]
    )
    sizes = {"d_model": 16, "encoder_attention_heads": 4, "decoder_attention_heads": 4, "num_queries": 7}
    layers = {"encoder_layers": 1, "decoder_layers": 1, "encoder_ffn_dim": 32, "decoder_ffn_dim": 32}
    config = DetrConfig(backbone_config=backbone, num_labels=3, dropout=0.0, **{**sizes, **layers, **options})
    pixels, mask = torch.randn(2, 3, 32, 32, dtype=torch.float64), torch.ones(2, 32, 32, dtype=torch.long)
    mask[1, :, 20:] = 0
    return DetrForObjectDetection(config).eval().double(), lambda model: model(pixels, pixel_mask=mask).logits


def vision_transformer() -> tuple[nn.Module, Ask]:
    timm = pytest.importorskip("timm")
    sizes = {"img_size": 16, "patch_size": 4, "embed_dim": 16, "depth": 2, "num_heads": 4, "num_classes": 3}
    model = timm.models.VisionTransformer(**sizes, qk_norm=True).double()
    pixels = torch.randn(2, 3, 16, 16, dtype=torch.float64)
    return model, lambda model: model(pixels)


def strengthen(model: nn.Module) -> None:
    """Gives all composition of `model` weights that matter."""
    for module in model.modules():
        if isinstance(module, SideGenerators):
            for generator in module.generators():
                init_composition(generator, scale=40.0)
