"""ViT, DeiT and DINOv2 as the plain vision transformer inside a DCViT.

Their files come with a classifier or without, under names of several versions of Transformers.
"""

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from transformers import DeiTConfig, Dinov2Config, Dinov2WithRegistersConfig, PreTrainedConfig, ViTConfig

from ....common.errors import UserError
from ...common.image_probe import IMAGES
from ...common.transforms import Split
from ...common.weight_map import Drop, Rule, WeightMap, renames
from .interface import Parent, class_head, plain_heads, require_fields, shared_fields

SHARED = (
    *("hidden_size", "num_hidden_layers", "num_attention_heads", "image_size", "patch_size", "num_channels"),
    *("layer_norm_eps", "initializer_range", "hidden_act", "id2label", "label2id", "problem_type"),
)
HEADS = ("ForImageClassification", "Model")
LAYER = "model.layers.{layer}."
KINDS = ("weight", "bias")
NEEDS = ("preprocessor_config.json",)  # which AutoImageProcessor reads
# Ours by theirs: in layers of ViT and DeiT, of DINOv2, and of all.
VIT_LAYER = {
    "attention.output.dense": "self_attn.o_proj",
    "layernorm_before": "input_layernorm",
    "layernorm_after": "post_attention_layernorm",
    "intermediate.dense": "mlp.up_proj",
    "output.dense": "mlp.down_proj",
}
DINO_LAYER = {
    "attention.output.dense": "self_attn.o_proj",
    "norm1": "input_layernorm",
    "norm2": "post_attention_layernorm",
}
DINO_MLPS = {
    "mlp": {"mlp.fc1": "mlp.up_proj", "mlp.fc2": "mlp.down_proj"},
    "swiglu": {"mlp.weights_out": "mlp.down_proj"},  # beside one that joins the gate and the up projection
}
# Fields of ours in which the parents have no choice: all of them, ViT and DeiT, and DINOv2.
FIXED = {
    "position_embedding_type": "learned",
    "use_class_token": True,
    "representation_size": None,
    "attention_output_bias": True,
}
VIT_FIXED = {
    "classifier_pooling": "cls",
    "num_register_tokens": 0,
    "mlp_type": "mlp",
    "drop_path_rate": 0,
    "interpolate_pos_encoding": False,
}
DINO_FIXED = {"classifier_pooling": "cls_mean", "use_distillation_token": False, "interpolate_pos_encoding": True}
PROJECTIONS = {f"attention.attention.{name}": f"self_attn.{name[0]}_proj" for name in ("query", "key", "value")}


def to_fields(config: Any) -> dict[str, Any]:
    """Our fields for the same model.

    Raises:
        UserError: its head is another than a classifier.
    """
    is_dino = config.model_type.startswith("dinov2")
    registers = getattr(config, "num_register_tokens", 0)
    width = intermediate_size(config) if is_dino else config.intermediate_size
    gated = is_dino and config.use_swiglu_ffn
    return {
        **shared_fields(config, SHARED),
        **FIXED,
        **(DINO_FIXED if is_dino else VIT_FIXED),
        "architectures": ["DCViT" + class_head(config, HEADS)],
        "intermediate_size": width,
        "mlp_type": "swiglu" if gated else "mlp",
        "hidden_act": "silu" if gated else config.hidden_act,
        "attention_bias": config.qkv_bias,
        "interpolate_antialias": registers > 0,
        "use_distillation_token": config.model_type == "deit",
        "num_register_tokens": registers,
        "layer_scale_init": config.layerscale_value if is_dino else None,
        "hidden_dropout": config.hidden_dropout_prob,
        "drop_path_rate": getattr(config, "drop_path_rate", 0.0),
        "use_qk_norm": False,
    }


def intermediate_size(config: Any) -> int:
    """Width of DINOv2's MLP; that of its gated one is two thirds, rounded up to a multiple of 8."""
    width = int(config.hidden_size * config.mlp_ratio)
    return (int(width * 2 / 3) + 7) // 8 * 8 if config.use_swiglu_ffn else width


def restore(config: Any) -> PreTrainedConfig:
    """The configuration of the parent that has what a DCViT without composition has.

    Raises:
        UserError: none of the parents has it.
    """
    needed = {**plain_heads(config), **FIXED, "attention_scaling": None}
    parent: type[PreTrainedConfig]
    if config.layer_scale_init is not None:
        family, parent = "DINOv2", Dinov2WithRegistersConfig if config.num_register_tokens else Dinov2Config
        needed |= {**DINO_FIXED, "interpolate_antialias": config.num_register_tokens > 0}
        own = _dino_fields(config)
    else:
        family, parent = "ViT", DeiTConfig if config.use_distillation_token else ViTConfig
        needed |= VIT_FIXED
        own = {"intermediate_size": config.intermediate_size}
    require_fields(config, needed, family)
    fields: dict[str, Any] = {**shared_fields(config, SHARED), **own}
    if config.initializer_range is None:
        del fields["initializer_range"]
    return parent(
        **fields,
        qkv_bias=config.attention_bias,
        hidden_dropout_prob=config.hidden_dropout,
        architectures=[parent.__name__.removesuffix("Config") + class_head(config, HEADS)],
    )


