"""Small encoders of Transformers that a DCModernBert contains."""

import copy
from typing import Any

import torch
import transformers
from transformers import ModernBertConfig, PreTrainedModel

ROWS = 97
SHAPE: dict[str, Any] = {
    "vocab_size": ROWS,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "local_attention": 8,
    "max_position_embeddings": 64,
    "initializer_range": 0.2,
    "norm_eps": 1e-3,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "cls_token_id": 1,
    "eos_token_id": 2,
    "sep_token_id": 2,
}
BIASES = {"norm_bias": True, "mlp_bias": True, "attention_bias": True, "classifier_bias": True}
# Rotary embeddings for texts longer than those of the training, by the type of the full layers.
LONGER_ROPES: dict[str, dict[str, Any]] = {
    "yarn": {
        "full_attention": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16},
        "sliding_attention": {"rope_type": "linear", "factor": 2.0},
    },
    "dynamic": {
        "full_attention": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 500.0},
        "sliding_attention": {"rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
    },
    "longrope": {
        "full_attention": {
            "rope_type": "longrope",
            "short_factor": [1.0] * 4,
            "long_factor": [1.0, 2.0, 3.0, 4.0],
            "original_max_position_embeddings": 16,
        }
    },
    "whole-heads": {  # which ModernBERT rotates, whatever the factor says
        "full_attention": {"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 0.5},
    },
}
# The head and the configuration of each.
ENCODER_PARENTS: dict[str, tuple[str, ModernBertConfig]] = {
    "modernbert": ("ForMaskedLM", ModernBertConfig(**SHAPE)),
    "modernbert-biases": ("ForMaskedLM", ModernBertConfig(**SHAPE, **BIASES, hidden_activation="relu")),
    "modernbert-untied": ("ForMaskedLM", ModernBertConfig(**SHAPE, tie_word_embeddings=False, decoder_bias=False)),
    "modernbert-base": ("Model", ModernBertConfig(**SHAPE)),
    "modernbert-full": ("Model", ModernBertConfig(**SHAPE, layer_types=["full_attention"] * 4)),
    "modernbert-classes": ("ForSequenceClassification", ModernBertConfig(**SHAPE, num_labels=3)),
    "modernbert-mean": (
        "ForSequenceClassification",
        ModernBertConfig(**SHAPE, num_labels=3, classifier_pooling="mean", classifier_activation="silu"),
    ),
    "modernbert-tokens": ("ForTokenClassification", ModernBertConfig(**SHAPE, num_labels=5)),
    "modernbert-choices": ("ForMultipleChoice", ModernBertConfig(**SHAPE)),
    "modernbert-choices-mean": ("ForMultipleChoice", ModernBertConfig(**SHAPE, classifier_pooling="mean")),
    "modernbert-answers": ("ForQuestionAnswering", ModernBertConfig(**SHAPE)),
}
for name, ropes in LONGER_ROPES.items():
    fields = {**SHAPE, "max_position_embeddings": 24, "rope_parameters": ropes}
    ENCODER_PARENTS[f"modernbert-{name}"] = ("Model", ModernBertConfig(**fields))


def make_encoder_parent(name: str) -> PreTrainedModel:
    """A parent with every weight random."""
    head, config = ENCODER_PARENTS[name]
    model_class = getattr(transformers, f"ModernBert{head}")
    model = model_class._from_config(copy.deepcopy(config), attn_implementation="eager").eval()
    model.config.architectures = [model_class.__name__]  # as in a checkpoint
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return model
