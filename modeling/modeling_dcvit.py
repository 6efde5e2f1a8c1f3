"""DCViT: a vision transformer whose attention heads are dynamically composed (arXiv 2405.08553)."""

import math
from typing import Any

import torch
from torch import Tensor, nn
from transformers import initialization as init
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import BaseModelOutputWithPooling, ImageClassifierOutput
from transformers.utils import can_return_tuple
from transformers.utils.generic import merge_with_config_defaults
from transformers.utils.output_capturing import capture_outputs

from ..configuration.configuration_dcvit import DCViTConfig
from .common.composed_model import ComposedPreTrainedModel
from .common.encoder import EncoderLayers
from .common.losses import class_loss
from .common.pooling import mean_of_tokens
from .layers.composed_attention import ComposedAttention
from .layers.drop_path import DropPath
from .layers.image_embeddings import ImageEmbeddings
from .layers.mlp import MLP, GatedMLP

MLP_TYPES = {"mlp": MLP, "swiglu": GatedMLP}
# Standard deviation of the standard normal distribution truncated to [-2, 2].
CUT_NORMAL_STD = 0.87962566103423978
# Registers that were all zero would get equal gradients and stay equal, since nothing else tells them apart.
TOKEN_STD = 0.02


class DCViTLayer(GradientCheckpointingLayer):
    """Pre-norm attention, then pre-norm MLP, each with an optional LayerScale and a residual."""

    def __init__(self, config: DCViTConfig, layer_idx: int) -> None:
        super().__init__()
        hidden, scaled = config.hidden_size, config.layer_scale_init is not None
        self.self_attn = ComposedAttention(config, layer_idx, is_causal=False)
        self.mlp = MLP_TYPES[config.mlp_type](hidden, config.intermediate_size, config.hidden_act)
        self.input_layernorm = nn.LayerNorm(hidden, eps=config.layer_norm_eps)
        self.post_attention_layernorm = nn.LayerNorm(hidden, eps=config.layer_norm_eps)
        self.layer_scale1 = nn.Parameter(torch.empty(hidden)) if scaled else None
        self.layer_scale2 = nn.Parameter(torch.empty(hidden)) if scaled else None
        self.dropout, self.drop_path = nn.Dropout(config.hidden_dropout), DropPath(config.drop_path_rate)

    def forward(self, hidden_states: Tensor, attention_mask: Tensor | None = None, **kwargs: Any) -> Tensor:
        """Maps hidden states `[B, T, E]` to hidden states `[B, T, E]`."""
        attended, _ = self.self_attn(self.input_layernorm(hidden_states), attention_mask=attention_mask, **kwargs)
        hidden_states = hidden_states + self._update(attended, self.layer_scale1)
        return hidden_states + self._update(self.mlp(self.post_attention_layernorm(hidden_states)), self.layer_scale2)

    def _update(self, update: Tensor, scale: Tensor | None) -> Tensor:
        """A sublayer's output `[B, T, E]` as it is added to the hidden states; `scale` `[E]` is its LayerScale."""
        update = self.dropout(update)
        return self.drop_path(update if scale is None else update * scale)


class DCViTPreTrainedModel(ComposedPreTrainedModel):
    """What all DCViT models share."""

    config: DCViTConfig
    main_input_name = "pixel_values"
    input_modalities = ("image",)  # type: ignore[assignment]
    _input_embed_layer = "patch_embeddings"
    _no_split_modules = ["ImageEmbeddings", "DCViTLayer"]
    _can_record_outputs = {"hidden_states": DCViTLayer, "attentions": ComposedAttention}

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        """Draws initial weights as the authors do, or truncated normal ones if `initializer_range` is set.

        The authors draw the biases of MLPs with a standard deviation of 1e-6; here they start at zero. They have no
        registers and no distillation token, which are drawn with `TOKEN_STD`.
        """
        super()._init_weights(module)
        std = self.config.initializer_range
        if isinstance(module, nn.Linear | nn.Conv2d):
            if std is not None:
                draw_cut_normal(module.weight, std)
            elif isinstance(module, nn.Conv2d) or module is getattr(self, "pre_logits", None):
                init_by_fan_in(module)
            elif module is getattr(self, "classifier", None):
                init.zeros_(module.weight)
            else:
                init.xavier_uniform_(module.weight)
            if module.bias is not None:
                init.zeros_(module.bias)
        elif isinstance(module, ImageEmbeddings):
            self._init_tokens(module, std)
        elif isinstance(module, DCViTLayer):
            for scale in (module.layer_scale1, module.layer_scale2):
                if scale is not None:
                    init.constant_(scale, float(self.config.layer_scale_init or 0))

    def _init_tokens(self, module: ImageEmbeddings, std: float | None) -> None:
        """Draws prefix tokens and learned positions; without `std`, the class token starts at zero, and only it."""
        own = ((module.class_token, 0.0), (module.distillation_token, TOKEN_STD), (module.register_tokens, TOKEN_STD))
        for token, default in own:
            if token is not None:
                draw_cut_normal(token, default if std is None else std)
        positions = module.position_embeddings
        if positions is not None:
            default = self.config.hidden_size**-0.5
            init.normal_(positions, std=default) if std is None else draw_cut_normal(positions, std)


