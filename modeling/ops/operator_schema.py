"""The schemas of custom operators whose arguments are the fields of named tuples, and the results of their backward."""

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

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


def tensors_for(names: Sequence[str]) -> str:
    """One tensor for each name, as results in a schema: the `vmap` behind `is_grads_batched` takes no list of them."""
    return f"({', '.join('Tensor' for _ in names)})"


def results_of(gradients: Mapping[str, Tensor], names: Sequence[str], like: Tensor) -> tuple[Tensor, ...]:
    """The gradients of the arguments `names` in the form of `tensors_for`; empty, in the dtype of `like`, if absent."""
    return tuple(gradients[name] if name in gradients else like.new_empty(0) for name in names)
