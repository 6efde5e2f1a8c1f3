"""Publishing as a library: `publish(PublishArguments(checkpoint="runs/tiny"))` does what `dynattn publish` does.

The names are imported when they are first asked for, so that the command's help does not wait for Transformers.
"""

from typing import TYPE_CHECKING

from ..common.lazy_names import lazy_names

if TYPE_CHECKING:  # for type checkers, which do not follow `__getattr__`
    from .arguments import PublishArguments
    from .job import Publication, publish

__all__ = ["Publication", "PublishArguments", "publish"]

__getattr__ = lazy_names(__name__, {"Publication": "job", "PublishArguments": "arguments", "publish": "job"})
