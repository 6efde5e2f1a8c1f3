"""What the progress lines say of a model's speed."""

from pathlib import Path

import psutil
import pytest
import torch
from accelerate import Accelerator
from cases.models import make_model
from cases.training import curve, killed_run, run

from dynattn import DCFormerForCausalLM, DCModernBertConfig, DCModernBertForMaskedLM
from dynattn.configuration.composed_config import ComposedConfig
from dynattn.modeling.ops.chunked_loss import IGNORED
from dynattn.scripts.common.flops import ModelFlops
from dynattn.scripts.pretrain.outputs.throughput import Throughput, peak_gib


def test_a_family_that_nobody_knows_has_no_mfu() -> None:
    class OwnConfig(ComposedConfig):
        model_type = "own"

    model = make_model()
    assert isinstance(model, DCFormerForCausalLM)
    assert Throughput.of(model, Accelerator(cpu=True)).flops is not None
    model.config.__class__ = OwnConfig
    assert Throughput.of(model, Accelerator(cpu=True)).flops is None


def test_memory_without_a_gpu_is_that_of_the_process() -> None:
    now = psutil.Process().memory_info().rss / 2**30
    assert now * 0.9 < peak_gib(torch.device("cpu")) < psutil.virtual_memory().total / 2**30


def test_a_report_counts_what_came_since_the_last() -> None:
    """An encoder computes logits for targets only, here one of four tokens."""
    sizes = {"hidden_size": 8, "intermediate_size": 12, "num_attention_heads": 2, "num_hidden_layers": 1}
    flops = ModelFlops.of(DCModernBertForMaskedLM(DCModernBertConfig(**sizes)))
    labels = torch.tensor([[IGNORED, IGNORED, 3, IGNORED]])
    throughput = Throughput(Accelerator(cpu=True), flops, gemm_rate=2e9)
    for _ in range(2):
        throughput.add([{"input_ids": torch.ones_like(labels), "labels": labels}] * 2, tokens=8, seconds=0.5)
        throughput.add([], tokens=8, seconds=1.5)
        rates = throughput.report()
        assert (rates["tokens_per_second"], rates["flops_per_second"]) == (8, flops.training(torch.arange(4), 1))
        assert rates["mfu"] == rates["flops_per_second"] / 2e9


def test_a_resumed_run_counts_the_operations_of_updates_before_its_checkpoint(corpus: Path, tmp_path: Path) -> None:
    """The checkpoint is of an update between two lines; operations depend on the documents, and so on the update."""
    sizes = {"hidden_size": 8, "intermediate_size": 12, "num_attention_heads": 2, "num_hidden_layers": 1}
    options = {"model_type": "dcformer", "model_config": sizes, "max_steps": 6, "log_every": 3, "save_every": 2}
    killed_run(tmp_path / "killed", corpus, step=5, **options)
    costs = []
    for name in ("straight", "killed"):
        output = run(tmp_path / name, corpus, **options).output
        rates = curve(output, "flops_per_second", "tokens_per_second", split="train")
        costs.append([operations / tokens for operations, tokens in rates])
    assert costs[0] == pytest.approx(costs[1], rel=1e-9)
    assert costs[0][0] != pytest.approx(costs[0][1], rel=1e-3)
