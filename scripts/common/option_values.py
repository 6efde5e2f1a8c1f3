"""How options read their values: booleans, mappings, lists, choices and paths."""

import dataclasses
import json
from argparse import ArgumentTypeError
from contextlib import suppress
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin

from .errors import UserError

TRUE, FALSE = ("yes", "true", "on", "t", "y", "1"), ("no", "false", "off", "f", "n", "0")


def conversion_of(field: dataclasses.Field[Any], hint: Any) -> dict[str, Any]:
    """How an option reads its values: argparse's `type`, `nargs`, `const`, `choices` and `metavar`."""
    kind = without_none(field.name, hint)
    if kind is bool:
        return {"type": parse_bool, "nargs": "?", "const": True, "metavar": "yes|no"}
    if get_origin(kind) is list:
        return {**conversion_of(field, get_args(kind)[0]), "nargs": "+"}
    if get_origin(kind) is Literal:
        # Argparse refuses other text, which is returned unchanged.
        by_text = {str(choice): choice for choice in get_args(kind)}
        return {"type": lambda text: by_text.get(text, text), "choices": get_args(kind)}
    return {"type": with_home if kind is str else kind}


def with_home(text: str) -> str:
    """The text of an option, with the user's home folder in the place of a leading `~/`, as a shell would have it.

    Shells expand it neither in quotes nor behind `--output=`, and YAML files never do.
    """
    with suppress(RuntimeError):  # a user without a home
        return str(Path(text).expanduser()) if text.startswith("~/") else text
    return text


def without_none(name: str, hint: Any) -> Any:
    """The type to parse a value as: `X` for `X | None`, and `str` for other unions, such as `str | dict`.

    Raises:
        TypeError: a union of several types, none of which is `str`.
    """
    is_union = get_origin(hint) in (Union, UnionType)
    kinds = [kind for kind in get_args(hint) if kind is not NoneType] if is_union else [hint]
    if len(kinds) > 1 and str not in kinds:
        raise TypeError(f"argument {name} is of type {hint}; an option can be of one type, or of that type and None")
    return kinds[0] if len(kinds) == 1 else str


def parse_bool(text: str) -> bool:
    """Reads a boolean, in upper or lower case.

    Raises:
        ArgumentTypeError: the text is in neither `TRUE` nor `FALSE`.
    """
    if text.lower() not in (*TRUE, *FALSE):
        raise ArgumentTypeError(f"{text!r} is neither {'/'.join(TRUE)} nor {'/'.join(FALSE)}")
    return text.lower() in TRUE


def parse_mapping(name: str, value: dict[str, Any] | str | None) -> dict[str, Any] | None:
    """A mapping: the one that was read from YAML, or the JSON text of the command line parsed.

    Raises:
        UserError: the text is not JSON, or the value is not a mapping or gives a name twice; the message names the
            option `name`.
    """
    try:
        parsed = json.loads(value, object_pairs_hook=_without_copies) if isinstance(value, str) else value
    except (ValueError, RecursionError) as error:  # numbers of too many digits are no JSONDecodeError
        start = str(value)[:60]
        raise UserError(f"{name} {start!r} is not JSON ({error}); write it like '{{\"name\": 64}}'") from error
    if parsed is not None and not isinstance(parsed, dict):
        raise UserError(f"{name} must be a mapping of names to values, not {value!r}")
    return parsed


def _without_copies(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object of JSON, in which a name occurs once, as in YAML; of two values, Python would drop one silently."""
    names = [name for name, _ in pairs]
    if twice := [name for place, name in enumerate(names) if name in names[:place]]:
        raise ValueError(f"{twice[0]} is given twice")
    return dict(pairs)
