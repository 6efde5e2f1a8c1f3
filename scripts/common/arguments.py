"""Dataclass arguments from a YAML file plus command-line overrides: `dynattn JOB [FILE.yaml] [--name value ...]`.

The options of a dataclass are those that `transformers.HfArgumentParser` makes of it, without importing Transformers.
"""

import dataclasses
from argparse import (
    Action,
    ArgumentDefaultsHelpFormatter,
    ArgumentParser,
    ArgumentTypeError,
    RawDescriptionHelpFormatter,
)
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from shlex import join
from types import NoneType, UnionType
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

import yaml

from .errors import UserError

Arguments = TypeVar("Arguments")

TRUE, FALSE = ("yes", "true", "t", "y", "1"), ("no", "false", "f", "n", "0")


class HelpFormatter(ArgumentDefaultsHelpFormatter, RawDescriptionHelpFormatter):
    """Shows defaults, and descriptions in lines of their own."""


def parse_arguments(
    cls: type[Arguments], argv: Sequence[str], *, prog: str, description: str | None = None
) -> Arguments:
    """Returns an instance of the dataclass `cls`: its defaults, overridden by the YAML file, overridden by the options.

    Raises:
        UserError: the YAML file is missing or malformed, or an argument is named that `cls` does not have.
    """
    argv = list(argv)
    parser = make_parser(cls, prog=prog, description=description)
    if argv and argv[0].endswith((".yaml", ".yml")):
        defaults = read_yaml(argv.pop(0), allowed={field.name for field in dataclasses.fields(cls)})  # type: ignore[arg-type]
        _use_as_defaults(parser, defaults)
    values, unknown = parser.parse_known_args(argv)
    if unknown:
        raise UserError(f"unknown options {' '.join(unknown)}; `{prog} --help` lists the known ones")
    return cls(**vars(values))


def name_first(argv: Sequence[str], option: str) -> list[str]:
    """Lets a first word that is neither an option nor a YAML file be the value of `--option`."""
    named = not argv or argv[0].startswith("-") or argv[0].endswith((".yaml", ".yml"))
    return list(argv) if named else [f"--{option}", *argv]


def name_words(argv: Sequence[str], cls: type[Any], count: int) -> list[str]:
    """Names the words that stand anywhere among the options: they are the first `count` fields of `cls`."""
    fields = dataclasses.fields(cls)
    switches = {field.name for field in fields if field.type is bool}
    names = [f"--{field.name}" for field in fields[:count]]
    rest: list[str] = []
    expects_value = False
    for text in argv:
        if text.startswith("-"):
            name = text.lstrip("-").replace("-", "_").removeprefix("no_")
            expects_value = "=" not in text and name not in switches
        elif not expects_value and names and not text.endswith((".yaml", ".yml")):
            rest.append(names.pop(0))
        else:
            expects_value = False
        rest.append(text)
    return rest


def command_line(job: str, options: Mapping[str, Any]) -> str:
    """The command that runs a job with these options; those that are None, False or empty are left out."""
    words = ["dynattn", *job.split()]
    for name, value in options.items():
        if value is True:
            words.append(f"--{name}")
        elif value is not None and value is not False and value != []:
            words += [f"--{name}", *map(str, value if isinstance(value, list) else [value])]
    return join(words)


def make_parser(cls: type[Any], *, prog: str, description: str | None = None) -> ArgumentParser:
    """Returns a parser with an option for each field of the dataclass `cls`, spelled with `_` or with `-`.

    A field without a default is required. A `bool` may stand without a value, which means true; if it is true by
    default, `--no_NAME` makes it false. A list takes one value or more, a `Literal` one of its own.

    Raises:
        TypeError: a field has a type that no option can have.
    """
    usage = "%(prog)s [FILE.yaml] [--option value ...]"
    parser = ArgumentParser(
        prog=prog,
        description=description,
        usage=usage,
        formatter_class=HelpFormatter,
        allow_abbrev=False,
    )
    hints = get_type_hints(cls)
    for field in dataclasses.fields(cls):
        _add_option(parser, field, hints[field.name])
    return parser


