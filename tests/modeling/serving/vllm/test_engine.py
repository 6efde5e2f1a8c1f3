"""Models in vLLM's engine generate, greedily, the tokens that they generate in Transformers."""

import copy
import random
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from cases.models import make_model
from cases.vision_models import strengthen
from safetensors.torch import save_file
from torch import nn
from torchao.quantization import IntxWeightOnlyConfig, PerGroup
from transformers import (
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GPT2Config,
    GPT2LMHeadModel,
    GraniteConfig,
    GraniteForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    OPTConfig,
    OPTForCausalLM,
    PreTrainedModel,
    TorchAoConfig,
)
from vllm import LLM, SamplingParams
from vllm.exceptions import VLLMValidationError

from dynattn import DCPythiaConfig, DCPythiaForCausalLM, with_composed_heads

NEW_TOKENS = 16
POSITIONS = 640
MODELS: dict[str, Callable[[], PreTrainedModel]] = {
    "grouped queries, windows": lambda: make_model(),
    "multi-head, all full": lambda: make_model(num_key_value_heads=6, layer_types=["full_attention"] * 3),
    "all windows": lambda: make_model(layer_types=["sliding_attention"] * 3),
    "groups of heads, static": lambda: make_model(compose_groups=2, compose_static=True),
    "static alone": lambda: make_model(compose_key_wise=False, compose_query_wise=False, compose_static=True),
    "odd numbers of heads and channels": lambda: make_model(num_attention_heads=5, num_key_value_heads=1, head_dim=6),
    "query-wise": lambda: make_model(compose_key_wise=False),
    "scores only": lambda: make_model(compose_post=False),
    "probabilities only, rank 1": lambda: make_model(compose_pre=False, compose_rank=1),
    "gates only": lambda: make_model(compose_low_rank=False),
    "tied, with a gated MLP": lambda: make_model(tie_word_embeddings=True, mgate_dim=4),
    "norms of outputs, layers without rotation": lambda: make_model(
        norm_placement="output", qk_norm_type="joint_rms_norm", no_rope_layers=[0, 1, 0]
    ),
    "alibi with gains": lambda: make_model(position_scheme="alibi", position_gain="bucket", compose_position_bias=True),
    "plain": lambda: make_model(compose_pre=False, compose_post=False, head_dim=32),
    "dcpythia": lambda: make_pythia(),
    "composed in place: latent attention and experts": lambda: compose(
        DeepseekV3ForCausalLM, DeepseekV3Config(**LATENT)
    ),
    "composed in place: windows, bounded logits": lambda: compose(Gemma3ForCausalLM, Gemma3TextConfig(**BOUNDED)),
    "composed in place: scaled logits": lambda: compose(
        GraniteForCausalLM, GraniteConfig(**PLACED, logits_scaling=7.0)
    ),
    "composed in place: experts": lambda: compose(MixtralForCausalLM, MixtralConfig(**PLACED, num_local_experts=4)),
    "composed in place: a decoder within the model": lambda: compose(OPTForCausalLM, OPTConfig(**OPT)),
    "composed in place: joint projections": lambda: compose(GPT2LMHeadModel, GPT2Config(**PLACED, attn_pdrop=0.0)),
    "quantized": lambda: quantize(make_model()),
    "composed in place: quantized": lambda: quantize(compose(GraniteForCausalLM, GraniteConfig(**PLACED))),
}
# The processes of an engine divide the vocabulary, too, which Transformers before 5.23 can only do evenly.
SPLIT: dict[str, Callable[[], PreTrainedModel]] = {
    "groups of heads": lambda: make_model(
        num_attention_heads=8, num_key_value_heads=4, compose_groups=2, vocab_size=98
    ),
    "composed in place, attention whole": lambda: compose(
        MixtralForCausalLM, MixtralConfig(**{**PLACED, "vocab_size": 98}, num_local_experts=4)
    ),
}
PLACED: dict[str, Any] = {"vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
PLACED |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128}
PLACED |= {"initializer_range": 0.2, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None}
OPT = {**PLACED, "ffn_dim": 48, "word_embed_proj_dim": 16, "init_std": 0.2, "attention_dropout": 0.0}
BOUNDED = {**PLACED, "head_dim": 16, "final_logit_softcapping": 3.0, "sliding_window": 7}
BOUNDED |= {"layer_types": ["sliding_attention", "full_attention"]}
LATENT = {**PLACED, "num_key_value_heads": 4, "kv_lora_rank": 16, "q_lora_rank": 16, "n_routed_experts": 4}
LATENT |= {"qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8, "num_experts_per_tok": 2}
LATENT |= {"n_group": 1, "topk_group": 1, "moe_intermediate_size": 16}


def compose(model_class: Any, config: Any) -> PreTrainedModel:
    torch.manual_seed(0)
    model = with_composed_heads(model_class, compose_rank=2)(config).eval()
    strengthen(model)
    return model


def quantize(model: PreTrainedModel) -> PreTrainedModel:
    """The model with linear layers of four bits."""
    config = TorchAoConfig(IntxWeightOnlyConfig(weight_dtype=torch.int4, granularity=PerGroup(16)))
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        return type(model).from_pretrained(folder, quantization_config=config).eval()


def make_pythia() -> DCPythiaForCausalLM:
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4}
    sizes |= {"vocab_size": 97, "sliding_window": 11}
    config = DCPythiaConfig(**sizes, initializer_range=0.2, compose_init_scale=40.0, eos_token_id=None)
    return DCPythiaForCausalLM(config).eval()


