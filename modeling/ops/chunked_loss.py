"""The loss of a language modeling head, computed for a chunk of tokens at a time to save the memory of all logits.

For each chunk the forward pass computes the logits, their loss, the gradient of the logits, and from that what the
chunk contributes to the gradients of hidden states, weight and bias. No logits are computed twice: the backward pass
only scales these gradients. `V` is the size of the vocabulary and `N` the number of tokens.
"""

import math
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from .autocast import autocast, without_autocast
from .custom_operators import NAMESPACE
from .dtypes import at_least_float32
from .function_transforms import under_transforms

# Each chunk adds to the whole gradient of the weight, which makes small chunks slow.
CHUNK_TOKENS = 1024
# Labels of this value are no targets, as in Transformers and in `torch.nn.functional.cross_entropy`.
IGNORED = -100


def chunked_causal_loss(
    hidden_states: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    labels: Tensor,
    *,
    num_items_in_batch: Tensor | int | None = None,
    ignore_index: int = IGNORED,
    shift_labels: Tensor | None = None,
    z_loss: float = 0.0,
    **_: Any,
) -> Tensor:
    """Transformers' `ForCausalLMLoss` of the logits `hidden_states @ weight.T + bias`, computed one chunk at a time.

    Logits have the dtype of `hidden_states`, or of autocast. Softmax, sums over tokens and the gradients of weight and
    bias are computed in at least float32. Under `torch.compile` the loss is one node of the graph.

    Args:
        hidden_states: `[B, T, E]`, floating point.
        weight, bias: `[V, E]` and `[V]`.
        labels: `[B, T]`, the same tokens as the input (the shift is done here), `ignore_index` where no loss is wanted.
        num_items_in_batch: divisor of the sum over targets; by default the number of targets. If it is 0, the loss is
            nan and its gradients are zero.
        shift_labels: `[B, T]`, labels that are shifted already; `labels` are then not read.
        z_loss: adds `z_loss * (log Z) ** 2` to each target's loss, where `Z` is the sum of the exponentials of its
            logits (PaLM, arXiv 2204.02311, section 5).

    Returns:
        A scalar `[]` in the dtype of the softmax.

    Raises:
        NotImplementedError: a second derivative is asked for (`create_graph=True`).
    """
    (hidden_states,) = autocast(hidden_states)
    if shift_labels is None:
        shift_labels = F.pad(labels, (0, 1), value=ignore_index)[..., 1:]
    targets = shift_labels.flatten().to(hidden_states.device)
    targets = targets.masked_fill(targets == ignore_index, IGNORED)
    loss_sum = _summed_loss(hidden_states.flatten(0, -2), weight, bias, targets, z_loss)
    count = (targets != IGNORED).sum() if num_items_in_batch is None else num_items_in_batch
    count = torch.as_tensor(count, device=loss_sum.device)
    return (loss_sum / count.where(count != 0, 1)).where(count != 0, math.nan)


def _whole_loss(hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, z_loss: float) -> Tensor:
    """`_summed_loss` with all tokens in one chunk, in PyTorch operators that have derivatives of every order."""
    weight, bias = weight.to(hidden.dtype), None if bias is None else bias.to(hidden.dtype)
    return _chunk_loss(slice(None), hidden, weight, bias, targets, None, z_loss)


@under_transforms(_whole_loss)
def _summed_loss(hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, z_loss: float) -> Tensor:
    """The summed loss `[]` of `hidden` `[N, E]` with `targets` `[N]`."""
    tensors = (hidden, weight, bias)
    needs_grad = [torch.is_grad_enabled() and tensor is not None and tensor.requires_grad for tensor in tensors]
    loss_sum, *_ = _loss_op(*tensors, targets, needs_grad, z_loss)
    return loss_sum


class LossGradients(NamedTuple):
    """Gradients of the summed loss; a tensor without elements stands for one that is not needed."""

    hidden: Tensor  # [N, E]
    weight: Tensor  # [V, E]
    bias: Tensor  # [V]

    @classmethod
    def zeros(cls, hidden: Tensor, weight: Tensor, needs_grad: list[bool]) -> "LossGradients":
        """Zeros for `hidden` `[N, E]` and `weight` `[V, E]`, those of weight and bias in at least float32."""
        shapes = (hidden.shape, weight.shape, weight.shape[:1])
        dtypes = (hidden.dtype, *[at_least_float32(weight.dtype)] * 2)
        given = zip(shapes, dtypes, needs_grad, strict=True)
        return cls(*(hidden.new_zeros(shape if needed else 0, dtype=dtype) for shape, dtype, needed in given))

    def add(self, chunk: slice, grad_logits: Tensor, hidden: Tensor, weight: Tensor) -> None:
        """Adds what a chunk contributes, from the gradient of its logits.

        Args:
            chunk: its tokens.
            grad_logits: `[c, V]`.
            hidden, weight: `[N, E]` and `[V, E]`.
        """
        if self.bias.numel():
            self.bias.add_(grad_logits.sum(0))
        grad_logits = grad_logits.to(hidden.dtype)
        if self.hidden.numel():
            torch.mm(grad_logits, weight, out=self.hidden[chunk])
        if self.weight.numel() and self.weight.dtype == grad_logits.dtype:
            self.weight.addmm_(grad_logits.T, hidden[chunk])
        elif self.weight.numel():
            self.weight.add_(grad_logits.T @ hidden[chunk])


