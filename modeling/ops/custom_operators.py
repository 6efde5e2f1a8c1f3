"""Custom operators of PyTorch: their namespace, and those of an attention and its backward pass."""

from collections.abc import Callable, Sequence
from hashlib import blake2b
from typing import Any, Generic, NamedTuple, NoReturn, TypeVar

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_in_torch_dispatch_mode
from torch.utils._pytree import tree_map_only
from torch.utils.flop_counter import FlopCounterMode, flop_registry

from .autocast import without_autocast

# Each copy of this code registers operators of its own. A process may hold several copies, because Transformers loads
# the code of each published model beside this package. PyTorch frees an operator when another one is registered under
# its name, and the copy to which it belonged would read freed memory.
COPY = blake2b(__name__.encode(), digest_size=8).hexdigest()
NAMESPACE = "dynattn" if __name__.startswith("dynattn.") else f"dynattn_{COPY}"

Inputs = TypeVar("Inputs", bound=NamedTuple)
Settings = TypeVar("Settings", bound=NamedTuple)

# The types of arguments, and their names in the schema of an operator.
TYPES: dict[Any, str] = {
    Tensor: "Tensor",
    Tensor | None: "Tensor?",
    float: "float",
    bool: "bool",
    int: "SymInt",
    int | None: "SymInt?",
}


def are_operators_observed() -> bool:
    """Whether a compiler, a trace or a mode such as `FlopCounterMode` looks at operators, and would miss other code.

    Where none does, code that needs no gradients may be called by itself. A custom operator takes time in Python, which
    is much of the time of a decoding step.
    """
    return torch.compiler.is_compiling() or torch.jit.is_tracing() or is_in_torch_dispatch_mode()


def count_operations(reference: Callable[..., Any], *arguments: Any) -> int:
    """The operations of `reference`, which `FlopCounterMode` counts for an operator, into which it cannot see.

    Nothing is computed: empty tensors on `meta` replace those among the arguments and in their lists.
    """
    empty = tree_map_only(Tensor, lambda tensor: torch.empty_like(tensor, device="meta"), arguments)
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        reference(*empty)
    return counter.get_total_flops()


