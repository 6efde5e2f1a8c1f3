"""Dataclass arguments from a YAML file plus command-line overrides: `dynattn JOB [FILE.yaml] [--name value ...]`."""

import dataclasses
from argparse import Action
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar

import yaml
from transformers import HfArgumentParser

from .errors import UserError

Arguments = TypeVar("Arguments")


def parse_arguments(
    cls: type[Arguments], argv: Sequence[str], *, prog: str, description: str | None = None
) -> Arguments:
    """Returns an instance of the dataclass `cls`: its defaults, overridden by the YAML file, overridden by the options.

    Raises:
        UserError: the YAML file is missing or malformed, or an argument is named that `cls` does not have.
    """
    argv = list(argv)
    usage = "%(prog)s [FILE.yaml] [--option value ...]"
    parser = HfArgumentParser(cls, prog=prog, description=description, usage=usage)  # type: ignore[arg-type]
    if argv and argv[0].endswith((".yaml", ".yml")):
        defaults = read_yaml(argv.pop(0), allowed={field.name for field in dataclasses.fields(cls)})  # type: ignore[arg-type]
        _use_as_defaults(parser, defaults)
    arguments, *unknown = parser.parse_args_into_dataclasses(
        args=argv, look_for_args_file=False, return_remaining_strings=True
    )
    if unknown[-1]:
        raise UserError(f"unknown options {' '.join(unknown[-1])}; `{prog} --help` lists the known ones")
    return arguments


def read_yaml(path: str | Path, allowed: set[str]) -> dict[str, Any]:
    """Reads a flat mapping whose keys must all be in `allowed`."""
    try:
        content = yaml.safe_load(Path(path).read_text(encoding="utf-8")) or {}
    except OSError as error:
        raise UserError(f"cannot read the argument file {path}: {error.strerror}") from error
    except yaml.YAMLError as error:
        raise UserError(f"{path} is not valid YAML: {error}") from error
    if not isinstance(content, dict):
        raise UserError(f"{path} must hold a mapping of argument names to values, not a {type(content).__name__}")
    if unknown := sorted(set(content) - allowed):
        raise UserError(f"{path} has unknown arguments {unknown}; known are {sorted(allowed)}")
    return content


def _use_as_defaults(parser: HfArgumentParser, defaults: dict[str, Any]) -> None:
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
