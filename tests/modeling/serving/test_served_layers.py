"""Models of Transformers with composed heads in continuous batching: the tokens of `generate`, or a refusal."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from cases.models import make_model
from cases.versions import needs_transformers
from cases.vision_models import strengthen
from transformers import (
    BartConfig,
    BartForCausalLM,
    BertConfig,
    BertLMHeadModel,
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    FalconH1Config,
    FalconH1ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GenerationConfig,
    GPT2Config,
    GPT2LMHeadModel,
    Llama4ForCausalLM,
    Llama4TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    OPTConfig,
    OPTForCausalLM,
    PreTrainedModel,
    RobertaConfig,
    RobertaForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)
from transformers.generation.configuration_utils import ContinuousBatchingConfig

from dynattn import with_composed_heads
from dynattn.modeling.serving.paged_rows import RowLayout
from dynattn.modeling.serving.served_layers import served_layers

GREEDY = GenerationConfig(max_new_tokens=10, do_sample=False, eos_token_id=-1, pad_token_id=0)
SETTINGS = {"page_size": 8, "num_blocks": 40, "max_batch_tokens": 24}
SIZES: dict[str, Any] = {"vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
SIZES |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128, "initializer_range": 0.2}
SIZES |= {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None}
LATENT = {"kv_lora_rank": 16, "q_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8}
LATENT |= {
    "num_key_value_heads": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "moe_intermediate_size": 16,
}
WINDOWS = {"sliding_window": 7, "layer_types": ["sliding_attention", "full_attention"]}
OPT = {**SIZES, "ffn_dim": 48, "word_embed_proj_dim": 16, "init_std": 0.2, "attention_dropout": 0.0, "layerdrop": 0.9}
BART: dict[str, Any] = {"vocab_size": 97, "d_model": 32, "max_position_embeddings": 128, "init_std": 0.2}
BART |= {"encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4, "decoder_attention_heads": 4}
BART |= {"decoder_ffn_dim": 48, "forced_eos_token_id": None}
GPT2 = {"vocab_size": 97, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 128, "attn_pdrop": 0.0}
GPT2 |= {"bos_token_id": 1, "eos_token_id": None, "initializer_range": 0.2}


def compose(model_class: Any, config: Any, **options: Any) -> PreTrainedModel:
    torch.manual_seed(0)
    model = with_composed_heads(model_class, **{"compose_rank": 2, **options})(config).eval()
    strengthen(model)
    return model


MODELS: dict[str, Callable[[], PreTrainedModel]] = {
    "llama": lambda: compose(LlamaForCausalLM, LlamaConfig(**SIZES)),
    "llama, eager": lambda: compose(LlamaForCausalLM, LlamaConfig(**SIZES), implementation="eager"),
    "llama, query-wise": lambda: compose(LlamaForCausalLM, LlamaConfig(**SIZES), compose_key_wise=False),
    "mistral, windows": lambda: compose(MistralForCausalLM, MistralConfig(**SIZES, sliding_window=7)),
    "gemma 3": lambda: compose(Gemma3ForCausalLM, Gemma3TextConfig(**SIZES, **WINDOWS, head_dim=16)),
    "mixtral": lambda: compose(MixtralForCausalLM, MixtralConfig(**SIZES, num_local_experts=4)),
    "deepseek": lambda: compose(DeepseekV3ForCausalLM, DeepseekV3Config(**{**SIZES, **LATENT})),
    "gpt-2": lambda: compose(GPT2LMHeadModel, GPT2Config(**GPT2)),
    "opt, whose layers are skipped in training": lambda: compose(OPTForCausalLM, OPTConfig(**OPT)),
}
UNFIT: dict[str, tuple[Callable[[], PreTrainedModel], str]] = {
    "some layers": (
        lambda: compose(LlamaForCausalLM, LlamaConfig(**SIZES), names=["model.layers.1.self_attn"]),
        r"with composed heads in layers \[1\] of 2, and a paged cache needs each of them once; compose all layers",
    ),
    "masks in chunks": (
        lambda: compose(Llama4ForCausalLM, Llama4TextConfig(**SIZES, head_dim=8, num_local_experts=2)),
        "ComposedLlama4ForCausalLM has masks of its own",
    ),
    "state beside the keys": (
        lambda: compose(FalconH1ForCausalLM, FalconH1Config(**SIZES, mamba_d_ssm=32, mamba_n_heads=4, mamba_d_head=8)),
        "ComposedFalconH1ForCausalLM has masks of its own, or needs more of earlier tokens than a paged cache",
    ),
    "an encoder": (
        lambda: compose(T5ForConditionalGeneration, T5Config(vocab_size=97, d_model=32, num_layers=1, dropout_rate=0)),
        "ComposedT5ForConditionalGeneration has masks of its own, or needs more",
    ),
    "positions by the length of a cache": (
        lambda: compose(BartForCausalLM, BartConfig(**BART)),
        r"ComposedBartForCausalLM takes no position_ids, so that tokens would get positions of other requests",
    ),
    "positions from the padding token on": (
        lambda: compose(RobertaForCausalLM, RobertaConfig(**SIZES, is_decoder=True, attention_probs_dropout_prob=0.0)),
        "ComposedRobertaForCausalLM counts positions from its padding token on, and engines count from 0",
    ),
    "windows in no mask": (
        lambda: compose(LlamaForCausalLM, LlamaConfig(**SIZES, sliding_window=7)),
        "layer 0 of ComposedLlamaForCausalLM attends with sliding_window=None, and a paged cache would have 7",
    ),
    "sight of later tokens": (
        lambda: compose(BertLMHeadModel, BertConfig(**SIZES, attention_probs_dropout_prob=0.0)),
        "serve causal attention without position bias and sinks alone",
    ),
    "angles of the longest": (
        lambda: compose(LlamaForCausalLM, LlamaConfig(**SIZES, rope_parameters=LONGROPE)),
        "rope_type 'longrope' rotates all tokens of a batch",
    ),
}
LONGROPE = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 4, "long_factor": [2.0] * 4}


def prompts(count: int = 6, longest: int = 30) -> list[list[int]]:
    generator = torch.Generator().manual_seed(1)
    lengths = torch.randint(1, longest, (count,), generator=generator).tolist()
    return [torch.randint(3, 97, (length,), generator=generator).tolist() for length in lengths]


@torch.no_grad()
def alone(model: PreTrainedModel, prompt: list[int]) -> list[int]:
    return model.generate(torch.tensor([prompt]), GREEDY)[0, len(prompt) :].tolist()


@needs_transformers("5.24")
@pytest.mark.parametrize("name", MODELS)
def test_requests_together_get_the_tokens_of_each_alone(name: str) -> None:
    model, asked = MODELS[name](), prompts()
    expected = {tuple(prompt): alone(model, prompt) for prompt in asked}
    assert len({tuple(tokens) for tokens in expected.values()}) > 1
    found = model.train().generate_batch(asked, GREEDY, ContinuousBatchingConfig(**SETTINGS))
    assert {tuple(one.prompt_ids): one.generated_tokens for one in found.values()} == expected


@needs_transformers("5.24")
def test_a_model_generates_by_itself_while_it_serves() -> None:
    model, asked = MODELS["gemma 3"](), prompts()
    expected = [alone(model, prompt) for prompt in asked]
    settings = ContinuousBatchingConfig(**SETTINGS)
    with model.continuous_batching_context_manager(GREEDY, continuous_batching_config=settings) as manager:
        names = [manager.add_request(prompt) for prompt in asked]
        assert [alone(model, prompt) for prompt in asked] == expected
        for name, tokens in zip(names, expected, strict=True):
            assert next(one for one in manager.request_id_iter(name) if one.is_finished()).generated_tokens == tokens


@needs_transformers("5.24")
@pytest.mark.parametrize("name", UNFIT)
def test_a_model_of_which_rows_would_not_keep_enough_is_refused(name: str) -> None:
    make, message = UNFIT[name]
    model = make()
    with pytest.raises(ValueError, match=message):
        model.init_continuous_batching(GREEDY)
    with pytest.raises(ValueError, match=message):
        model.generate_batch([[5, 6, 7]], GREEDY)


def test_rows_are_as_wide_as_what_layers_attend_with() -> None:
    latent = served_layers(MODELS["deepseek"]())
    assert latent.layout == RowLayout(heads=4, kv_heads=4, head_dim=16, terms=5)  # values of 8 are padded
    assert served_layers(MODELS["llama, query-wise"]()).layout.width == 8
    windows = served_layers(MODELS["gemma 3"]())
    assert windows.windows == [7, None] and windows.layout == RowLayout(heads=4, kv_heads=2, head_dim=16, terms=5)
    assert served_layers(make_model(sliding_window=4)).windows == [4, None, 4]
