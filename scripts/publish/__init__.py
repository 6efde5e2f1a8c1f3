"""Publishing as a library: `publish(PublishArguments(checkpoint="runs/tiny"))` does what `dynattn publish` does.

The names are imported when they are first asked for, so that the command's help does not wait for Transformers.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # for type checkers, which do not follow `__getattr__`
    from .arguments import PublishArguments
    from .job import Publication, publish

__all__ = ["Publication", "PublishArguments", "publish"]

_MODULES = {"Publication": ".job", "PublishArguments": ".arguments", "publish": ".job"}


def __getattr__(name: str) -> object:
    """Imports what `name` stands for (PEP 562)."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_MODULES[name], __name__), name)
