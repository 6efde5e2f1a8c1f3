"""Small vision transformers of Transformers that a DCViT contains."""

import copy
from typing import Any

import torch
import transformers
from transformers import (
    DeiTConfig,
    Dinov2Config,
    Dinov2WithRegistersConfig,
    PreTrainedConfig,
    PreTrainedModel,
    ViTConfig,
)

SHAPE: dict[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "image_size": 24,
    "patch_size": 8,
    "num_labels": 5,
    "initializer_range": 0.2,
}
# The head and the configuration of each.
VISION_PARENTS: dict[str, tuple[str, PreTrainedConfig]] = {
    "vit": ("ForImageClassification", ViTConfig(**SHAPE, intermediate_size=48, hidden_dropout_prob=0.1)),
    "vit-base": ("Model", ViTConfig(**SHAPE, intermediate_size=48)),
    "vit-no-bias-gray": (
        "ForImageClassification",
        ViTConfig(**SHAPE, intermediate_size=48, qkv_bias=False, num_channels=1, hidden_act="relu"),
    ),
    "deit": ("ForImageClassification", DeiTConfig(**SHAPE, intermediate_size=48)),
    "deit-base": ("Model", DeiTConfig(**SHAPE, intermediate_size=48)),
    "dinov2": ("ForImageClassification", Dinov2Config(**SHAPE, mlp_ratio=2, layerscale_value=0.5, drop_path_rate=0.1)),
    "dinov2-base": ("Model", Dinov2Config(**SHAPE)),
    "dinov2-swiglu": ("ForImageClassification", Dinov2Config(**SHAPE, use_swiglu_ffn=True, qkv_bias=False)),
    "dinov2-registers": ("ForImageClassification", Dinov2WithRegistersConfig(**SHAPE, num_register_tokens=3)),
    "dinov2-registers-base": ("Model", Dinov2WithRegistersConfig(**SHAPE, use_swiglu_ffn=True)),
}


def make_parent(name: str) -> PreTrainedModel:
    """A parent with every weight random: tokens, biases and scales too."""
    head, config = VISION_PARENTS[name]
    model_class = getattr(transformers, type(config).__name__.removesuffix("Config") + head)
    model = model_class(copy.deepcopy(config)).eval()
    model.config.architectures = [model_class.__name__]  # as in a checkpoint
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return model