def make_prompts(count: int, longest: int, prefix: int = 0) -> list[list[int]]:
    """Random prompts of 1 to `longest` tokens, a third of which begin with the same `prefix` tokens."""
    chance = random.Random(0)
    shared = [chance.randrange(97) for _ in range(prefix)]
    prompts = [[chance.randrange(97) for _ in range(chance.randint(1, longest))] for _ in range(count)]
    return [(shared + prompt)[:longest] if index % 3 == 0 else prompt for index, prompt in enumerate(prompts)]


def greedy() -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS, ignore_eos=True, detokenize=False)


@torch.no_grad()
def expected(model: PreTrainedModel, prompts: list[list[int]]) -> list[list[int]]:
    """What `generate` makes of each prompt on its own."""
    options: dict[str, Any] = {
        "max_new_tokens": NEW_TOKENS,
        "do_sample": False,
        "pad_token_id": 0,
        "eos_token_id": None,
    }
    rows = [torch.tensor([prompt]) for prompt in prompts]
    outputs = [model.generate(row, attention_mask=torch.ones_like(row), **options) for row in rows]
    return [output[0, row.shape[1] :].tolist() for row, output in zip(rows, outputs, strict=True)]


def served(llm: LLM, prompts: list[list[int]]) -> list[list[int]]:
    outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], greedy(), use_tqdm=False)
    return [list(output.outputs[0].token_ids) for output in outputs]


def arriving(llm: LLM, prompts: list[list[int]], each_step: int) -> list[list[int]]:
    """The tokens of requests of which `each_step` arrive before each step of the engine."""
    engine, waiting, finished = llm.llm_engine, list(enumerate(prompts)), {}
    while waiting or engine.has_unfinished_requests():
        for index, prompt in waiting[:each_step]:
            engine.add_request(str(index), {"prompt_token_ids": prompt}, greedy())
        del waiting[:each_step]
        finished |= {int(out.request_id): list(out.outputs[0].token_ids) for out in engine.step() if out.finished}
    return [finished[index] for index in range(len(prompts))]


def count(llm: LLM, name: str) -> float:
    return sum(metric.value for metric in llm.get_metrics() if metric.name == f"vllm:{name}")


@pytest.mark.parametrize("name", MODELS)
def test_tokens_are_those_of_generate(name: str, start: Callable[..., LLM]) -> None:
    model, prompts = MODELS[name](), make_prompts(count=12, longest=100)
    llm = start(model, max_num_batched_tokens=64, max_num_seqs=8)
    assert served(llm, prompts) == expected(model, prompts)


@torch.no_grad()
def test_weights_of_eight_bits_with_scales_are_served(tmp_path: Path, start: Callable[..., LLM]) -> None:
    """As llm-compressor saves them."""
    model, prompts, folder = make_model(), make_prompts(count=12, longest=100), tmp_path / "fp8"
    groups = {"targets": ["Linear"], "weights": {"num_bits": 8, "type": "float", "strategy": "channel"}}
    settings = {"format": "float-quantized", "config_groups": {"group_0": groups}, "ignore": ["lm_head"]}
    settings |= {"quant_method": "compressed-tensors", "quantization_status": "compressed"}
    model.save_pretrained(folder)
    model.config.quantization_config = settings
    model.config.save_pretrained(folder)
    tensors = model.state_dict()
    for name, layer in model.model.named_modules(prefix="model"):
        if isinstance(layer, nn.Linear):
            scale = layer.weight.abs().amax(1, keepdim=True) / 448
            rounded = (layer.weight / scale).to(torch.float8_e4m3fn)
            tensors |= {f"{name}.weight": rounded, f"{name}.weight_scale": scale}
            layer.weight = nn.Parameter(rounded.float() * scale)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    assert served(start(folder), prompts) == expected(model, prompts)