def _add_option(parser: ArgumentParser, field: dataclasses.Field[Any], hint: Any) -> None:
    names = dict.fromkeys([f"--{field.name}", f"--{field.name.replace('_', '-')}"])
    parser.add_argument(*names, **_default_of(field), **_conversion(field, hint), **field.metadata)
    if hint is bool and field.default is True:
        opposites = [f"--no_{field.name}", f"--no-{field.name.replace('_', '-')}"]
        parser.add_argument(*opposites, dest=field.name, action="store_false", default=False, **field.metadata)


def _default_of(field: dataclasses.Field[Any]) -> dict[str, Any]:
    """The default of an option, or that it has none."""
    if field.default is not dataclasses.MISSING:
        return {"default": field.default}
    if field.default_factory is not dataclasses.MISSING:
        return {"default": field.default_factory()}
    return {"required": True}


def _conversion(field: dataclasses.Field[Any], hint: Any) -> dict[str, Any]:
    """How an option reads its values: argparse's `type`, `nargs`, `const` and `choices`."""
    kind = _without_none(field.name, hint)
    if kind is bool:
        return {"type": parse_bool, "nargs": "?", "const": True}
    if get_origin(kind) is list:
        return {**_conversion(field, get_args(kind)[0]), "nargs": "+"}
    if get_origin(kind) is Literal:
        return {"type": _choice_of(get_args(kind)), "choices": get_args(kind)}
    return {"type": kind}


def _without_none(name: str, hint: Any) -> Any:
    """The type `X` of `X | None`; of another union with text, which on the command line can be nothing else, `str`.

    Raises:
        TypeError: a union of several types, none of which is text.
    """
    is_union = get_origin(hint) in (Union, UnionType)
    kinds = [kind for kind in get_args(hint) if kind is not NoneType] if is_union else [hint]
    if len(kinds) > 1 and str not in kinds:
        raise TypeError(f"argument {name} is of type {hint}; an option can be of one type, or of that type and None")
    return kinds[0] if len(kinds) == 1 else str


def _choice_of(choices: Sequence[Any]) -> Callable[[str], Any]:
    """Turns the text of a choice into the choice; argparse refuses what is none."""
    by_text = {str(choice): choice for choice in choices}
    return lambda text: by_text.get(text, text)


def parse_bool(text: str) -> bool:
    """Reads a truth value.

    Raises:
        ArgumentTypeError: the text is none.
    """
    if text.lower() not in (*TRUE, *FALSE):
        raise ArgumentTypeError(f"{text!r} is neither {'/'.join(TRUE)} nor {'/'.join(FALSE)}")
    return text.lower() in TRUE


def read_yaml(path: str | Path, allowed: set[str]) -> dict[str, Any]:
    """Reads a flat mapping whose keys must all be in `allowed`."""
    try:
        content = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"cannot read the argument file {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is not UTF-8 text: {error}") from error
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise UserError(f"{path} is not valid YAML: {error}") from error
    if content is None:  # an empty file
        return {}
    if not isinstance(content, dict):
        raise UserError(f"{path} must hold a mapping of argument names to values, not a {type(content).__name__}")
    if unknown := sorted(map(str, content.keys() - allowed)):
        raise UserError(f"{path} has unknown arguments {unknown}; known are {sorted(allowed)}")
    return content


def _use_as_defaults(parser: ArgumentParser, defaults: dict[str, Any]) -> None:
    for action in parser._actions:
        if action.dest in defaults:
            action.required = False
            action.default = _as_option(action, defaults[action.dest])


def _as_option(action: Action, value: Any) -> Any:
    """The value as the command line would have given it, so that argparse converts and checks it in the same way."""
    if action.nargs == "+" and value is not None:
        return value if isinstance(value, list) else [value]
    is_mapping_as_json = isinstance(value, dict) and action.type is str
    return value if value is None or is_mapping_as_json else str(value)
