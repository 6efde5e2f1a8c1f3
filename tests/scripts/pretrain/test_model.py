"""Which attention a run's model gets."""

from types import SimpleNamespace

import pytest
import torch

from dynattn import DCFormerConfig, DCFormerForCausalLM
from dynattn.modeling.ops.dcmha.attention import DefaultImplementation
from dynattn.scripts.common.errors import UserError
from dynattn.scripts.pretrain import model as job
from dynattn.scripts.pretrain.arguments import PretrainArguments

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