def _dino_fields(config: Any) -> dict[str, Any]:
    """DINOv2's own fields.

    Raises:
        UserError: no ratio of DINOv2 gives the width of the MLP.
    """
    gated = config.mlp_type == "swiglu"
    own: dict[str, Any] = {
        "use_swiglu_ffn": gated,
        "layerscale_value": config.layer_scale_init,
        "drop_path_rate": config.drop_path_rate,
    }
    if gated:
        require_fields(config, {"hidden_act": "silu"}, "DINOv2")
        own["hidden_act"] = "gelu"  # which a gated one does not read
    if config.num_register_tokens:
        own["num_register_tokens"] = config.num_register_tokens
    for ratio in range(1, 33):
        plain = Dinov2Config(hidden_size=config.hidden_size, mlp_ratio=ratio, use_swiglu_ffn=gated)
        if intermediate_size(plain) == config.intermediate_size:
            return {**own, "mlp_ratio": ratio}
    raise UserError(f"intermediate_size is {config.intermediate_size}, which no mlp_ratio of a DINOv2 gives")


def weight_map(config: Any) -> WeightMap:
    """The table for one DCViT configuration."""
    is_dino = config.layer_scale_init is not None
    own = "deit." if config.use_distillation_token else "vit."
    if is_dino:
        own = "dinov2_with_registers." if config.num_register_tokens else "dinov2."
    has_head = class_head(config, HEADS) != "Model"
    if not has_head:
        own = ""
    rules = [*_embedding_rules(config, own), *_layer_rules(config, own + "encoder.layer.{layer}.", is_dino)]
    rules += renames({own + "layernorm": "model.norm"}, KINDS)
    if has_head:
        rules += renames({"classifier": "classifier"}, KINDS)
    return WeightMap(config.num_hidden_layers, tuple(rules), tuple(_drops(config, own, is_dino)))


def _drops(config: Any, prefix: str, is_dino: bool) -> Iterator[Drop]:
    """Tensors that a DCViT does not need. The parents' code needs them to exist, so the way back writes zeros."""
    hidden = config.hidden_size
    if is_dino:
        yield Drop(prefix + "embeddings.mask_token", "a token for pretraining", partial(torch.zeros, 1, hidden))
        return
    reason = "a pooler, which neither the hidden states nor the classifier need"
    if prefix:
        yield Drop(prefix + "pooler.*", reason)
        return
    yield Drop("pooler.dense.weight", reason, partial(torch.zeros, hidden, hidden))
    yield Drop("pooler.dense.bias", reason, partial(torch.zeros, hidden))


def _embedding_rules(config: Any, prefix: str) -> list[Rule]:
    theirs, ours = prefix + "embeddings.", "model.embeddings."
    names = {f"patch_embeddings.projection.{kind}": f"patch_embeddings.{kind}" for kind in KINDS}
    names |= {"cls_token": "class_token", "position_embeddings": "position_embeddings"}
    if config.use_distillation_token:
        names["distillation_token"] = "distillation_token"
    if config.num_register_tokens:
        names["register_tokens"] = "register_tokens"
    return renames({theirs + their: ours + our for their, our in names.items()})


def _layer_rules(config: Any, layer: str, is_dino: bool) -> list[Rule]:
    names = DINO_LAYER | DINO_MLPS[config.mlp_type] if is_dino else VIT_LAYER
    rules = renames({layer + theirs: LAYER + ours for theirs, ours in names.items()}, KINDS)
    projections = {layer + theirs: LAYER + ours for theirs, ours in PROJECTIONS.items()}
    rules += renames(projections, KINDS if config.attention_bias else KINDS[:1])
    if config.mlp_type == "swiglu":
        halves = Split((config.intermediate_size,) * 2)
        for kind in KINDS:
            ours = (f"{LAYER}mlp.gate_proj.{kind}", f"{LAYER}mlp.up_proj.{kind}")
            rules.append(Rule((f"{layer}mlp.weights_in.{kind}",), ours, halves))
    if is_dino:
        rules += renames({f"{layer}layer_scale{n}.lambda1": f"{LAYER}layer_scale{n}" for n in (1, 2)})
    return rules


VIT = Parent(("vit", "deit", "dinov2", "dinov2_with_registers"), "dcvit", to_fields, restore, weight_map, IMAGES, NEEDS)
