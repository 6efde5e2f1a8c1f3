"""Llama, Mistral, Phi-3, Qwen2, Qwen3 and SmolLM3 as the plain model in a DCFormer."""

from typing import Any

from transformers import LlamaConfig, MistralConfig, Phi3Config, Qwen2Config, Qwen3Config, SmolLM3Config

from .llama_like import LlamaFamily, LlamaLike, turns_parts


def trained_length(config: Any) -> dict[str, int]:
    """Phi-3's field for the length from which LongRoPE takes its long factors."""
    length = config.rope_parameters.get("original_max_position_embeddings", config.max_position_embeddings)
    return {"original_max_position_embeddings": length}


LLAMA = LlamaFamily(
    "Llama, Mistral, Phi-3, Qwen2, Qwen3 or SmolLM3",
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
        LlamaLike("SmolLM3", SmolLM3Config, takes=lambda config: config.no_rope_layers is not None),
        LlamaLike("Qwen3", Qwen3Config, takes=lambda config: config.use_qk_norm, fixed=lambda _: {"use_qk_norm": True}),
        # Qwen2 has biases of queries, keys and values alone, without a field that says so.
        LlamaLike(
            "Qwen2",
            Qwen2Config,
            takes=lambda config: config.attention_bias and config.attention_output_bias is False,
            fixed=lambda _: {"attention_bias": True, "attention_output_bias": False},
        ),
        LlamaLike("Mistral", MistralConfig, takes=lambda config: "sliding_attention" in config.layer_types),
        LlamaLike("Llama", LlamaConfig),
    ),
).parent()
