"""An attention function of the user's own serves the op and the models as those of the package do."""

import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from cases.composed_op import CASES, random_inputs, run
from cases.models import make_model
from cases.vision_models import Ask, detr, vision_transformer
from torch import Tensor, nn

import dynattn
from dynattn.modeling.ops.dcmha.attention import COMPOSING_IMPLEMENTATIONS, IMPLEMENTATIONS
from dynattn.modeling.ops.dcmha.eager import dcmha_eager

IDS = torch.randint(0, 97, (2, 20), generator=torch.Generator().manual_seed(7))


@pytest.fixture
def calls() -> Iterator[list[str]]:
    """How often the implementation `mine` was called."""
    seen: list[str] = []

    def mine(*tensors: Tensor, **options: Any) -> tuple[Tensor, None]:
        seen.append("called")
        return dcmha_eager(*tensors, **options)[0], None

    dynattn.register_implementation("mine", mine)
    yield seen
    del COMPOSING_IMPLEMENTATIONS["mine"], IMPLEMENTATIONS["mine"]


def test_the_op_knows_it(calls: list[str]) -> None:
    torch.manual_seed(0)
    tensors, keywords = random_inputs(CASES[5])
    for found, expected in zip(run(tensors, keywords, "mine"), run(tensors, keywords, "eager"), strict=True):
        torch.testing.assert_close(found, expected)
    assert calls == ["called"]


def test_models_with_composition_take_it(calls: list[str]) -> None:
    model = make_model()
    mask = torch.ones_like(IDS)
    mask[0, :5] = 0
    with torch.no_grad():
        expected = model(IDS, attention_mask=mask).logits[mask.bool()]
        model.set_attn_implementation("mine")
        found = model(IDS, attention_mask=mask).logits[mask.bool()]
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)
    assert len(calls) == 3


@pytest.mark.parametrize("make", [detr, vision_transformer])
def test_attention_of_other_libraries_takes_it(make: Callable[[], tuple[nn.Module, Ask]], calls: list[str]) -> None:
    model, ask = make()
    names = dynattn.compose_heads_of(model, implementation="mine")
    ask(model)
    assert len(calls) == len(names)


def test_a_model_with_composed_heads_that_is_set_to_it_composes_by_it(calls: list[str]) -> None:
    model, ask = detr()
    names = dynattn.compose_heads_of(model)
    expected = ask(model)
    model.set_attn_implementation("mine")
    torch.testing.assert_close(ask(model), expected, atol=1e-4, rtol=1e-4)
    assert len(calls) == len(names)


@pytest.mark.parametrize("fields", [{"position_scheme": "t5"}, {"position_gain": "bucket"}], ids=str)
@pytest.mark.usefixtures("calls")
def test_a_model_with_tables_refuses_it_when_it_is_set(fields: dict[str, Any]) -> None:
    """Not only in its first forward pass, whose errors a serving thread logs beside empty answers."""
    model = make_model(**fields)
    with pytest.raises(ValueError, match=r"'mine' would ignore.*use one of \['chunked', 'eager', 'triton'\]"):
        model.set_attn_implementation("mine")


@pytest.mark.parametrize("name", ["eager", "chunked", "triton", "sdpa"])
def test_names_of_the_package_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match=f"{name!r} is an implementation of dynattn"):
        dynattn.register_implementation(name, dcmha_eager)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("", "'' is no name of an implementation"),
        (3, "3 is no name of an implementation"),
        ("paged|mine", "give one without '|', '/' and ':'"),
        ("mine/kernel", "is no name of an implementation"),
        ("flash_attention_2", "'flash_attention_2' is an implementation of Transformers"),
    ],
)
def test_names_that_mean_something_to_transformers_are_refused(name: Any, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        dynattn.register_implementation(name, dcmha_eager)
    assert name not in COMPOSING_IMPLEMENTATIONS


def test_what_cannot_be_called_is_refused() -> None:
    with pytest.raises(TypeError, match="the implementation 'mine' is a str; give a function"):
        dynattn.register_implementation("mine", "dcmha_eager")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda output: output, "must return a pair, of the output and of maps or None"),
        (lambda output: (output.transpose(1, 2), None), "an output [B, T, H, D] of (2, 5, 4, 8), not (2, 4, 5, 8)"),
    ],
)
def test_results_of_another_form_are_refused(change: Callable[[Tensor], Any], message: str) -> None:
    dynattn.register_implementation("wrong", lambda *tensors, **options: change(dcmha_eager(*tensors, **options)[0]))
    try:
        with pytest.raises(ValueError, match=re.escape(message)):
            dynattn.dcmha_attention(*torch.randn(3, 2, 4, 5, 8), implementation="wrong")
    finally:
        del COMPOSING_IMPLEMENTATIONS["wrong"], IMPLEMENTATIONS["wrong"]


def test_maps_of_an_implementation_that_makes_none_are_refused(calls: list[str]) -> None:
    model = make_model(attn_implementation="mine")
    with pytest.raises(ValueError, match="attn_implementation='mine' returned no attention maps; leave"):
        model(IDS, output_attentions=True)


@torch.no_grad()
def test_a_model_returns_the_maps_of_the_implementation_that_it_runs_with() -> None:
    def halved(*tensors: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
        output, maps = dcmha_eager(*tensors, **options)
        return output / 2, maps / 2

    dynattn.register_implementation("halved", halved)
    try:
        model, plain = make_model(attn_implementation="halved"), make_model(attn_implementation="eager")
        output = model(IDS, output_attentions=True)
        assert torch.equal(output.logits, model(IDS).logits)
        assert torch.equal(output.attentions[0], plain(IDS, output_attentions=True).attentions[0] / 2)
    finally:
        del COMPOSING_IMPLEMENTATIONS["halved"], IMPLEMENTATIONS["halved"]
