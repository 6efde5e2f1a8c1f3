"""BART and Marian as the plain encoder-decoder inside a DCBart."""

from typing import Any

from transformers import BartConfig, MarianConfig, PreTrainedConfig

from ....common.errors import UserError
from ...common.translation_probe import TRANSLATION
from ...common.weight_map import Drop, WeightMap, renames
from .interface import Parent, implied_attention, plain_heads, require_fields, shared_fields

SHARED = (
    *("vocab_size", "decoder_layers", "max_position_embeddings", "scale_embedding", "activation_dropout", "use_cache"),
    *("tie_word_embeddings", "pad_token_id", "bos_token_id", "eos_token_id", "decoder_start_token_id"),
    "forced_eos_token_id",
)
# Theirs by ours.
RENAMED = {
    "hidden_size": "d_model",
    "intermediate_size": "encoder_ffn_dim",
    "num_hidden_layers": "encoder_layers",
    "num_attention_heads": "encoder_attention_heads",
    "hidden_act": "activation_function",
    "hidden_dropout": "dropout",
    "initializer_range": "init_std",
}
BART = {"position_embedding_type": "learned", "position_offset": 2, "normalize_embedding": True}
MARIAN = {"position_embedding_type": "sinusoidal", "position_offset": 0, "normalize_embedding": False}
# Both halves have one width.
PAIRS = {"encoder_ffn_dim": "decoder_ffn_dim", "encoder_attention_heads": "decoder_attention_heads"}
WITH_HEAD, WITHOUT_HEAD = ("BartForConditionalGeneration", "MarianMTModel"), ("BartModel", "MarianModel")
EMBEDDING = "shared.weight"
# Ours by theirs.
LAYER = {
    "self_attn_layer_norm": "self_attn_layer_norm",
    "fc1": "mlp.up_proj",
    "fc2": "mlp.down_proj",
    "final_layer_norm": "mlp_layer_norm",
}
CROSS = {"encoder_attn_layer_norm": "cross_attn_layer_norm"}
PROJECTIONS = {"q_proj": "q_proj", "k_proj": "k_proj", "v_proj": "v_proj", "out_proj": "o_proj"}
KINDS = ("weight", "bias")


def to_fields(config: Any) -> dict[str, Any]:
    """Our fields for the same model.

    Raises:
        UserError: its head is another one, its halves differ, or it has several embeddings.
    """
    head, known = (config.architectures or WITH_HEAD)[0], WITH_HEAD + WITHOUT_HEAD
    if head not in known:
        raise UserError(f"{head} has a head that a DCBart lacks; convert one of {', '.join(known)}")
    for names in PAIRS.items():
        first, second = (getattr(config, name) for name in names)
        if first != second:
            raise UserError(f"{names[0]} is {first} and {names[1]} {second}; both halves of a DCBart have one shape")
    separate = getattr(config, "decoder_vocab_size", config.vocab_size) != config.vocab_size
    if separate or not getattr(config, "share_encoder_decoder_embeddings", True) or not config.tie_word_embeddings:
        raise UserError("source, target and head have embeddings of their own; a DCBart has one for all three")
    return {
        **shared_fields(config, SHARED),
        **{ours: getattr(config, theirs) for ours, theirs in RENAMED.items()},
        **(MARIAN if config.model_type == "marian" else BART),
        "final_logits_bias": head in WITH_HEAD,
        "attention_bias": True,
        "use_qk_norm": False,
    }


def restore(config: Any) -> PreTrainedConfig:
    """The configuration of the parent that has what a DCBart without composition has.

    Raises:
        UserError: neither BART nor Marian has it.
    """
    is_marian = config.position_embedding_type == "sinusoidal"
    family, own = ("Marian", MARIAN) if is_marian else ("BART", BART)
    needed = {**own, "normalize_before": False, "attention_bias": True, "layer_norm_eps": 1e-5}
    needed |= {"tie_word_embeddings": True, **plain_heads(config), **implied_attention(config)}
    require_fields(config, needed, family)
    fields = shared_fields(config, SHARED) | {theirs: getattr(config, ours) for ours, theirs in RENAMED.items()}
    fields |= {decoder: fields[encoder] for encoder, decoder in PAIRS.items()}
    fields["init_std"] = float(fields["init_std"])
    head = (WITH_HEAD if config.final_logits_bias else WITHOUT_HEAD)[is_marian]
    make = MarianConfig if is_marian else BartConfig
    return make(**fields, architectures=[head])


def weight_map(config: Any) -> WeightMap:
    """The table for one DCBart configuration. Files of models without a head have names without `model.`."""
    prefix = "model." if config.final_logits_bias else ""
    names = {EMBEDDING: EMBEDDING}
    drops = [_copy(prefix, "lm_head.weight"), Drop("*.version", "numbers that old versions stored")]
    for stack, layers in (("encoder", config.num_hidden_layers), ("decoder", config.decoder_layers)):
        drops.append(_copy(prefix, f"{prefix}{stack}.embed_tokens.weight"))
        if config.position_embedding_type == "learned":
            names[f"{stack}.embed_positions.weight"] = f"{stack}.embed_positions.weight"
        else:
            drops.append(Drop(f"{prefix}{stack}.embed_positions.weight", "sinusoids, which are computed"))
        if config.normalize_embedding:
            names |= {f"{stack}.layernorm_embedding.{kind}": f"{stack}.embed_norm.{kind}" for kind in KINDS}
        for layer in range(layers):
            place = f"{stack}.layers.{layer}."
            names |= {place + theirs: place + ours for theirs, ours in layer_names(stack == "decoder").items()}
    rules = renames({prefix + theirs: f"model.{ours}" for theirs, ours in names.items()})
    if config.final_logits_bias:
        rules += renames({"final_logits_bias": "final_logits_bias"})
    return WeightMap(0, tuple(rules), tuple(drops))


def layer_names(is_decoder: bool) -> dict[str, str]:
    """Names of the weights of one layer, ours by theirs."""
    modules = LAYER | (CROSS if is_decoder else {})
    modules |= {f"self_attn.{theirs}": f"self_attn.{ours}" for theirs, ours in PROJECTIONS.items()}
    if is_decoder:
        modules |= {f"encoder_attn.{theirs}": f"cross_attn.{ours}" for theirs, ours in PROJECTIONS.items()}
    return {f"{theirs}.{kind}": f"{ours}.{kind}" for theirs, ours in modules.items() for kind in KINDS}


def _copy(prefix: str, name: str) -> Drop:
    """A tensor that is tied to the embedding."""
    return Drop(name, "embeddings and heads that are tied to one embedding", copy_of=prefix + EMBEDDING)


BART_MARIAN = Parent(("bart", "marian"), "dcbart", to_fields, restore, weight_map, probe=TRANSLATION)
