"""The base of all configurations: named sizes, checked fields, and checkpoints that keep their code."""

from collections.abc import Callable
from copy import deepcopy
from dataclasses import fields
from pathlib import Path
from typing import Any, ClassVar, Self

from huggingface_hub.dataclasses import strict
from transformers import PreTrainedConfig
from transformers.utils import logging

from .field_rules import check_fields, describe_misspellings

logger = logging.get_logger(__name__)

# What masks, caches and layers read of any configuration. A family without windows or memories refuses these names:
# Transformers would keep them as attributes, and masks and caches would obey them.
VISIBILITY_FIELDS = ("layer_types", "memory_type", "sliding_window")
# Fields with one entry for each layer.
PER_LAYER_FIELDS = ("layer_types", "no_rope_layers")


@strict
class PortableConfig(PreTrainedConfig):
    """A configuration whose `save_pretrained` also writes the model's code, if it was loaded from a folder with code.

    A checkpoint with code names its files in `auto_map`. Transformers copies those files when it saves a model that it
    loaded from them. Where the package is installed, the model is loaded from the package and not from the files, so
    Transformers copies nothing. Without this class the saved checkpoint would name files that it does not have.
    """

    # Writes the code files of a configuration into a folder. The installed package sets it; in remote code it stays
    # None, because there Transformers copies the files.
    code_writer: ClassVar[Callable[[PreTrainedConfig, Path], object] | None] = None
    # Whether every checkpoint gets its code, also one that was loaded without (see `register_for_auto_class`).
    code_registered: ClassVar[bool] = False
    sizes: ClassVar[dict[str, dict[str, Any]]] = {}
    # Outputs that a Trainer does not collect in evaluation, where a model has them: its cache, by either name.
    keys_to_ignore_at_inference: ClassVar[list[str]] = ["past_key_values", "cache"]

    def __post_init__(self, **kwargs: Any) -> None:
        self.validate_fields()
        self.fill_defaults()
        if foreign := [name for name in VISIBILITY_FIELDS if kwargs.get(name) is not None]:
            raise ValueError(f"{type(self).__name__} has no {foreign}: all layers see the same tokens; leave them out")
        # Trainers read `auto_map` of every configuration whose class is not part of Transformers.
        kwargs.setdefault("auto_map", {})
        for message in describe_misspellings(self, kwargs):
            logger.warning_once(message)
        super().__post_init__(**kwargs)

    def validate_fields(self) -> None:
        """Part of the strict validation: every field keeps the rule of its name.

        It is also called before fields are derived from others, so that a wrong value raises the error of its own rule
        and not one from the derivation.
        """
        check_fields(self)

    def fill_defaults(self) -> None:
        """Sets the fields that were left out and follow from others; here none."""

    def to_dict(self) -> dict[str, Any]:
        """The fields as Transformers writes them, without `auto_map` if it is empty."""
        content = super().to_dict()
        if not content.get("auto_map"):
            content.pop("auto_map", None)
        return content

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> Any:
        """As in Transformers, but fields that are given by keyword are checked as those of the dictionary are.

        Transformers sets them on the finished configuration, after its checks. With fewer `num_hidden_layers` than the
        dictionary has, the first entries of its `PER_LAYER_FIELDS` are kept.
        """
        own = {name: kwargs.pop(name) for name in list(kwargs) if name in cls._own_names()}
        if "num_hidden_layers" in own:
            lists = {name: config_dict[name] for name in PER_LAYER_FIELDS if isinstance(config_dict.get(name), list)}
            own = {name: values[: own["num_hidden_layers"]] for name, values in lists.items()} | own
        return super().from_dict({**config_dict, **own}, **kwargs)

    @classmethod
    def _own_names(cls) -> set[str]:
        """The fields that a family adds to those of every configuration, and its `VISIBILITY_FIELDS`, if properties."""
        names = {field.name for field in fields(cls)} - {field.name for field in fields(PreTrainedConfig)}
        return names | {name for name in VISIBILITY_FIELDS if hasattr(cls, name)}

    @classmethod
    def from_size(cls, name: str, **overrides: Any) -> Self:
        """Returns the configuration of a size that the model card lists (`sizes`), with fields overridden by keyword.

        Raises:
            ValueError: the size does not exist.
        """
        if name not in cls.sizes:
            raise ValueError(f"{cls.__name__} has no size {name!r}; choose from {sorted(cls.sizes)}")
        return cls(**deepcopy({**cls.sizes[name], **overrides}))

    @classmethod
    def register_for_auto_class(cls, auto_class: str = "AutoConfig") -> None:
        """As in Transformers: checkpoints are saved with their code; that of the installed package is written as above.

        Transformers would copy the file of the class and look for all that it imports in the same folder.
        """
        if writes_its_code(cls):
            cls.code_registered = True
        else:
            super().register_for_auto_class(auto_class)

    def save_pretrained(self, save_directory: Any, *args: Any, **kwargs: Any) -> None:
        """As in Transformers; with an `auto_map`, the code that it names is written beside `config.json`."""
        writer = type(self).code_writer
        if writer is not None and (type(self).code_registered or getattr(self, "auto_map", None)):
            writer(self, Path(save_directory))
        super().save_pretrained(save_directory, *args, **kwargs)


def writes_its_code(cls: type) -> bool:
    """Whether `cls` is of the installed package, which writes its code, and no remote code or somebody's variant."""
    root, of_package = (one.__module__.partition(".")[0] for one in (cls, PortableConfig))
    return PortableConfig.code_writer is not None and root == of_package


def default_head_dim(hidden_size: int, num_attention_heads: int) -> int:
    """Returns the width of a head when the heads divide the hidden size among them.

    Raises:
        ValueError: the number of heads does not divide the hidden size.
    """
    if hidden_size % num_attention_heads:
        raise ValueError(
            f"hidden_size ({hidden_size}) must be a multiple of num_attention_heads ({num_attention_heads}), "
            "or give head_dim"
        )
    return hidden_size // num_attention_heads


def model_size(hidden_size: int, layers: int, heads: int, intermediate_size: int, **fields: Any) -> dict[str, Any]:
    """One entry of `sizes`: the shape of a model, and the `fields` that differ from their defaults."""
    return {
        "hidden_size": hidden_size,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "intermediate_size": intermediate_size,
        **fields,
    }
