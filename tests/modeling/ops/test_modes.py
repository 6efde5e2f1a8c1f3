"""The modes of PyTorch around a call: default dtype and device, transforms of functions, autocast."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from cases.composed_op import CASES, Case, in_dtype, random_inputs, run
from cases.models import make_model
from torch import Tensor
from torch.autograd import forward_ad
from torch.utils.flop_counter import FlopCounterMode

import dynattn
from dynattn import Composition, dcmha_attention, relative_attention
from dynattn.modeling.ops.chunked_loss import chunked_causal_loss

IDS = torch.randint(0, 97, (2, 20), generator=torch.Generator().manual_seed(7))


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


DEFAULTS = {
    "bfloat16": lambda: default_dtype(torch.bfloat16),
    "float64": lambda: default_dtype(torch.float64),
    "meta": lambda: torch.device("meta"),
}


@pytest.mark.parametrize("default", DEFAULTS)
@pytest.mark.parametrize("case", [case for case in CASES if case.mask is None])
def test_defaults_of_pytorch_change_nothing(case: Case, default: str) -> None:
    """C code reads and writes float32 on the CPU, whatever new tensors are by default."""
    torch.manual_seed(0)
    tensors, keywords = in_dtype(torch.float32, *random_inputs(case))
    expected = run(tensors, keywords, "chunked")
    with DEFAULTS[default]():
        found = run(tensors, keywords, "chunked")
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.dtype == theirs.dtype and torch.equal(ours, theirs)


@pytest.mark.parametrize("scheme", ["rope", "alibi", "t5", "sinusoidal", "carope"])
@pytest.mark.parametrize("default", ["bfloat16", "float64"])
@torch.no_grad()
def test_a_model_keeps_its_logits_under_another_default_dtype(scheme: str, default: str) -> None:
    model = make_model(position_scheme=scheme)
    expected = model(IDS, labels=IDS)
    with DEFAULTS[default]():
        found = model(IDS, labels=IDS)
        tokens = model.generate(IDS, max_new_tokens=3, do_sample=False)
    assert torch.equal(found.logits, expected.logits) and torch.equal(found.loss, expected.loss)
    assert torch.equal(tokens, model.generate(IDS, max_new_tokens=3, do_sample=False))


def derivatives(function: Callable[[Tensor], Tensor], at: Tensor) -> list[Tensor]:
    """What transforms of `torch.func` and forward-mode derivatives make of a function."""
    with forward_ad.dual_level():
        dual = forward_ad.unpack_dual(function(forward_ad.make_dual(at, at))).tangent
    assert dual is not None
    return [
        dual,
        torch.func.jvp(function, (at,), (at,))[1],
        torch.func.grad(lambda point: function(point).square().sum())(at),
        torch.func.vmap(function)(torch.stack([at, 2 * at])),
    ]


@pytest.mark.parametrize("attend", [dcmha_attention, relative_attention])
def test_second_derivatives_of_chunked_attention_are_refused(attend: Callable[..., Any]) -> None:
    query, key, value = torch.randn(3, 1, 2, 6, 4, dtype=torch.float64, requires_grad=True)

    def gradient(implementation: str) -> Tensor:
        (found,) = torch.autograd.grad(
            attend(query, key, value, implementation=implementation)[0].square().sum(), query, create_graph=True
        )
        return found

    torch.testing.assert_close(gradient("chunked"), gradient("eager"))
    torch.autograd.grad(gradient("eager").square().sum(), query)
    with pytest.raises(NotImplementedError, match="has no second derivatives; use implementation='eager'"):
        torch.autograd.grad(gradient("chunked").square().sum(), query)


@pytest.mark.parametrize("attend", [dcmha_attention, relative_attention])
def test_rows_of_a_jacobian_are_computed_together(attend: Callable[..., Any]) -> None:
    """`vectorize=True` batches gradients with an older `vmap` than that of `torch.func`."""
    query, key, value = torch.randn(3, 1, 2, 6, 4, dtype=torch.float64)
    found, expected = (
        torch.autograd.functional.jacobian(
            lambda *inputs, name=name: attend(*inputs, implementation=name), (query, key, value), vectorize=True
        )
        for name in ("chunked", "eager")
    )
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("case", [Case(6, 6), Case(1, 6), Case(6, 9, tables=("bias",), offset=2)])
def test_transforms_have_the_derivatives_of_the_reference(case: Case) -> None:
    torch.manual_seed(0)
    tensors, keywords = random_inputs(case)
    query, key, value = (tensor.detach() for tensor in tensors[:3])
    keywords = {name: one.detach() if isinstance(one, Tensor) else one for name, one in keywords.items()}
    keywords |= {name: keywords[name].map(Tensor.detach) for name in ("pre", "post")}
    found, expected = (
        derivatives(lambda query, name=name: dcmha_attention(query, key, value, implementation=name, **keywords), query)
        for name in ("chunked", "eager")
    )
    for ours, theirs in zip(found, expected, strict=True):
        assert theirs.abs().max() > 0.1
        torch.testing.assert_close(ours, theirs)


def test_transforms_of_relative_attention_have_the_derivatives_of_the_reference() -> None:
    torch.manual_seed(0)
    query, key, value = torch.randn(3, 2, 3, 200, 4, dtype=torch.float64).unbind()
    table = torch.randn(200, 3, 4, dtype=torch.float64)
    found, expected = (
        derivatives(
            lambda query, name=name: relative_attention(
                query, key, value, position_embeddings=table, implementation=name
            ),
            query,
        )
        for name in ("chunked", "eager")
    )
    for ours, theirs in zip(found, expected, strict=True):
        assert theirs.abs().max() > 0.1
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("labels", [None, IDS])
def test_a_model_has_forward_mode_derivatives(labels: Tensor | None) -> None:
    model, embeddings = make_model().double().requires_grad_(False), torch.randn(2, 20, 48, dtype=torch.float64)

    def outcome(embeddings: Tensor) -> Tensor:
        output: Any = model(inputs_embeds=embeddings, labels=labels, use_cache=False)
        return output.logits if labels is None else output.loss

    step = 1e-3  # losses are float32
    numeric = (outcome(embeddings * (1 + step)) - outcome(embeddings * (1 - step))) / (2 * step)
    torch.testing.assert_close(torch.func.jvp(outcome, (embeddings,), (embeddings,))[1], numeric, rtol=1e-3, atol=1e-4)


def test_transforms_of_the_loss_without_logits_are_those_of_the_loss_with_them() -> None:
    torch.manual_seed(0)
    hidden, weight = torch.randn(2, 9, 8), torch.randn(31, 8)
    labels = torch.randint(31, (2, 9))

    def loss(hidden: Tensor) -> Tensor:
        return chunked_causal_loss(hidden, weight, None, labels, z_loss=0.1)

    point = hidden.clone().requires_grad_()
    (expected,) = torch.autograd.grad(loss(point), point)
    torch.testing.assert_close(torch.func.grad(loss)(hidden), expected)
    tangent = torch.func.jvp(loss, (hidden,), (hidden,))[1]
    torch.testing.assert_close(tangent, (expected * hidden).sum())


@pytest.mark.parametrize("queries", [1, 30])
def test_autocast_leaves_float64_as_it_is(queries: int) -> None:
    torch.manual_seed(0)
    tensors, keywords = random_inputs(Case(queries, 30))
    expected = run(tensors, keywords, "eager")
    with torch.autocast("cpu", torch.bfloat16):
        found = run(tensors, keywords, "chunked")
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("scheme", ["rope", "carope"])
@pytest.mark.parametrize("kind", [None, "static"])
def test_a_cache_under_autocast_keeps_keys_in_the_dtype_of_values(scheme: str, kind: str | None) -> None:
    model = make_model(position_scheme=scheme, sliding_window=None, layer_types=None)
    options = {"max_new_tokens": 4, "do_sample": False, "return_dict_in_generate": True}
    with torch.autocast("cpu", torch.bfloat16):
        cache = model.generate(IDS, cache_implementation=kind, **options).past_key_values
    assert {layer.keys.dtype for layer in cache.layers} == {layer.values.dtype for layer in cache.layers}
    assert cache.layers[0].keys.dtype == torch.bfloat16


@pytest.mark.parametrize("family", ["DCFormer", "DCPythia", "RCMHA"])
def test_shapes_and_operations_can_be_found_without_memory(family: str) -> None:
    config = getattr(dynattn, f"{family}Config").from_size("tiny", vocab_size=97)
    models = []
    for device, implementation in (("meta", None), ("meta", "eager"), ("cpu", "eager")):
        with torch.device(device):
            models.append(getattr(dynattn, f"{family}ForCausalLM")(config))
        if implementation:
            models[-1].set_attn_implementation(implementation)
    output = models[0](IDS.to("meta"), labels=IDS.to("meta"))
    output.loss.backward()
    assert output.logits.shape == (*IDS.shape, 97)
    assert all(parameter.grad.shape == parameter.shape for parameter in models[0].parameters())
    counts = []
    for model in models:
        with FlopCounterMode(display=False) as counter:
            output = model(IDS.to(model.device), labels=IDS.to(model.device), use_cache=False)
            forward = counter.get_total_flops()
            output.loss.backward()
        counts.append((forward, counter.get_total_flops()))
    assert counts[0] == counts[1] == counts[2]
    assert counts[0][1] == pytest.approx(3 * counts[0][0], rel=0.02)


@torch.no_grad()
@pytest.mark.parametrize("family", ["DCFormer", "RCMHA"])
def test_operations_of_a_decoded_token_are_counted(family: str) -> None:
    """Not in C, of which PyTorch sees nothing; a query's terms are applied as one product, not one after the other."""
    config = getattr(dynattn, f"{family}Config").from_size("tiny", vocab_size=97)
    model = getattr(dynattn, f"{family}ForCausalLM")(config).eval()
    counts = []
    for implementation in ("chunked", "eager"):
        model.set_attn_implementation(implementation)
        cache = model(IDS).past_key_values
        with FlopCounterMode(display=False) as counter:
            model(IDS[:, :1], past_key_values=cache)
        counts.append(counter.get_total_flops())
    assert counts[0] == pytest.approx(counts[1], rel=0.01)


