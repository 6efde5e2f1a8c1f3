"""Llama and the model types beside it as the plain model in a DCFormer."""

from typing import Any

from transformers import (
    CwmConfig,
    Exaone4Config,
    LlamaConfig,
    MinistralConfig,
    MistralConfig,
    Phi3Config,
    Qwen2Config,
    Qwen3Config,
    SeedOssConfig,
    SmolLM3Config,
)

from .llama_like import LlamaFamily, LlamaLike, turns_parts


def trained_length(config: Any) -> dict[str, int]:
    """Phi-3's field for the length from which LongRoPE takes its long factors."""
    length = config.rope_parameters.get("original_max_position_embeddings", config.max_position_embeddings)
    return {"original_max_position_embeddings": length}


def exaone4_block(config: Any) -> dict[str, Any]:
    """What the code of EXAONE 4 does. If it has a window, the layers without one do not rotate."""
    types = config.layer_types
    has_window = "sliding_attention" in types or (config.model_type == "exaone4" and config.sliding_window is not None)
    rotates = [int(not has_window or layer_type == "sliding_attention") for layer_type in types]
    return {"norm_placement": "output", "use_qk_norm": True, "no_rope_layers": None if all(rotates) else rotates}


def has_some_windows(config: Any) -> bool:
    """Whether some layers have a window and others do not."""
    return len(set(config.layer_types)) > 1


def is_cwm(config: Any) -> bool:
    """Whether layers have windows beside biases of the MLP or, where only some have one, Llama 3's rotary embedding.

    A Ministral can have the latter, too. A CWM always names the tokens at both ends of a text.
    """
    has_ends = config.bos_token_id is not None and config.eos_token_id is not None
    is_scaled = has_some_windows(config) and config.rope_of("full_attention").get("rope_type") == "llama3"
    return "sliding_attention" in config.layer_types and has_ends and (config.mlp_bias or is_scaled)


def has_qwen2_biases(config: Any) -> bool:
    """Whether queries, keys and values alone have biases."""
    return config.attention_bias and config.attention_output_bias is False


def is_seed_oss(config: Any) -> bool:
    """Whether a model without windows has biases that neither Llama nor Qwen2 has, or Qwen2's and wider heads."""
    if "sliding_attention" in config.layer_types or config.has_output_bias == config.attention_bias:
        return False
    is_wide = config.head_dim * config.num_attention_heads != config.hidden_size
    return is_wide or config.mlp_bias or not has_qwen2_biases(config)


def output_bias(config: Any) -> dict[str, Any]:
    """Our field for the bias of the output projection, given our configuration or that of a Seed-OSS."""
    name = "attention_out_bias" if config.model_type == "seed_oss" else "attention_output_bias"
    return {"attention_output_bias": getattr(config, name)}


def seed_oss_fields(config: Any) -> dict[str, Any]:
    """What only a Seed-OSS has. By default it has dropout, but ours do not."""
    return {"attention_out_bias": config.has_output_bias, "attention_dropout": 0.0, "residual_dropout": 0.0}


NEIGHBOURS = "rotary embedding that turns neighbouring channels"
# Model types that resemble Llama, and what a DCFormer lacks for the same outputs.
LACKING = {
    **dict.fromkeys(("apertus", "arcee"), "MLP without a gate"),
    "bitnet": "norm inside of attention and MLP",
    **dict.fromkeys(("ernie4_5", "glm", "helium"), NEIGHBOURS),
    **dict.fromkeys(("gemma", "gemma2", "gemma3_text"), "factor on embeddings"),
    "glm4": f"norms of inputs and outputs in one layer, and no {NEIGHBOURS}",
    "granite": "embedding_multiplier, residual_multiplier or logits_scaling",
    "granite_swa": "embedding_multiplier, residual_multiplier, logits_scaling or attention sinks",
    "hunyuan_v1_dense": "query-key norm after the rotary embedding",
    "hyperclovax": "embedding_multiplier, residual_multiplier, logits_scaling or use_post_norm",
    "ministral3": "llama_4_scaling_beta",
    "olmo": "LayerNorm without weights",
}

LLAMA = LlamaFamily(
    {"mgate_dim": None, "norm_placement": "input"},
    (
        LlamaLike(
            "Phi-3",
            Phi3Config,
            takes=turns_parts,
            fixed=lambda config: {"head_dim": config.hidden_size // config.num_attention_heads},
            more=trained_length,
            turns_parts=True,
        ),
        LlamaLike(
            "EXAONE 4", Exaone4Config, takes=lambda config: config.norm_placement == "output", fixed=exaone4_block
        ),
        LlamaLike("SmolLM3", SmolLM3Config, takes=lambda config: config.no_rope_layers is not None),
        LlamaLike("Qwen3", Qwen3Config, takes=lambda config: config.use_qk_norm, fixed=lambda _: {"use_qk_norm": True}),
        LlamaLike("Seed-OSS", SeedOssConfig, takes=is_seed_oss, fixed=output_bias, more=seed_oss_fields),
        # Qwen2 has these biases without fields that say so.
        LlamaLike(
            "Qwen2",
            Qwen2Config,
            takes=has_qwen2_biases,
            fixed=lambda _: {"attention_bias": True, "attention_output_bias": False},
        ),
        LlamaLike("CWM", CwmConfig, takes=is_cwm),
        LlamaLike("Ministral", MinistralConfig, takes=has_some_windows),
        LlamaLike("Mistral", MistralConfig, takes=lambda config: "sliding_attention" in config.layer_types),
        LlamaLike("Llama", LlamaConfig, also=("internlm3", "iquestcoder")),
    ),
    lacking=LACKING,
).parent()
