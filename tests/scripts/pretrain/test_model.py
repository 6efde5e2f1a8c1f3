"""Which attention a run's model gets."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dynattn import DCFormerConfig, DCFormerForCausalLM
from dynattn.modeling.ops.dcmha.attention import DefaultImplementation
from dynattn.scripts.common.errors import UserError
from dynattn.scripts.pretrain import document_leaks
from dynattn.scripts.pretrain import model as job
from dynattn.scripts.pretrain.arguments import PretrainArguments
from dynattn.scripts.pretrain.model_config import plan_config

CPU = torch.device("cpu")


@pytest.fixture
def model() -> DCFormerForCausalLM:
    return DCFormerForCausalLM(DCFormerConfig.from_size("tiny", num_hidden_layers=1))


def test_the_default_is_that_of_the_device_and_says_why(
    model: DCFormerForCausalLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    line = job.choose_attention(model, PretrainArguments(output="runs"), CPU)
    assert line == "attention: chunked ('triton' needs a CUDA device, not 'cpu')"
    monkeypatch.setattr(job, "default_implementation", lambda device: DefaultImplementation("triton", "the fastest"))
    assert job.choose_attention(model, PretrainArguments(output="runs"), CPU) == "attention: triton (the fastest)"
    assert model.config._attn_implementation == "triton"


def test_what_was_asked_for_stays(model: DCFormerForCausalLM) -> None:
    line = job.choose_attention(model, PretrainArguments(output="runs", attn_implementation="eager"), CPU)
    assert line == "attention: eager, as asked for" and model.config._attn_implementation == "chunked"


def test_kernels_that_do_not_run_there_are_refused_before_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(UserError, match=r"triton cannot be used: .*runs on CUDA devices, not on 'cpu'; use 'chunked'"):
        job.check_attention(PretrainArguments(output="runs", attn_implementation="triton"), CPU)
    job.check_attention(PretrainArguments(output="runs", attn_implementation="eager"), CPU)


def test_a_model_that_composes_nothing_keeps_its_own() -> None:
    plain = SimpleNamespace(config=SimpleNamespace(_attn_implementation="sdpa"))
    assert job.choose_attention(plain, PretrainArguments(output="runs"), CPU) == "attention: sdpa"  # type: ignore[arg-type]


SMALL = {"vocab_size": 61, "hidden_size": 16, "num_hidden_layers": 2}
HEADS = {**SMALL, "num_attention_heads": 2, "intermediate_size": 24, "max_position_embeddings": 512}
MODELS: dict[str, tuple[bool, dict[str, Any]]] = {
    "llama": (False, {**HEADS, "attention_dropout": 0.5}),
    "gpt2": (False, {"vocab_size": 61, "n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 512}),
    "gemma2": (False, {**HEADS, "head_dim": 8, "num_key_value_heads": 1, "sliding_window": 4}),
    "bloom": (True, {**SMALL, "n_head": 2}),
    "opt": (True, {**SMALL, "num_attention_heads": 2, "ffn_dim": 24, "word_embed_proj_dim": 16}),
    "mamba": (True, {**SMALL, "state_size": 4}),
}


@pytest.mark.parametrize("model_type", MODELS)
def test_a_model_that_would_ignore_the_borders_of_documents_is_refused(model_type: str) -> None:
    """Whether it does shows in the logits of a document behind another one and by itself."""
    ignores, fields = MODELS[model_type]
    apart = PretrainArguments(output="runs", model_type=model_type, model_config=fields)
    config = plan_config(apart)
    model = job.build_model(replace(apart, mask_documents=False), config).eval()
    tokens, positions = torch.arange(3, 23)[None], torch.arange(10).repeat(2)[None]
    with torch.no_grad():
        behind = model(tokens, position_ids=positions, use_cache=False).logits[:, 10:]
        alone = model(tokens[:, 10:], use_cache=False).logits
    assert torch.allclose(behind, alone, atol=1e-6) != ignores
    assert document_leaks.sees_other_documents(model) == ignores
    if ignores:
        with pytest.raises(UserError, match=f"a {model_type} does not read them so; give mask_documents: false"):
            job.build_model(apart, config)
    else:
        assert job.build_model(apart, config).training


def test_looking_for_borders_changes_no_random_number_and_no_implementation() -> None:
    """Flex attention computes no gradients on a CPU, so the model is asked with another implementation."""
    arguments = PretrainArguments(output="runs", model_type="llama", model_config=MODELS["llama"][1])
    model = job.build_model(replace(arguments, attn_implementation="flex_attention"), plan_config(arguments)).train()
    before = torch.get_rng_state()
    assert not document_leaks.sees_other_documents(model)
    assert torch.equal(before, torch.get_rng_state())
    assert model.config._attn_implementation == "flex_attention"


@pytest.mark.parametrize("given", [{"batch_size": 2}, {"batch_size": 1, "length_warmup_steps": 4}])
def test_flash_attention_keeps_documents_apart_only_where_it_reads_one_sequence(given: dict[str, Any]) -> None:
    flash: Any = SimpleNamespace(config=SimpleNamespace(_attn_implementation="flash_attention_2"))
    with pytest.raises(UserError, match=r"flash_attention_2 keeps the documents .* give attn_implementation: sdpa, "):
        document_leaks.check_keeps_documents_apart(flash, PretrainArguments(output="runs", **given))
    document_leaks.check_keeps_documents_apart(flash, PretrainArguments(output="runs", batch_size=1))
