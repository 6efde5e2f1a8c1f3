"""The schemas of custom operators whose arguments are the fields of named tuples."""

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
