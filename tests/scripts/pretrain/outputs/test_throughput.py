"""What the progress lines say of a model's speed."""

import psutil
import torch
from accelerate import Accelerator
from cases.models import make_model

from dynattn import DCFormerForCausalLM
from dynattn.configuration.composed_config import ComposedConfig
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
