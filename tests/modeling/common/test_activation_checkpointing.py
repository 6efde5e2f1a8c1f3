"""Checkpointed layers that keep what attention computed: same gradients, no second attention, less memory."""

import warnings
from collections import Counter
from typing import Any

import pytest
import torch
from cases.models import assert_same_gradients
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from dynattn import (
    DCFormerConfig,
    DCFormerForCausalLM,
    DCPythiaConfig,
    DCPythiaForCausalLM,
    RCMHAConfig,
    RCMHAForCausalLM,
    keep_attention_outputs,
)
from dynattn.modeling.common.activation_checkpointing import checkpoint_activations
from dynattn.scripts.common.measuring import peak_memory

LAYERS = 3
IDS = torch.randint(1, 97, (2, 150), generator=torch.Generator().manual_seed(7))
SIZES = {
    "vocab_size": 97,
    "hidden_size": 48,
    "intermediate_size": 160,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 6,
    "max_position_embeddings": 512,
}
WINDOWS = {"sliding_window": 9, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}
UNCOMPOSED = {"compose_pre": False, "compose_post": False}
CASES = {
    "dcformer": (DCFormerForCausalLM, DCFormerConfig, WINDOWS, "dynattn.dcmha_chunked"),
    "dcformer plain": (DCFormerForCausalLM, DCFormerConfig, WINDOWS | UNCOMPOSED, "aten._scaled_dot_product_"),
    "dcpythia": (DCPythiaForCausalLM, DCPythiaConfig, WINDOWS, "dynattn.dcmha_chunked"),
    "rcmha": (RCMHAForCausalLM, RCMHAConfig, {}, "dynattn.relative_chunked"),
    "rcmha mha": (RCMHAForCausalLM, RCMHAConfig, {"attention_type": "mha"}, "aten._scaled_dot_product_"),
}


def make(case: str, checkpointing: dict[str, Any] | None) -> PreTrainedModel:
    model_class, config_class, options, _ = CASES[case]
    torch.manual_seed(0)
    model = model_class(config_class(**SIZES, **options)).train()
    if checkpointing is not None:
        checkpoint_activations(model, use_reentrant=False, **checkpointing)
    return model


def learn(model: PreTrainedModel) -> list[torch.Tensor]:
    loss = model(IDS, labels=IDS, use_cache=False, skip_logits=True).loss
    return list(torch.autograd.grad(loss, list(model.parameters())))


class CountedOps(TorchDispatchMode):
    """Counts every operation by name."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Counts and runs an operation."""
        self.calls[str(func)] += 1
        return func(*args, **(kwargs or {}))

    def forward_calls(self, prefix: str) -> int:
        """Of operations whose name begins so, without their backward passes."""
        return sum(n for name, n in self.calls.items() if name.startswith(prefix) and "backward" not in name)


@pytest.mark.parametrize("case", CASES)
def test_attention_runs_once_and_gradients_are_the_same_to_the_bit(case: str) -> None:
    expected = learn(make(case, None))
    for checkpointing, runs in (({}, 2), ({"context_fn": keep_attention_outputs}, 1)):
        with CountedOps() as ops:
            found = learn(make(case, checkpointing))
        assert ops.forward_calls(CASES[case][-1]) == runs * LAYERS
        assert all(map(torch.equal, found, expected))


def test_operators_of_code_from_a_checkpoint_are_kept_too() -> None:
    """Each copy of the code registers them in a namespace of its own."""
    runs: list[int] = []

    @torch.library.custom_op("dynattn_0123456789abcdef::attend", mutates_args=())
    def attend(x: torch.Tensor) -> torch.Tensor:
        """Counts a call for `x` of any shape, and returns a copy."""
        runs.append(1)
        return x.clone()

    attend.register_autograd(lambda _, grad: grad)
    x = torch.ones(3, requires_grad=True)
    checkpoint(lambda x: attend(x).sin(), x, use_reentrant=False, context_fn=keep_attention_outputs).sum().backward()
    assert len(runs) == 1
    torch.testing.assert_close(x.grad, x.cos())


@pytest.mark.parametrize("case", ["dcformer", "rcmha"])
def test_memory_is_near_that_of_repeating_all(case: str) -> None:
    plain, whole, kept = (
        peak_memory(lambda options=options: learn(make(case, options)), torch.device("cpu"))
        for options in (None, {}, {"context_fn": keep_attention_outputs})
    )
    outputs = LAYERS * IDS.numel() * SIZES["hidden_size"] * 4
    assert whole <= kept <= whole + 1.1 * outputs
    assert kept < 0.9 * plain


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_a_compiled_model_keeps_it_too(case: str) -> None:
    model = make(case, {"context_fn": keep_attention_outputs})
    expected = learn(model)
    torch.compiler.reset()
    compiled = torch.compile(model, fullgraph=True)
    assert_same_gradients(learn(compiled), expected)  # type: ignore[arg-type]


def test_it_is_switched_on_under_the_name_that_is_not_deprecated() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error", FutureWarning)
        assert make("dcformer", {}).model.gradient_checkpointing