@torch.library.custom_op(f"{NAMESPACE}::chunked_loss", mutates_args=())
def _loss_op(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, needs_grad: list[bool], z_loss: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The summed loss `[]` of `hidden` `[N, E]` with `targets` `[N]`, and the tensors of `LossGradients`."""
    with torch.no_grad(), without_autocast(hidden.device):
        grads = LossGradients.zeros(hidden, weight, needs_grad)
        weight, bias = weight.to(hidden.dtype), None if bias is None else bias.to(hidden.dtype)
        loss_sum = hidden.new_zeros((), dtype=at_least_float32(hidden.dtype))
        for start in range(0, len(hidden), CHUNK_TOKENS):
            chunk = slice(start, start + CHUNK_TOKENS)
            loss_sum += _chunk_loss(chunk, hidden, weight, bias, targets, grads if any(needs_grad) else None, z_loss)
        return loss_sum, *grads


def _chunk_loss(
    chunk: slice,
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    grads: LossGradients | None,
    z_loss: float,
) -> Tensor:
    """The summed loss `[]` of the tokens `hidden[chunk]` `[c, E]`, whose gradients are added to `grads`."""
    dtype, targets = at_least_float32(hidden.dtype), targets[chunk]
    ignored = (targets == IGNORED)[:, None]
    logits = F.linear(hidden[chunk], weight, bias)
    log_probs = F.log_softmax(logits, -1, dtype=dtype)  # [c, V]
    loss_sum = F.nll_loss(log_probs, targets, ignore_index=IGNORED, reduction="sum")
    if z_loss:
        # A log probability is its logit minus log Z. The largest logit is finite, while others can be minus infinity.
        top = logits.argmax(-1, keepdim=True)
        log_z = (logits.gather(-1, top) - log_probs.gather(-1, top)).masked_fill(ignored, 0.0)  # [c, 1]
        loss_sum = loss_sum.add(log_z.square().sum(), alpha=z_loss)
    del logits
    if grads is not None:
        # The gradient of the logits is `probs`, minus 1 at the target. The z-loss adds `2 * z_loss * log_z * probs`,
        # because `probs` is also the gradient of log Z.
        probs = log_probs.exp_()
        if z_loss:
            probs *= 1 + 2 * z_loss * log_z
        probs.scatter_add_(1, targets[:, None].masked_fill(ignored, 0), probs.new_full(ignored.shape, -1.0))
        grads.add(chunk, probs.masked_fill_(ignored, 0.0), hidden, weight)
    return loss_sum


@_loss_op.register_fake
def _(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, needs_grad: list[bool], z_loss: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Empty tensors of the shapes of `_loss_op`: `[]`, `[N, E]`, `[V, E]` and `[V]`."""
    loss_sum = hidden.new_empty((), dtype=at_least_float32(hidden.dtype))
    return loss_sum, *LossGradients.zeros(hidden, weight, needs_grad)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    """Keeps the gradients `[N, E]`, `[V, E]` and `[V]` for the backward pass."""
    ctx.save_for_backward(*output[1:])
    ctx.mark_non_differentiable(*output[1:])
    ctx.dtypes = [None if tensor is None else tensor.dtype for tensor in inputs[: len(LossGradients._fields)]]


def _differentiate(ctx: Any, grad_sum: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
    """The saved gradients times `grad_sum` `[]`, the gradient of the summed loss."""
    if torch.is_grad_enabled():
        raise NotImplementedError("the chunked loss has no second derivatives; take the loss with its logits")
    # With one dimension, because PyTorch rounds a factor without dimensions to the dtype of what it multiplies.
    factor = grad_sum[None]
    given = zip(ctx.saved_tensors, ctx.dtypes, ctx.needs_input_grad, strict=False)
    return *((grad * factor).to(dtype) if needed else None for grad, dtype, needed in given), None, None, None


_loss_op.register_autograd(_differentiate, setup_context=_save)
