"""What keeps a checkpoint that loads anywhere from losing its code."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

from huggingface_hub.dataclasses import strict
from transformers import PreTrainedConfig


@strict
class PortableConfig(PreTrainedConfig):
    """A configuration whose `save_pretrained` writes the model's code too, if it was loaded from a folder with code.

    Transformers copies the code of remote classes. Where the package is installed its own classes take their place, and
    without this a copy of the checkpoint would name code files (`auto_map`) that it does not have.
    """

    # Set by the front door, which knows the model classes. Remote code has no front door and leaves it to Transformers.
    code_writer: ClassVar[Callable[[PreTrainedConfig, Path], object] | None] = None

    def save_pretrained(self, save_directory: Any, *args: Any, **kwargs: Any) -> None:
        """As in Transformers; with an `auto_map`, the code that it names is written beside `config.json`."""
        writer = type(self).code_writer
        if writer is not None and getattr(self, "auto_map", None):
            writer(self, Path(save_directory))
        super().save_pretrained(save_directory, *args, **kwargs)
