"""What the progress lines say of a model's speed."""

import psutil
import torch
from accelerate import Accelerator
from cases.models import make_model

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
