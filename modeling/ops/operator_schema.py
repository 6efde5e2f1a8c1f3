"""Custom operators: their namespace, and schemas, arguments and gradients of those that take fields of named tuples."""

from collections.abc import Mapping, Sequence
from hashlib import blake2b
from typing import Any, NamedTuple, TypeVar

from torch import Tensor

# Each copy of this code registers operators of its own. A process may hold several copies, because Transformers loads
# the code of each published model beside this package. PyTorch frees an operator when another one is registered under
# its name, and the copy to which it belonged would read freed memory.
COPY = blake2b(__name__.encode(), digest_size=8).hexdigest()
NAMESPACE = "dynattn" if __name__.startswith("dynattn.") else f"dynattn_{COPY}"

Tensors = TypeVar("Tensors", bound=NamedTuple)
Others = TypeVar("Others", bound=NamedTuple)

TYPES: dict[Any, str] = {
    Tensor: "Tensor",
    Tensor | None: "Tensor?",
    float: "float",
    bool: "bool",
    int: "SymInt",
    int | None: "SymInt?",
}


def arguments_of(*tuples: type) -> str:
    """The fields of some `NamedTuple` classes, one after the other, as arguments in a schema of PyTorch."""
    return ", ".join(f"{TYPES[kind]} {name}" for fields in tuples for name, kind in fields.__annotations__.items())


def as_tuples(arguments: Sequence[Any], tensors: type[Tensors], others: type[Others]) -> tuple[Tensors, Others]:
    """The arguments of an operator with the schema `arguments_of(tensors, others)`, as these two tuples."""
    count = len(tensors._fields)
    return tensors(*arguments[:count]), others(*arguments[count:])


def tensors_for(names: Sequence[str]) -> str:
    """One tensor for each name, as results in a schema: the `vmap` behind `is_grads_batched` takes no list of them."""
    return f"({', '.join('Tensor' for _ in names)})"


def results_of(gradients: Mapping[str, Tensor], names: Sequence[str], like: Tensor) -> tuple[Tensor, ...]:
    """The gradients of the arguments `names` in the form of `tensors_for`; empty, in the dtype of `like`, if absent."""
    return tuple(gradients[name] if name in gradients else like.new_empty(0) for name in names)