class AttentionOperator(Generic[Inputs, Settings]):
    """An attention and its backward pass as two operators, so that autograd and `torch.compile` see one node each.

    Both take the fields of two named tuples as arguments. Only these are saved for the backward pass, and the
    log-sum-exp if there is one.

    Args:
        name: the name of the operator; that of its backward pass ends with `_backward`.
        inputs: the tuple of arguments that are tensors, `query` `[B, H, T, D]` first.
        settings: the tuple of the other arguments.
        attend: takes both tuples and returns the output `[B, T, H, D]`; with `keeps_lse` also the log-sum-exp
            `[B, H, T]`, in float32.
        attend_backward: takes the gradient `[B, T, H, D]` of the output, the log-sum-exp if it is kept, both tuples,
            and those names of `on_demand` whose gradients are needed. Returns gradients by the names of the inputs, in
            their shapes and in any dtype.
        reference: takes both tuples and attends with PyTorch's operators, to all keys, and with tables only where they
            are multiplied. PyTorch's `FlopCounterMode` counts its products for the operators, into which it cannot see.
        differentiable: the inputs that have gradients, if they are not None.
        on_demand: those of them whose gradients `attend_backward` computes only if they are needed.
        keeps_lse: whether `attend` returns the log-sum-exp.

    Attributes:
        forward: the operator.
    """

    def __init__(
        self,
        name: str,
        inputs: type[Inputs],
        settings: type[Settings],
        attend: Callable[..., Any],
        attend_backward: Callable[..., dict[str, Tensor]],
        reference: Callable[[Inputs, Settings], Tensor],
        *,
        differentiable: Sequence[str],
        on_demand: Sequence[str] = (),
        keeps_lse: bool = False,
    ) -> None:
        self.inputs, self.settings, self.keeps_lse = inputs, settings, keeps_lse
        self.attend, self.attend_backward, self.reference = attend, attend_backward, reference
        self.differentiable, self.on_demand = differentiable, on_demand
        types = inputs.__annotations__ | settings.__annotations__
        arguments = ", ".join(f"{TYPES[kind]} {argument}" for argument, kind in types.items())
        lse, output = ("Tensor lse, ", "(Tensor, Tensor)") if keeps_lse else ("", "Tensor")
        # Each gradient is a result by itself: the `vmap` behind `is_grads_batched` takes no list of tensors.
        gradients = ", ".join("Tensor" for _ in differentiable)
        self.forward = torch.library.custom_op(
            f"{NAMESPACE}::{name}", self._forward, mutates_args=(), schema=f"({arguments}) -> {output}"
        )
        self.backward = torch.library.custom_op(
            f"{NAMESPACE}::{name}_backward",
            self._backward,
            mutates_args=(),
            schema=f"(Tensor grad_output, {lse}{arguments}, bool[] wanted) -> ({gradients})",
        )
        self.forward.register_fake(self._empty_output)
        self.backward.register_fake(self._empty_gradients)
        self.forward.register_autograd(self._differentiate, setup_context=self._save)
        self.backward.register_autograd(_refuse_second_derivatives)
        operators = getattr(torch.ops, NAMESPACE)
        flop_registry[getattr(operators, name)] = self._forward_flops
        flop_registry[getattr(operators, f"{name}_backward")] = self._backward_flops

    def _forward(self, query: Tensor, *others: Any) -> Any:
        """What `attend` returns, for a query `[B, H, T, D]`."""
        # Kernels of Triton are launched on the current device.
        with torch.no_grad(), without_autocast(query.device), torch.cuda.device_of(query):
            return self.attend(*self._as_tuples((query, *others)))

    def _backward(self, grad_output: Tensor, *arguments: Any) -> tuple[Tensor, ...]:
        """One gradient for each of `differentiable`, from that of the output, `[B, T, H, D]`."""
        *saved, wanted = arguments
        lse, (inputs, settings) = saved[: self.keeps_lse], self._as_tuples(saved[self.keeps_lse :])
        with torch.no_grad(), without_autocast(grad_output.device), torch.cuda.device_of(grad_output):
            grads = self.attend_backward(grad_output, *lse, inputs, settings, self._names_wanted(wanted))
            given = {name: grad.to(getattr(inputs, name).dtype).contiguous() for name, grad in grads.items()}
        return self._results(given, grad_output)

    def _empty_output(self, query: Tensor, *_: Any) -> Tensor | tuple[Tensor, Tensor]:
        """Results in the shapes of those of `_forward`, for a query `[B, H, T, D]`."""
        batch, heads, queries, width = query.shape
        output = query.new_empty(batch, queries, heads, width)
        if not self.keeps_lse:
            return output
        return output, query.new_empty((batch, heads, queries), dtype=torch.float32)

    def _empty_gradients(self, grad_output: Tensor, *arguments: Any) -> tuple[Tensor, ...]:
        """Results in the shapes and dtypes of those of `_backward`, for a gradient `[B, T, H, D]` of the output."""
        *saved, wanted = arguments
        inputs, _ = self._as_tuples(saved[self.keeps_lse :])
        left_out = {*self.on_demand} - {*self._names_wanted(wanted)}
        given = {name: getattr(inputs, name) for name in self.differentiable if name not in left_out}
        grads = {name: tensor.new_empty(tensor.shape) for name, tensor in given.items() if tensor is not None}
        return self._results(grads, grad_output)

    def _save(self, ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        """Saves all arguments for the backward pass, and the log-sum-exp `[B, H, T]` of the output if there is one."""
        count, lse = len(self.inputs._fields), output[1:] if self.keeps_lse else ()
        ctx.save_for_backward(*lse, *inputs[:count])
        ctx.mark_non_differentiable(*lse)
        ctx.settings = inputs[count:]

    def _differentiate(self, ctx: Any, grad_output: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        """A gradient or None for each argument, from that of the output, `[B, T, H, D]`."""
        names = (*self.inputs._fields, *self.settings._fields)
        needed = dict(zip(names, ctx.needs_input_grad, strict=True))
        wanted = [needed[name] for name in self.on_demand]
        results = self.backward(grad_output, *ctx.saved_tensors, *ctx.settings, wanted)
        grads = dict(zip(self.differentiable, results, strict=True))
        return tuple(grads[name] if needed[name] else None for name in names)

    def _forward_flops(self, *arguments: Any, out_val: Any = None) -> int:
        """Operations of `reference`; those of hidden pairs count, as PyTorch counts them for its own attention."""
        return count_operations(lambda *given: self.reference(*self._as_tuples(given)), *arguments)

    def _backward_flops(self, grad_output: Tensor, *arguments: Any, out_val: Any = None) -> int:
        """Operations of the backward pass of `reference`: each product has two, one for the gradient of each factor."""
        *saved, _ = arguments
        return 2 * self._forward_flops(*saved[self.keeps_lse :])

    def _as_tuples(self, arguments: Sequence[Any]) -> tuple[Inputs, Settings]:
        """The arguments of `forward`, as the two tuples."""
        count = len(self.inputs._fields)
        return self.inputs(*arguments[:count]), self.settings(*arguments[count:])

    def _names_wanted(self, wanted: Sequence[bool]) -> list[str]:
        """The names in `on_demand` for which `wanted` has True."""
        return [name for name, is_wanted in zip(self.on_demand, wanted, strict=True) if is_wanted]

    def _results(self, grads: dict[str, Tensor], like: Tensor) -> tuple[Tensor, ...]:
        """One tensor for each of `differentiable`: its gradient, or an empty one in the dtype of `like`."""
        return tuple(grads[name] if name in grads else like.new_empty(0) for name in self.differentiable)


def _refuse_second_derivatives(ctx: Any, *grads: Any) -> NoReturn:
    """The derivative of a backward pass, which has none; always raises NotImplementedError."""
    raise NotImplementedError(
        "this implementation of attention has no second derivatives; use implementation='eager' "
        "(attn_implementation='eager' in a model), or torch.func"
    )
