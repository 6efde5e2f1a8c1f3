"""Loads the checkpoints that the arguments name."""

from collections.abc import Callable, Mapping
from typing import Any

from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from ..common.checkpoint_loading import check_pair, load_checkpoint
from ..common.errors import UserError
from .arguments import EvaluateArguments


def load_named(
    name: str,
    arguments: EvaluateArguments,
    config_changes: Callable[[PreTrainedConfig], Mapping[str, Any]] | None = None,
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Loads a checkpoint and its tokenizer as the arguments ask for; see `load_checkpoint` for `config_changes`.

    Raises:
        UserError: either cannot be loaded, or they do not fit together, or the model has another dtype.
    """
    model, tokenizer = load_checkpoint(
        name,
        tokenizer=arguments.tokenizer,
        dtype=arguments.dtype,
        device=arguments.device,
        trust_remote_code=arguments.trust_remote_code,
        config_changes=config_changes,
    )
    check_dtype(name, model, arguments.dtype)
    check_pair(model, tokenizer)
    return model, tokenizer


def check_dtype(name: str, model: PreTrainedModel, asked: str) -> None:
    """Raises UserError if Transformers has loaded quantized weights in another dtype than was `asked` for."""
    loaded = str(model.dtype).removeprefix("torch.")
    if asked not in ("auto", loaded) and getattr(model.config, "quantization_config", None) is not None:
        raise UserError(
            f"{name} has quantized weights, with which Transformers computes in {loaded} whatever dtype is asked for; "
            "leave --dtype out"
        )