class DCViTModel(EncoderLayers, DCViTPreTrainedModel):
    """The vision transformer without a head."""

    def __init__(self, config: DCViTConfig) -> None:
        super().__init__(config)
        self.embeddings = ImageEmbeddings(config)
        self.layers = nn.ModuleList([DCViTLayer(config, layer) for layer in range(config.num_hidden_layers)])
        self.norm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.gradient_checkpointing = False
        self.post_init()

    @merge_with_config_defaults
    @capture_outputs(tie_last_hidden_states=False)
    def forward(
        self,
        pixel_values: Tensor,
        attention_mask: Tensor | None = None,
        interpolate_pos_encoding: bool | None = None,
        **kwargs: Any,
    ) -> BaseModelOutputWithPooling:
        """Returns normalized hidden states `[B, T, E]` and the pooled input of the classifier, `[B, E]` or `[B, 2E]`.

        Attention maps (`output_attentions=True`) are composed probabilities, which can be negative and need not sum to
        one.

        Args:
            pixel_values: images `[B, C, h, w]`, as the image processor makes them.
            attention_mask: `[B, T]`, 1 for visible tokens, prefix tokens included; a mean leaves hidden patches out.
            interpolate_pos_encoding: whether learned positions are interpolated for images of another size; by default
                as configured.

        Raises:
            ValueError: the images or the mask have a shape that does not fit, or patches are to be masked.
        """
        if kwargs.get("bool_masked_pos") is not None:
            raise ValueError(
                "bool_masked_pos is given, but a DCViT has no mask token to put in place of patches; mask the images, "
                "or hide patches from attention with attention_mask"
            )
        hidden_states = self.embeddings(pixel_values, interpolate_pos_encoding)
        self.check_mask(attention_mask, hidden_states)
        hidden_states = self.norm(self.run_layers(hidden_states, attention_mask, **kwargs))
        pooled = self._pool(hidden_states, attention_mask)
        return BaseModelOutputWithPooling(last_hidden_state=hidden_states, pooler_output=pooled)

    def _pool(self, hidden_states: Tensor, attention_mask: Tensor | None) -> Tensor:
        """The class token, the mean over visible patches, or both side by side, of hidden states `[B, T, E]`."""
        parts = []
        if self.config.classifier_pooling != "mean":
            parts.append(hidden_states[:, 0])
        if self.config.classifier_pooling != "cls":
            parts.append(mean_of_tokens(hidden_states, attention_mask, self.config.num_prefix_tokens))
        return torch.cat(parts, dim=-1)


class DCViTForImageClassification(DCViTPreTrainedModel):
    """The vision transformer with a classifier."""

    def __init__(self, config: DCViTConfig) -> None:
        super().__init__(config)
        labels: Any = config.num_labels
        self.num_labels: int = labels
        self.model = DCViTModel(config)
        width = config.hidden_size * (2 if config.classifier_pooling == "cls_mean" else 1)
        self.pre_logits = None
        if config.representation_size is not None:
            self.pre_logits, width = nn.Linear(width, config.representation_size), config.representation_size
        self.classifier = nn.Linear(width, self.num_labels)
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        pixel_values: Tensor,
        labels: Tensor | None = None,
        attention_mask: Tensor | None = None,
        interpolate_pos_encoding: bool | None = None,
        **kwargs: Any,
    ) -> ImageClassifierOutput:
        """Returns logits `[B, num_labels]` and, with labels, the loss.

        Args:
            labels: `[B]`, the class of each image; or `[B, num_labels]` if `problem_type` is multi-label or regression.
                With `num_items_in_batch` the loss is the sum over labels divided by it, else the mean.

        The other arguments are those of the base model.

        Raises:
            ValueError: images, mask or labels have a shape that does not fit.
        """
        outputs = self.model(
            pixel_values, attention_mask=attention_mask, interpolate_pos_encoding=interpolate_pos_encoding, **kwargs
        )
        pooled = outputs.pooler_output
        if self.pre_logits is not None:
            pooled = torch.tanh(self.pre_logits(pooled))
        logits = self.classifier(pooled)
        loss = None
        if labels is not None:
            loss = class_loss(self.loss_function, labels, logits, self.config, **kwargs)
        return ImageClassifierOutput(
            loss=loss, logits=logits, hidden_states=outputs.hidden_states, attentions=outputs.attentions
        )


def draw_cut_normal(parameter: Tensor, std: float) -> None:
    """Draws from a normal distribution truncated to [-2, 2]; a standard deviation of 0 makes zeros."""
    init.trunc_normal_(parameter, std=std) if std else init.zeros_(parameter)


def init_by_fan_in(module: nn.Linear | nn.Conv2d) -> None:
    """Draws weights of variance `1 / fan_in` from a normal distribution truncated at two standard deviations.

    Truncation shrinks the standard deviation by `CUT_NORMAL_STD`, which the division makes up for (LeCun normal).
    """
    std = math.sqrt(1 / module.weight[0].numel()) / CUT_NORMAL_STD
    init.trunc_normal_(module.weight, std=std, a=-2 * std, b=2 * std)


__all__ = ["DCViTForImageClassification", "DCViTModel", "DCViTPreTrainedModel"]
