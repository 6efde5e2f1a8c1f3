"""Options of a run that say which model is trained."""

from dataclasses import dataclass, field
from typing import Any


@dataclass(kw_only=True)
class ModelOptions:
    """Which model is trained, and from which weights."""

    model_type: str | None = field(
        default=None, metadata={"help": "architecture to train from scratch; dcformer when not given"}
    )
    model_size: str | None = field(
        default=None, metadata={"help": "named size of the architecture; tiny when not given and it has sizes"}
    )
    model_config: dict[str, Any] | str | None = field(
        default=None, metadata={"help": "changes to the configuration: a mapping in YAML, JSON on the command line"}
    )
    init_from: str | None = field(
        default=None, metadata={"help": "checkpoint folder or Hub name to continue from, instead of fresh weights"}
    )
    attn_implementation: str | None = field(
        default=None, metadata={"help": "attention implementation; the model's default when not given"}
    )
