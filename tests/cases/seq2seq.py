"""Small encoder-decoders: pairs of a model of Transformers and ours with its weights, and ways of running one."""

from typing import Any

import torch
from torch import Tensor
from transformers import (
    BartConfig,
    BartForConditionalGeneration,
    MarianConfig,
    MarianMTModel,
    MBartConfig,
    MBartForConditionalGeneration,
    PreTrainedModel,
)
from transformers.cache_utils import EncoderDecoderCache
from transformers.modeling_outputs import BaseModelOutput

from dynattn import (
    DCBartConfig,
    DCBartForConditionalGeneration,
    RCMHASeq2SeqForConditionalGeneration,
)

VOCAB = 83
SHAPE = {"vocab_size": VOCAB, "num_hidden_layers": 2, "decoder_layers": 3, "num_attention_heads": 4}
WIDTHS = {"hidden_size": 48, "intermediate_size": 80, "max_position_embeddings": 64}
TOKENS = {"pad_token_id": 1, "eos_token_id": 2, "bos_token_id": 0, "decoder_start_token_id": 2}
SMALL: dict[str, Any] = {**SHAPE, **WIDTHS, **TOKENS, "forced_eos_token_id": None, "hidden_dropout": 0.0}
# With small weights a model that ignored its composition factors would still look right.
STRONG: dict[str, Any] = {"initializer_range": 0.15, "compose_init_scale": 30.0}
THEIRS = {
    **TOKENS,
    "vocab_size": VOCAB,
    "d_model": 48,
    "encoder_layers": 2,
    "decoder_layers": 3,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 80,
    "decoder_ffn_dim": 80,
    "max_position_embeddings": 64,
    "dropout": 0.0,
    "forced_eos_token_id": None,
    "init_std": 0.15,
}
# Conversions verify an encoder-decoder token by token, as many as it can read.
SHORT = {**THEIRS, "max_position_embeddings": 24}
LEARNED = {"position_embedding_type": "learned", "position_offset": 2, "normalize_embedding": True}
# For each parent its classes, its own fields, and what makes ours the same.
PARENTS: dict[str, tuple[Any, Any, dict[str, Any], dict[str, Any]]] = {
    "bart": (BartConfig, BartForConditionalGeneration, {}, LEARNED),
    "mbart": (
        MBartConfig,
        MBartForConditionalGeneration,
        {"scale_embedding": True},
        {**LEARNED, "normalize_before": True, "scale_embedding": True},
    ),
    "marian": (
        MarianConfig,
        MarianMTModel,
        {"scale_embedding": True, "activation_function": "swish", "bos_token_id": None},
        {"scale_embedding": True, "hidden_act": "swish", "bos_token_id": None},
    ),
}
RENAMED = {
    "layernorm_embedding": "embed_norm",
    "encoder.layer_norm": "encoder.norm",
    "decoder.layer_norm": "decoder.norm",
    "encoder_attn": "cross_attn",
    "out_proj": "o_proj",
    "fc1": "mlp.up_proj",
    "fc2": "mlp.down_proj",
    "final_layer_norm": "mlp_layer_norm",
}
OFF = {"compose_pre": False, "compose_post": False}
IDENTITY = {"compose_init_scale": 0.0}


def make_pair(name: str, implementation: str, **composition: Any) -> tuple[PreTrainedModel, PreTrainedModel]:
    """A parent with eager attention, and ours with its weights; `composition` is `OFF` or `IDENTITY`."""
    config_class, model_class, theirs, ours = PARENTS[name]
    plain = implementation if composition == OFF else "eager"
    parent = model_class(config_class(**{**THEIRS, **theirs}, attn_implementation=plain)).eval()
    parent.final_logits_bias.normal_()
    config = DCBartConfig(**{**SMALL, **ours, **composition}, attn_implementation=implementation)
    model = DCBartForConditionalGeneration(config).eval()
    weights = {rename(key): value for key, value in parent.state_dict().items()}
    if config.position_embedding_type == "sinusoidal":
        weights = {key: value for key, value in weights.items() if "embed_positions" not in key}
    missing, unexpected = model.load_state_dict(weights, strict=False)
    assert not unexpected and all("composition" in key for key in missing)
    return parent, model


def rename(name: str) -> str:
    """Our name of a parent's weight."""
    for theirs, ours in RENAMED.items():
        name = name.replace(theirs, ours)
    return name


DCBART = {**SMALL, **STRONG}
RCMHA = {name: value for name, value in SMALL.items() if name != "forced_eos_token_id"} | {"initializer_range": 0.15}
# The class and the fields of the models of tests that all encoder-decoders have to pass.
KINDS: dict[str, tuple[Any, dict[str, Any]]] = {
    "dcbart": (DCBartForConditionalGeneration, DCBART),
    "dcbart-before": (
        DCBartForConditionalGeneration,
        {**DCBART, "normalize_before": True, "use_qk_norm": True, "compose_static": True},
    ),
    "rcmha": (RCMHASeq2SeqForConditionalGeneration, {**RCMHA, "attention_type": "rcmha"}),
    "rcmha-causal": (
        RCMHASeq2SeqForConditionalGeneration,
        {**RCMHA, "attention_type": "rcmha", "encoder_conv_is_causal": True, "conv_kernel_size": 4},
    ),
    "rmha": (RCMHASeq2SeqForConditionalGeneration, {**RCMHA, "attention_type": "rmha"}),
    "mdha": (RCMHASeq2SeqForConditionalGeneration, {**RCMHA, "attention_type": "mdha"}),
    "mha": (RCMHASeq2SeqForConditionalGeneration, {**RCMHA, "attention_type": "mha"}),
}


def make_model(kind: str = "dcbart", **fields: Any) -> PreTrainedModel:
    """One of ours in eval mode, whose composition, convolutions and positions matter."""
    torch.manual_seed(0)
    model_class, own = KINDS[kind]
    return model_class(model_class.config_class(**{**own, **fields})).eval()


def random_tokens(batch: int, length: int) -> Tensor:
    """`[B, T]`, no special tokens."""
    return torch.randint(3, VOCAB, (batch, length))


def whole(model: PreTrainedModel, source: Tensor, target: Tensor, mask: Tensor | None = None) -> Tensor:
    """Logits `[B, T, V]` of all target tokens `[B, T]` at once; the source `[B, S]` may have a mask `[B, S]`."""
    return model(input_ids=source, attention_mask=mask, decoder_input_ids=target, use_cache=False).logits


def in_steps(
    model: PreTrainedModel, source: Tensor, target: Tensor, cache: EncoderDecoderCache | None = None, first: int = 1
) -> Tensor:
    """The same logits, of the `first` tokens at once and then one by one from a cache."""
    encoded: BaseModelOutput = model.get_encoder()(input_ids=source)
    logits = []
    for part in (target[:, :first], *target[:, first:].split(1, dim=1)):
        output = model(encoder_outputs=encoded, decoder_input_ids=part, past_key_values=cache, use_cache=True)
        cache = output.past_key_values
        logits.append(output.logits)
    return torch.cat(logits, dim=1)
