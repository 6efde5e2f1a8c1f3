"""The configurations of a plain model and of the one that it is upcycled to."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from huggingface_hub.errors import StrictDataclassError
from transformers import PreTrainedConfig

from dynattn.configuration.composed_config import repeat_layer_types

from ...common.errors import UserError, last_line
from ..common.model_loading import load_config
from .arguments import UpcycleArguments


def read_family(
    folder: Path, raw: dict[str, Any], model_types: Sequence[str], lacking: Mapping[str, str] | None = None
) -> PreTrainedConfig:
    """The configuration in `folder`, whose `config.json` holds `raw` and must be of one of these types.

    Args:
        lacking: what our models have no field for, by the types of others that look convertible.

    Raises:
        UserError: it is of another type.
    """
    found: Any = raw.get("model_type")
    if lacking and found in lacking:
        raise UserError(
            f"{folder} holds a {found!r} model, but ours have no {lacking[found]}; `dynattn convert --help` lists what "
            "can be converted"
        )
    if found not in model_types:
        raise UserError(
            f"{folder} holds a {found!r} model, but only {', '.join(model_types)} can be converted here; "
            "`dynattn convert --help` lists all kinds, and --reverse goes back"
        )
    return load_config(folder)


def make_config(make: Callable[..., PreTrainedConfig], *values: Any, **fields: Any) -> Any:
    """Calls `make`, which gives the configuration of the result.

    Raises:
        UserError: its fields do not fit each other, or one has a value that the result's family lacks.
    """
    try:
        return make(*values, **fields)
    except (StrictDataclassError, ValueError, TypeError) as error:
        what = "the result cannot be what config.json and the options ask for"
        raise UserError(f"{what}: {last_line(error)}") from error


def chosen_fields(arguments: UpcycleArguments, plain: Any) -> dict[str, Any]:
    """The fields in which the result is meant to differ from the plain model.

    Raises:
        UserError: a window without layers that have one, or the other way round.
    """
    fields: dict[str, Any] = {
        "compose_rank": arguments.rank,
        "compose_groups": arguments.groups,
        "compose_pre": arguments.only != "post",
        "compose_post": arguments.only != "pre",
        "compose_static": arguments.static,
        "compose_init_scale": 0.0 if arguments.init == "identity" else 1.0,
        "use_qk_norm": plain.use_qk_norm or arguments.qk_norm,
    }
    if arguments.layer_types is not None:
        if not hasattr(plain, "layer_types"):
            raise UserError(f"--layer-types, but a {plain.model_type} has no windows; leave it out")
        fields["layer_types"] = repeat_layer_types(arguments.layer_types, plain.num_hidden_layers)
    slides = "sliding_attention" in fields.get("layer_types", getattr(plain, "layer_types", ()))
    if slides and not (arguments.sliding_window or plain.sliding_window):
        raise UserError("--layer-types has L, but the model has no window; say how many keys with --sliding-window")
    if arguments.sliding_window is not None:
        if "sliding_window" not in {field.name for field in dataclasses.fields(plain)}:
            windows = "its parent's window" if hasattr(plain, "layer_types") else "no windows"
            raise UserError(f"--sliding-window, but a {plain.model_type} has {windows}; leave it out")
        if not slides:
            raise UserError("--sliding-window, but no layer has one; say which with --layer-types, such as LG")
        fields["sliding_window"] = arguments.sliding_window
    return fields


def starts_as_parent(config: Any, plain: Any) -> bool:
    """Whether a new model of `config` gives the plain model's logits."""
    same = ("layer_types", "sliding_window", "use_qk_norm")
    return config.compose_init_scale == 0 and all(
        getattr(config, name, None) == getattr(plain, name, None) for name in same
    )


def check_parent(arguments: UpcycleArguments, plain: Any) -> None:
    """Raises UserError where ours cannot embed the padding token, or a query-key norm is asked for that is there."""
    pad = getattr(plain, "pad_token_id", None)
    if pad is not None and not 0 <= pad < plain.vocab_size:
        raise UserError(
            f"pad_token_id {pad} is none of the {plain.vocab_size} rows of the embedding; correct it or "
            "set it to null, in config.json"
        )
    if arguments.qk_norm and plain.use_qk_norm:
        raise UserError("--qk-norm, but the model has a query-key norm, which is kept; leave it out")
