"""Replaces attributes of a module for a while."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import ModuleType
from typing import Any


@contextmanager
def override_attributes(module: ModuleType, values: Mapping[str, Any]) -> Iterator[None]:
    """Sets attributes of `module` by name, and restores the original ones at the end."""
    originals = {name: getattr(module, name) for name in values}
    try:
        for name, value in values.items():
            setattr(module, name, value)
        yield
    finally:
        for name, value in originals.items():
            setattr(module, name, value)
