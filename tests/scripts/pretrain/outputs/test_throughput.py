"""What the progress lines say of a model's speed."""

from accelerate import Accelerator
from cases.models import make_model

from dynattn import DCFormerForCausalLM
from dynattn.configuration.composed_config import ComposedConfig
from dynattn.scripts.pretrain.outputs.throughput import Throughput


def test_a_family_that_nobody_knows_has_no_mfu() -> None:
    class OwnConfig(ComposedConfig):
        model_type = "own"

    model = make_model()
    assert isinstance(model, DCFormerForCausalLM)
    assert Throughput.of(model, Accelerator(cpu=True)).flops is not None
    model.config.__class__ = OwnConfig
    assert Throughput.of(model, Accelerator(cpu=True)).flops is None