def plain_call(implementation: str, function: str) -> Callable[[Tensor], Tensor]:
    """An op as a function of its queries `[1, 4, 6, 8]`, with fixed other arguments."""
    given = torch.Generator().manual_seed(0)
    key, value = torch.randn(2, 1, 4, 6, 8, generator=given)
    if function == "dcmha":
        gates = Composition(query_gate=torch.randn(1, 6, 4, generator=given))
        return lambda query: dcmha_attention(query, key, value, pre=gates, implementation=implementation)
    bias = torch.randn(6, 4, generator=given)
    return lambda query: relative_attention(query, key, value, position_bias=bias, implementation=implementation)


TRANSFORMED: dict[str, Callable[[Callable[[Tensor], Tensor], Tensor], Any]] = {
    "compiled jvp": lambda op, x: torch.compile(lambda x: torch.func.jvp(op, (x,), (x,))[1], backend="eager")(x),
    "jvp of compiled": lambda op, x: torch.func.jvp(torch.compile(op, backend="eager"), (x,), (x,))[1],
    "compiled grad": lambda op, x: torch.compile(torch.func.grad(lambda x: op(x).square().sum()), backend="eager")(x),
}


@pytest.mark.parametrize("transform", TRANSFORMED)
@pytest.mark.parametrize("function", ["dcmha", "relative"])
def test_a_compiler_keeps_transforms(function: str, transform: str) -> None:
    query = torch.randn(1, 4, 6, 8)
    found, expected = [], []
    for name, results in (("chunked", found), ("eager", expected)):
        torch.compiler.reset()
        results.append(TRANSFORMED[transform](plain_call(name, function), query))
    torch.testing.assert_close(found, expected)
    assert expected[0].abs().max() > 0.1


def test_a_function_that_was_compiled_before_keeps_tangents() -> None:
    query, op = torch.randn(1, 4, 6, 8), plain_call("chunked", "dcmha")
    compiled = torch.compile(op, backend="eager")
    compiled(query)
    with forward_ad.dual_level():
        found = forward_ad.unpack_dual(compiled(forward_ad.make_dual(query, query))).tangent
    torch.testing.assert_close(found, torch.func.jvp(plain_call("eager", "dcmha"), (query,), (query,))[1])
