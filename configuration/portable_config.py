"""What the configurations of all families share: named sizes, and checkpoints that keep their code."""

from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any, ClassVar, Self

from huggingface_hub.dataclasses import strict
from transformers import PreTrainedConfig

from .field_rules import check_fields


@strict
class PortableConfig(PreTrainedConfig):
    """A configuration whose `save_pretrained` writes the model's code too, if it was loaded from a folder with code.

    Transformers copies the code of remote classes. Where the package is installed its own classes take their place, and
    without this a copy of the checkpoint would name code files (`auto_map`) that it does not have.
    """

    # Set by the installed package, which knows the model classes. In remote code it stays None, and Transformers copies
    # the code files.
    code_writer: ClassVar[Callable[[PreTrainedConfig, Path], object] | None] = None
    sizes: ClassVar[dict[str, dict[str, Any]]] = {}

    def __post_init__(self, **kwargs: Any) -> None:
        # Trainers read `auto_map` of any configuration that Transformers does not have itself.
        kwargs.setdefault("auto_map", {})
        super().__post_init__(**kwargs)

    def validate_fields(self) -> None:
        """Part of the strict validation: every field keeps its own rule. Also called before others are derived."""
        check_fields(self)

    def to_dict(self) -> dict[str, Any]:
        """As in Transformers, without an `auto_map` that names no code."""
        fields = super().to_dict()
        if not fields.get("auto_map"):
            fields.pop("auto_map", None)
        return fields

    @classmethod
    def from_size(cls, name: str, **overrides: Any) -> Self:
        """Returns the configuration of a named size (see `sizes`), with fields overridden by keyword.

        Raises:
            ValueError: the size does not exist.
        """
        if name not in cls.sizes:
            raise ValueError(f"{cls.__name__} has no size {name!r}; choose from {sorted(cls.sizes)}")
        return cls(**deepcopy({**cls.sizes[name], **overrides}))

    def save_pretrained(self, save_directory: Any, *args: Any, **kwargs: Any) -> None:
        """As in Transformers; with an `auto_map`, the code that it names is written beside `config.json`."""
        writer = type(self).code_writer
        if writer is not None and getattr(self, "auto_map", None):
            writer(self, Path(save_directory))
        super().save_pretrained(save_directory, *args, **kwargs)


def default_head_dim(hidden_size: int, num_attention_heads: int) -> int:
    """Returns the width of a head where the heads share the hidden size.

    Raises:
        ValueError: the heads do not divide the hidden size.
    """
    if hidden_size % num_attention_heads:
        raise ValueError(
            f"hidden_size ({hidden_size}) must be a multiple of num_attention_heads ({num_attention_heads}), "
            "or give head_dim"
        )
    return hidden_size // num_attention_heads


def model_size(hidden_size: int, layers: int, heads: int, intermediate_size: int, **fields: Any) -> dict[str, Any]:
    """One entry of `sizes`: the shape, and whatever else differs from the defaults."""
    return {
        "hidden_size": hidden_size,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "intermediate_size": intermediate_size,
        **fields,
    }