@pytest.mark.parametrize("name", SPLIT)
def test_two_processes_that_each_have_a_part_give_the_same_tokens(
    name: str, start: Callable[..., LLM], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "nobind")  # by default each process wants cores of its own
    model, prompts = SPLIT[name](), make_prompts(count=12, longest=100)
    llm = start(model, tensor_parallel_size=2, max_num_batched_tokens=64, max_num_seqs=8)
    assert served(llm, prompts) == expected(model, prompts)


def test_200_requests_that_arrive_over_time_share_prefixes_and_are_preempted(start: Callable[..., LLM]) -> None:
    model, prompts = make_model(max_position_embeddings=POSITIONS), make_prompts(count=200, longest=500, prefix=300)
    llm = start(model, block_size=16, num_gpu_blocks_override=220, max_num_batched_tokens=192, max_num_seqs=16)
    assert arriving(llm, prompts, each_step=3) == expected(model, prompts)
    assert count(llm, "prefix_cache_hits") > 0
    assert count(llm, "num_preemptions") > 0


def test_requests_that_arrive_together_share_a_prefix_before_it_is_computed(start: Callable[..., LLM]) -> None:
    """vLLM takes pages for shared when it plans the step that fills them."""
    model, prompts = make_model(), [[*range(70), token] for token in range(12)]
    llm = start(model, block_size=16, max_num_batched_tokens=48)
    assert served(llm, prompts) == expected(model, prompts)
    assert count(llm, "prefix_cache_hits") > 0


def test_a_prompt_beyond_the_positions_is_refused_and_others_are_still_served(start: Callable[..., LLM]) -> None:
    model, (prompt,) = make_model(max_position_embeddings=64), make_prompts(count=1, longest=40)
    llm = start(model)
    with pytest.raises(VLLMValidationError, match="maximum context length is 64 tokens"):
        served(llm, [[1] * 65])
    assert served(llm, [prompt]) == expected(model, [prompt])


def test_a_checkpoint_without_all_weights_is_refused(start: Callable[..., LLM]) -> None:
    model = MODELS["composed in place: experts"]()
    del model.model.layers[1].self_attn.composition.factor_weight
    with pytest.raises(ValueError, match=r"lacks weights \(1\), such as .*layers.1.self_attn.composition.factor_"):
        start(model)


def test_bfloat16_scores_of_prompts_are_as_near_to_float32_as_those_of_transformers(start: Callable[..., LLM]) -> None:
    model, prompts = make_model(), make_prompts(count=4, longest=100)
    half = copy.deepcopy(model).bfloat16()
    llm = start(model, dtype="bfloat16")
    outputs = llm.generate(
        [{"prompt_token_ids": prompt} for prompt in prompts],
        SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0, detokenize=False),
        use_tqdm=False,
    )
    for prompt, output in zip(prompts, outputs, strict=True):
        if len(prompt) == 1:
            continue
        found = [scores[token].logprob for scores, token in zip(output.prompt_logprobs[1:], prompt[1:], strict=True)]
        truth, theirs = (log_probabilities(one, prompt) for one in (model, half))
        noise = (theirs - truth).square().mean().sqrt()
        assert (torch.tensor(found) - truth).square().mean().sqrt() < 2 * noise


@torch.no_grad()
def log_probabilities(model: PreTrainedModel, prompt: list[int]) -> torch.Tensor:
    """Of each token of a prompt but the first, after those before it; `[T - 1]`."""
    scores = model(torch.tensor([prompt])).logits[0, :-1].float().log_softmax(-1)
    return scores.gather(1, torch.tensor(prompt[1:])[:, None])[:, 0]


def test_drafts_of_the_prompt_change_no_token(start: Callable[..., LLM]) -> None:
    """The last test, because drafts import Numba, and vLLM starts no further engine in a process that has it."""
    model, prompts = make_model(), [*make_prompts(count=8, longest=100), [5, 6, 7] * 20]
    drafts = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 1, "prompt_lookup_max": 3}
    llm = start(model, block_size=16, max_num_batched_tokens=64, speculative_config=drafts)
    assert served(llm, prompts) == expected(model, prompts)
    assert 0 < count(llm, "spec_decode_num_accepted_tokens") < count(llm, "spec_decode_num_draft_tokens")
