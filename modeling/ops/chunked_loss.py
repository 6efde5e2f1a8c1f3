"""The loss of a language modeling head without its logits: those of a few tokens at a time, `V` numbers for each.

The gradient of a chunk's logits is known as soon as its loss is. It is multiplied out at once, so that nothing is
computed twice, and all that the backward pass has left to do is to scale the results.
"""

import math
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

# Every chunk reads and writes the whole gradient of the weight, which is too often where chunks are small.
CHUNK_TOKENS = 1024
IGNORED = -100


def chunked_causal_loss(
    hidden_states: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    labels: Tensor,
    *,
    num_items_in_batch: Tensor | int | None = None,
    ignore_index: int = -100,
    shift_labels: Tensor | None = None,
    **_: Any,
) -> Tensor:
    """Transformers' `ForCausalLMLoss` of `hidden_states @ weight.T + bias`, which are never there all at once.

    Logits are taken in the dtype of `hidden_states`, or of autocast; softmax, sums over tokens and the gradients of
    weight and bias in at least float32. Under `torch.compile` it is one node of the graph.

    Args:
        hidden_states: `[B, T, E]`, floating point.
        weight, bias: `[V, E]` and `[V]`.
        labels: `[B, T]`, the same tokens as the input (the shift is done here), `ignore_index` where no loss is wanted.
        num_items_in_batch: what the sum over targets is divided by, their number by default. Of 0 the loss is nan and
            its gradients are zero.
        shift_labels: `[B, T]`, targets that are shifted already; `labels` are then not read.

    Returns:
        A scalar in the dtype of the softmax.

    Raises:
        NotImplementedError: in a backward pass that is to be differentiated again.
    """
    if torch.is_autocast_enabled(hidden_states.device.type):
        hidden_states = hidden_states.to(torch.get_autocast_dtype(hidden_states.device.type))
    if shift_labels is None:
        shift_labels = F.pad(labels, (0, 1), value=ignore_index)[..., 1:]
    targets = shift_labels.flatten().to(hidden_states.device)
    targets = targets.masked_fill(targets == ignore_index, IGNORED)
    tensors = (hidden_states.flatten(0, -2), weight, bias)
    learns = [torch.is_grad_enabled() and tensor is not None and tensor.requires_grad for tensor in tensors]
    nats = _loss_op(*tensors, targets, learns)[0]
    count = (targets != IGNORED).sum() if num_items_in_batch is None else num_items_in_batch
    count = torch.as_tensor(count, device=nats.device)
    return (nats / count.where(count != 0, 1)).where(count != 0, math.nan)


class Gradients(NamedTuple):
    """Those of the summed loss, empty where nothing learns."""

    hidden: Tensor  # [N, E]
    weight: Tensor  # [V, E]
    bias: Tensor  # [V]

    @classmethod
    def zeros(cls, hidden: Tensor, weight: Tensor, learns: list[bool]) -> "Gradients":
        """Those of weight and bias add up over chunks, in at least float32."""
        shapes = (hidden.shape, weight.shape, weight.shape[:1])
        dtypes = (hidden.dtype, *[torch.promote_types(weight.dtype, torch.float32)] * 2)
        given = zip(shapes, dtypes, learns, strict=True)
        return cls(*(hidden.new_zeros(shape if learn else 0, dtype=dtype) for shape, dtype, learn in given))

    def add(self, rows: slice, delta: Tensor, hidden: Tensor, weight: Tensor) -> None:
        """Multiplies out `delta` `[c, V]`, the gradient of the logits of `hidden[rows]`."""
        if self.bias.numel():
            self.bias.add_(delta.sum(0))
        delta = delta.to(hidden.dtype)
        if self.hidden.numel():
            torch.mm(delta, weight, out=self.hidden[rows])
        if self.weight.numel() and self.weight.dtype == delta.dtype:
            self.weight.addmm_(delta.T, hidden[rows])
        elif self.weight.numel():
            self.weight.add_(delta.T @ hidden[rows])


@torch.library.custom_op("dynattn::chunked_loss", mutates_args=())
def _loss_op(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, learns: list[bool]
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The summed loss of `hidden` `[N, E]` and its gradients."""
    with torch.no_grad(), torch.autocast(hidden.device.type, enabled=False):
        grads = Gradients.zeros(hidden, weight, learns)
        matrix, offset = weight.to(hidden.dtype), None if bias is None else bias.to(hidden.dtype)
        nats = hidden.new_zeros((), dtype=torch.promote_types(hidden.dtype, torch.float32))
        for start in range(0, len(hidden), CHUNK_TOKENS):
            rows = slice(start, start + CHUNK_TOKENS)
            nats += _chunk_loss(rows, hidden, matrix, offset, targets, grads if any(learns) else None)
        return nats, *grads


def _chunk_loss(
    rows: slice, hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, grads: Gradients | None
) -> Tensor:
    """The summed loss of some rows, whose gradients are added to `grads`."""
    wide, targets = torch.promote_types(hidden.dtype, torch.float32), targets[rows]
    log_probs = F.log_softmax(F.linear(hidden[rows], weight, bias), -1, dtype=wide)
    nats = F.nll_loss(log_probs, targets, ignore_index=IGNORED, reduction="sum")
    if grads is not None:
        ignored = (targets == IGNORED)[:, None]
        probs = log_probs.exp_()
        probs.scatter_add_(1, targets[:, None].masked_fill(ignored, 0), probs.new_full(ignored.shape, -1.0))
        grads.add(rows, probs.masked_fill_(ignored, 0.0), hidden, weight)
    return nats


@_loss_op.register_fake
def _(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, learns: list[bool]
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    nats = hidden.new_empty((), dtype=torch.promote_types(hidden.dtype, torch.float32))
    return nats, *Gradients.zeros(hidden, weight, learns)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.save_for_backward(*output[1:])
    ctx.mark_non_differentiable(*output[1:])
    ctx.dtypes = [None if tensor is None else tensor.dtype for tensor in inputs[: len(Gradients._fields)]]


def _differentiate(ctx: Any, grad_nats: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
    if torch.is_grad_enabled():
        raise NotImplementedError("the chunked loss has no second derivatives; take the loss with its logits")
    # One dimension and not none, so that the factor is not rounded to the dtype of what it scales.
    factor = grad_nats[None]
    given = zip(ctx.saved_tensors, ctx.dtypes, ctx.needs_input_grad, strict=False)
    return *((grad * factor).to(dtype) if learns else None for grad, dtype, learns in given), None, None


_loss_op.register_autograd(_differentiate, setup_context=_save)
