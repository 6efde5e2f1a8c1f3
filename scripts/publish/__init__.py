"""Publishing as a library: `publish(PublishArguments(checkpoint="runs/tiny"))` does what `dynattn publish` does."""

from .arguments import PublishArguments
from .job import Publication, publish

__all__ = ["Publication", "PublishArguments", "publish"]
