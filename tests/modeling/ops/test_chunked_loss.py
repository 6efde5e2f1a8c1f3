"""The loss without logits is Transformers' loss of them: value, gradients, conventions, memory."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from cases.models import make_model
from torch import Tensor, nn
from transformers.loss.loss_utils import ForCausalLMLoss

from dynattn import DCFormerForCausalLM
from dynattn.modeling.ops import chunked_loss
from dynattn.modeling.ops.chunked_loss import chunked_causal_loss
from dynattn.scripts.common.measuring import peak_memory

B, T, E, V = 2, 13, 8, 31


@pytest.fixture(autouse=True)
def _small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunked_loss, "CHUNK_TOKENS", 7)


def problem(dtype: torch.dtype = torch.float32) -> tuple[list[Tensor], Tensor]:
    """Hidden states, weight and bias that learn, and labels some of which are ignored."""
    tensors = [torch.randn(shape).to(dtype).requires_grad_() for shape in ((B, T, E), (V, E), (V,))]
    labels = torch.randint(V, (B, T))
    labels[0, :4] = labels[1, -2] = -100
    return tensors, labels


def with_logits(hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, **options: Any) -> Tensor:
    return ForCausalLMLoss(F.linear(hidden, weight, bias), labels, len(weight), **options)


def gradients(loss: Tensor, tensors: list[Tensor]) -> list[Tensor]:
    assert loss.shape == ()
    return [loss.detach(), *torch.autograd.grad(loss, tensors)]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"num_items_in_batch": 5},
        {"num_items_in_batch": torch.tensor(40)},
        {"shift_labels": torch.arange(B * T).reshape(B, T)},
        {"ignore_index": 3},
    ],
    ids=lambda options: next(iter(options), "mean"),
)
def test_it_is_the_loss_of_the_logits(options: dict[str, Any]) -> None:
    tensors, labels = problem()
    if "ignore_index" in options:
        labels[labels == -100] = options["ignore_index"]
    expected = gradients(with_logits(*tensors, labels, **options), tensors)
    torch.testing.assert_close(gradients(chunked_causal_loss(*tensors, labels, **options), tensors), expected)


def test_its_gradients_are_the_derivatives_of_its_value() -> None:
    tensors, labels = problem(torch.float64)
    assert torch.autograd.gradcheck(lambda *given: chunked_causal_loss(*given, labels), tensors)


def test_z_loss_is_the_square_of_the_logarithm_of_the_softmax_sum() -> None:
    tensors, labels = problem(torch.float64)
    hidden, weight, bias = tensors
    log_z = torch.logsumexp(F.linear(hidden, weight, bias)[:, :-1], -1)[labels[:, 1:] != -100]
    expected = gradients(with_logits(*tensors, labels).double() + 0.3 * log_z.square().mean(), tensors)
    found = gradients(chunked_causal_loss(*tensors, labels, z_loss=0.3), tensors)
    # Transformers' loss has logits in float32.
    torch.testing.assert_close(found, expected, rtol=0, atol=2**-20)
    assert torch.autograd.gradcheck(lambda *given: chunked_causal_loss(*given, labels, z_loss=0.3), tensors)


@pytest.mark.parametrize("token", [0, -1])
def test_z_loss_takes_tokens_that_are_switched_off(token: int) -> None:
    (hidden, weight, bias), labels = problem(torch.float64)
    bias = bias.detach().clone()
    bias[token] = -math.inf
    labels = labels.where(labels != token % len(bias), 1)
    log_z = torch.logsumexp(F.linear(hidden, weight, bias)[:, :-1], -1)[labels[:, 1:] != -100]
    expected = chunked_causal_loss(hidden, weight, bias, labels) + 0.3 * log_z.square().mean()
    torch.testing.assert_close(chunked_causal_loss(hidden, weight, bias, labels, z_loss=0.3), expected)


def test_labels_may_be_a_dimension_of_a_transform() -> None:
    tensors, labels = problem()
    several = torch.stack([labels, labels.flip(0)])
    found = torch.func.vmap(lambda one: chunked_causal_loss(*tensors, one, z_loss=0.3))(several)
    expected = torch.stack([chunked_causal_loss(*tensors, one, z_loss=0.3) for one in several])
    torch.testing.assert_close(found, expected)


def test_z_loss_is_refused_where_the_loss_has_logits() -> None:
    model = make_model()
    ids = torch.arange(8)[None]
    with pytest.raises(ValueError, match="z_loss is part of the loss in chunks: give skip_logits=True"):
        model(input_ids=ids, labels=ids, z_loss=1e-4)


@pytest.mark.parametrize("options", [{}, {"num_items_in_batch": 0}])
def test_where_all_labels_are_ignored_the_loss_is_nan_and_its_gradients_are_zero(options: dict[str, Any]) -> None:
    tensors, labels = problem()
    labels.fill_(-100)
    for function in (with_logits, chunked_causal_loss):
        loss, *grads = gradients(function(*tensors, labels, **options), tensors)
        assert math.isnan(loss)
        assert all(not grad.any() for grad in grads)


def test_a_sum_divided_by_no_items_is_nan() -> None:
    tensors, labels = problem()
    for items in (0, torch.tensor(0)):
        loss, *grads = gradients(chunked_causal_loss(*tensors, labels, num_items_in_batch=items), tensors)
        assert math.isnan(loss) and all(not grad.any() for grad in grads)


@pytest.mark.parametrize("frozen", [0, 1, 2])
def test_what_does_not_learn_gets_no_gradient_and_the_rest_keeps_its_own(frozen: int) -> None:
    tensors, labels = problem()
    expected = gradients(with_logits(*tensors, labels), tensors)[1:]
    tensors[frozen].requires_grad_(False)
    chunked_causal_loss(*tensors, labels).backward()
    for index, (tensor, grad) in enumerate(zip(tensors, expected, strict=True)):
        if index == frozen:
            assert tensor.grad is None
        else:
            torch.testing.assert_close(tensor.grad, grad)


@pytest.mark.parametrize("autocast", [False, True])
def test_in_half_precision_it_errs_no_more_than_the_loss_of_the_logits(autocast: bool) -> None:
    tensors, labels = problem(torch.float64)
    exact = gradients(with_logits(*tensors, labels), tensors)
    given = [tensor.detach().to(torch.float32 if autocast else torch.bfloat16).requires_grad_() for tensor in tensors]

    def errors(function: Callable[..., Tensor]) -> list[float]:
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            loss = function(*given, labels)
        found = gradients(loss, given)
        assert [grad.dtype for grad in found[1:]] == [given[0].dtype] * 3
        return [float((ours.double() - best).norm() / best.norm()) for ours, best in zip(found, exact, strict=True)]

    for ours, theirs in zip(errors(chunked_causal_loss), errors(with_logits), strict=True):
        assert ours <= 1.5 * theirs + 1e-6


def test_memory_holds_the_logits_of_a_chunk_and_not_all() -> None:
    hidden, weight, labels = torch.randn(1, 700, 2), torch.randn(500, 2), torch.randint(500, (1, 700))
    tensors = [hidden.requires_grad_(), weight.requires_grad_()]

    def peak(function: Callable[..., Tensor]) -> int:
        return peak_memory(lambda: function(*tensors, None, labels).backward(), torch.device("cpu"))

    logits = hidden.shape[1] * weight.shape[0] * hidden.element_size()
    assert peak(with_logits) > 2 * logits
    assert peak(chunked_causal_loss) < logits / 10


def test_a_compiler_sees_one_node() -> None:
    tensors, labels = problem()
    compiled = torch.compile(chunked_causal_loss, fullgraph=True, backend="aot_eager")
    expected = gradients(chunked_causal_loss(*tensors, labels), tensors)
    torch.testing.assert_close(gradients(compiled(*tensors, labels), tensors), expected)
    hidden, weight, bias = tensors
    operands = (hidden.detach().flatten(0, 1).requires_grad_(), weight, bias, labels.flatten())
    torch.library.opcheck(torch.ops.dynattn.chunked_loss.default, (*operands, [True, True, True], 1e-4))


def test_second_derivatives_are_refused() -> None:
    tensors, labels = problem()
    with pytest.raises(NotImplementedError, match="no second derivatives"):
        torch.autograd.grad(chunked_causal_loss(*tensors, labels), tensors, create_graph=True)


@pytest.mark.parametrize("tied", [False, True])
def test_a_model_skips_its_logits_where_only_the_loss_is_asked_for(tied: bool) -> None:
    model = make_model(tie_word_embeddings=tied).train()
    ids = torch.randint(97, (2, 14))
    whole = model(ids, labels=ids)
    bare = model(ids, labels=ids, skip_logits=True)
    assert whole.logits.shape == (2, 14, 97)
    assert bare.logits is None
    torch.testing.assert_close(bare.loss, whole.loss)
    ours, theirs = (torch.autograd.grad(output.loss, list(model.parameters())) for output in (bare, whole))
    for grad, expected in zip(ours, theirs, strict=True):
        torch.testing.assert_close(grad, expected, atol=1e-5 * float(expected.abs().max()), rtol=1e-4)


def test_without_labels_there_is_nothing_but_logits_to_return() -> None:
    with pytest.raises(ValueError, match="skip_logits=True leaves nothing but the loss, which needs labels"):
        make_model()(torch.ones(1, 4, dtype=torch.long), skip_logits=True)


class Adapted(nn.Linear):
    """A head that does more than its weight says."""

    def forward(self, hidden_states: Tensor) -> Tensor:
        """Adds one to the first logit."""
        return super().forward(hidden_states) + F.one_hot(torch.tensor(0), self.out_features)


def adapt(model: DCFormerForCausalLM) -> None:
    weight = model.lm_head.weight
    model.lm_head = Adapted(weight.shape[1], weight.shape[0], bias=False)
    model.lm_head.weight = weight


def hook(model: DCFormerForCausalLM) -> None:
    model.lm_head.register_forward_hook(lambda _, __, logits: logits.tanh())


def hook_before(model: DCFormerForCausalLM) -> None:
    model.lm_head.register_forward_pre_hook(lambda _, given: (given[0].tanh(),))


def replace_loss(model: DCFormerForCausalLM) -> None:
    model.loss_function = lambda logits, labels, **_: logits.square().mean()


@pytest.mark.parametrize("change", [adapt, hook, hook_before, replace_loss])
def test_a_head_or_loss_of_another_kind_is_obeyed(change: Callable[[DCFormerForCausalLM], None]) -> None:
    model = make_model()
    ids = torch.randint(97, (2, 14))
    usual = model(ids, labels=ids).loss
    change(model)
    expected = model(ids, labels=ids).loss
    assert not torch.isclose(usual, expected)
    bare = model(ids, labels=ids, skip_logits=True)
    assert bare.logits is None
    torch.testing.assert_close(bare.loss, expected)


def test_a_head_whose_forward_is_replaced_is_called() -> None:
    model, ids = make_model(), torch.randint(0, 97, (2, 8))
    linear = model.lm_head.forward
    model.lm_head.forward = lambda states: 2 * linear(states)  # type: ignore[method-assign]
    torch.testing.assert_close(model(ids, labels=ids, skip_logits=True).loss, model(ids, labels=ids).loss)
