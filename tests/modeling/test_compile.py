"""Blocks and whole models compile for training without a graph break, with full and sliding layers, with padding."""

import pytest
import torch
from cases.models import assert_same_gradients
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from transformers import PreTrainedModel

from dynattn import (
    DCBartConfig,
    DCBartForConditionalGeneration,
    DCFormerConfig,
    DCFormerForCausalLM,
    DCModernBertConfig,
    DCModernBertForMaskedLM,
    DCPythiaConfig,
    DCPythiaForCausalLM,
    RCMHAConfig,
    RCMHAForCausalLM,
    RCMHASeq2SeqConfig,
    RCMHASeq2SeqForConditionalGeneration,
)
from dynattn.modeling.common.activation_checkpointing import checkpoint_activations

IDS = torch.randint(1, 97, (2, 40), generator=torch.Generator().manual_seed(7))
PADDED = torch.ones_like(IDS)
PADDED[1, :7] = 0
SIZES = {
    "vocab_size": 97,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_attention_heads": 6,
    "max_position_embeddings": 256,
    "initializer_range": 0.1,
}
WINDOW = 9
LAYERS = ["sliding_attention", "full_attention", "sliding_attention"]
FAMILIES = {
    "dcformer": lambda **layers: DCFormerForCausalLM(DCFormerConfig(**SIZES, sliding_window=WINDOW, **layers)),
    "dcpythia": lambda **layers: DCPythiaForCausalLM(DCPythiaConfig(**SIZES, sliding_window=WINDOW, **layers)),
    "rcmha": lambda num_hidden_layers, **_: RCMHAForCausalLM(RCMHAConfig(**SIZES, num_hidden_layers=num_hidden_layers)),
}
TOKENS = {"pad_token_id": 1, "bos_token_id": None, "eos_token_id": 2}
# Models with an encoder: of one layer in each stack, or of one for each kind of layer.
WITH_ENCODERS = {
    "dcbart": lambda: DCBartForConditionalGeneration(
        DCBartConfig(**SIZES, **TOKENS, num_hidden_layers=1, hidden_dropout=0.0)
    ),
    "rcmha_seq2seq": lambda: RCMHASeq2SeqForConditionalGeneration(
        RCMHASeq2SeqConfig(**SIZES, **TOKENS, num_hidden_layers=1)
    ),
    "dcmodernbert": lambda: DCModernBertForMaskedLM(
        DCModernBertConfig(
            **SIZES, **TOKENS, num_hidden_layers=2, local_attention=8, cls_token_id=None, sep_token_id=None
        )
    ),
}
POSITIONS = (torch.arange(40) % 15).expand(2, -1)
GIVEN: dict[str, dict[str, Tensor]] = {
    "whole": {},
    "padded": {"attention_mask": PADDED},
    "packed": {"position_ids": POSITIONS},
}
# DCPythia shares DCFormer's forward pass, so one way of calling it is enough to test its own layer.
FAST = [
    ("dcformer", "padded"),
    ("dcformer", "packed"),
    ("dcpythia", "padded"),
    ("rcmha", "padded"),
    ("rcmha", "packed"),
]


def every_call(fast: list[tuple[str, str]]) -> pytest.MarkDecorator:
    """Families and ways of calling them, most of which are slow."""
    calls = [
        pytest.param(family, given, id=f"{family}-{way}", marks=[pytest.mark.slow] * ((family, way) not in fast))
        for family in FAMILIES
        for way, given in GIVEN.items()
    ]
    return pytest.mark.parametrize(("family", "given"), calls)


# Beside a mask, as collators that flatten batches give it; for one row.
BORDERS = {"cu_seq_lens_q": torch.tensor([0, 15, 30, 40]), "attention_mask": torch.ones(1, 40, dtype=torch.long)}


@pytest.fixture(autouse=True)
def _nothing_compiled() -> None:
    torch.compiler.reset()


def make(family: str, layers: int = len(LAYERS)) -> PreTrainedModel:
    torch.manual_seed(0)
    return FAMILIES[family](num_hidden_layers=layers, layer_types=LAYERS[:layers]).train()


def learn(
    model: PreTrainedModel, given: dict[str, Tensor], skip_logits: bool = False, ids: Tensor = IDS
) -> list[Tensor]:
    loss = model(ids, **given, labels=ids, use_cache=False, skip_logits=skip_logits).loss
    return [loss.detach(), *torch.autograd.grad(loss, list(model.parameters()))]


@every_call(FAST)
def test_a_model_is_one_graph(family: str, given: dict[str, Tensor]) -> None:
    model = make(family, layers=2)  # one of each kind
    graphs = CompileCounterWithBackend("eager")
    found = learn(torch.compile(model, backend=graphs, fullgraph=True), given)  # type: ignore[arg-type]
    assert graphs.frame_count == 1
    torch.testing.assert_close(found, learn(model, given))


# What is recomputed in the backward pass is traced, too, so that the plain model adds little to it.
@pytest.mark.parametrize(
    "checkpointed",
    [pytest.param(False, id="plain", marks=pytest.mark.slow), pytest.param(True, id="checkpointed")],
)
@pytest.mark.parametrize("family", WITH_ENCODERS)
def test_a_model_with_an_encoder_is_one_graph(family: str, checkpointed: bool) -> None:
    torch.manual_seed(0)
    model = WITH_ENCODERS[family]().train()
    if checkpointed:
        checkpoint_activations(model, use_reentrant=False)
    graphs = CompileCounterWithBackend("eager")
    found = learn(torch.compile(model, backend=graphs, fullgraph=True), GIVEN["padded"])  # type: ignore[arg-type]
    assert graphs.frame_count == 1
    torch.testing.assert_close(found, learn(model, GIVEN["padded"]))


def test_borders_of_documents_break_no_graph() -> None:
    model = make("dcformer", layers=2)
    graphs = CompileCounterWithBackend("eager")
    compiled = torch.compile(model, backend=graphs, fullgraph=True)
    found = learn(compiled, BORDERS, ids=IDS[:1])  # type: ignore[arg-type]
    assert graphs.frame_count == 1
    torch.testing.assert_close(found, learn(model, BORDERS, ids=IDS[:1]))


@every_call([("dcformer", "packed")])
def test_blocks_are_compiled_once_for_each_kind_of_layer(family: str, given: dict[str, Tensor]) -> None:
    model = make(family)
    expected = learn(model, given)
    graphs = CompileCounterWithBackend("eager")
    for layer in model.model.layers:
        layer.compile(backend=graphs, fullgraph=True)
    torch.testing.assert_close(learn(model, given), expected)
    assert graphs.frame_count == len(set(model.config.layer_types))


@every_call([])
def test_a_compiled_model_learns_the_same(family: str, given: dict[str, Tensor]) -> None:
    model = make(family)
    expected = learn(model, given, skip_logits=True)
    compiled = torch.compile(model, fullgraph=True)
    assert_same_gradients(learn(compiled, given, skip_logits=True), expected)  # type: ignore[arg-type]
