"""Options of a run about its model: which one is trained, from which weights, and to predict what."""

from dataclasses import dataclass
from typing import Any, Literal

from ...common.arguments import option

# The unit of the loss of each objective.
LOSS_UNITS = {"causal_lm": "nats per token", "masked_lm": "nats per masked token"}


@dataclass(kw_only=True)
class ModelOptions:
    """Which model is trained, from which weights, and to predict what."""

    objective: Literal["causal_lm", "masked_lm"] = option(
        "causal_lm", "what is predicted: causal_lm (the next token) or masked_lm (masked tokens; for encoders)"
    )
    model_type: str | None = option(
        None, "architecture to train from scratch; dcformer by default, dcmodernbert for masked_lm"
    )
    model_size: str | None = option(None, "named size of the architecture; tiny by default, if it has named sizes")
    model_config: dict[str, Any] | str | None = option(
        None, "changes to the configuration: a mapping in YAML, JSON on the command line"
    )
    init_from: str | None = option(None, "checkpoint folder or Hub name to continue from, instead of fresh weights")
    attn_implementation: str | None = option(
        None, "attention implementation; by default the best one for model and device"
    )
