"""Dataclass arguments from a YAML file plus command-line overrides: `dynattn JOB [FILE.yaml] [--name value ...]`.

The options of a dataclass are those that `transformers.HfArgumentParser` makes of it, without importing Transformers.
"""

import dataclasses
import difflib
import math
import re
from argparse import (
    Action,
    ArgumentDefaultsHelpFormatter,
    ArgumentError,
    ArgumentParser,
    RawDescriptionHelpFormatter,
)
from collections.abc import Collection, Iterable, Mapping, Sequence
from copy import copy
from shlex import join
from types import NoneType, UnionType
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

from .errors import UserError
from .option_values import FALSE, TRUE, conversion_of
from .yaml_files import read_yaml

Arguments = TypeVar("Arguments")
Default = TypeVar("Default")

YAML_ENDINGS = (".yaml", ".yml")
EPILOG = """\
FILE.yaml sets options in lines `NAME: VALUE`; options of the command line override it. On the command line, names may
have dashes instead of underscores."""


def option(default: Default, text: str) -> Default:
    """A field of a dataclass of options, with its default and the text that the help shows for it."""
    choice: Any = {"default_factory": default.copy} if isinstance(default, list) else {"default": default}
    return dataclasses.field(**choice, metadata={"help": text})


class HelpFormatter(ArgumentDefaultsHelpFormatter, RawDescriptionHelpFormatter):
    """Shows each option once, with its default or that it is required, and keeps the line breaks of descriptions."""

    def _format_action_invocation(self, action: Action) -> str:
        """Leaves out the spelling with dashes, which would make the help twice as long; `EPILOG` mentions it."""
        shown = copy(action)
        shown.option_strings = [spelling for spelling in action.option_strings if "-" not in spelling[2:]]
        return super()._format_action_invocation(shown)

    def _get_help_string(self, action: Action) -> str | None:
        """The help text of an option; a default of None or [] is not shown, because the text says what it means."""
        if action.required:
            return f"{action.help or ''} (required)"
        if action.default and isinstance(action.default, list):
            return f"{action.help or ''} (default: {' '.join(map(str, action.default))})"  # as one would type it
        if isinstance(action.default, bool) and action.nargs != 0:
            return f"{action.help or ''} (default: {'yes' if action.default else 'no'})"
        has_default = action.nargs != 0 and action.default not in (None, [])
        return super()._get_help_string(action) if has_default else action.help


def parse_arguments(
    cls: type[Arguments],
    argv: Sequence[str],
    *,
    prog: str,
    description: str | None = None,
    words: int = 0,
    common: Mapping[str, Any] | None = None,
    file: bool = True,
) -> Arguments:
    """Returns an instance of the dataclass `cls`: its defaults, overridden by the YAML file, overridden by the options.

    Args:
        words: how many of the first fields may be given as words without their options, see `name_words`.
        common: values by name that override those of the file; options override both.
        file: whether a YAML file may stand among the options, which the help then tells.

    Raises:
        UserError: the YAML file is missing or malformed, an argument is named that `cls` does not have, one without a
            default is missing, or a value of the file or of `common` is not of its argument's type.
        SystemExit: `--help` was given, or an option has a value that is not of its type.
    """
    argv = name_words(argv, cls, words) if file else list(argv)
    parser = make_parser(cls, prog=prog, description=description, file=file)
    if file and argv and argv[0].endswith(YAML_ENDINGS):
        _use_as_defaults(parser, cls, read_yaml(argv[0]), argv.pop(0))
    _use_as_defaults(parser, cls, common or {}, "common")
    _require_given(parser, argv)
    values, unknown = parser.parse_known_args(argv)
    if unknown:
        raise UserError(f"{_unknown(unknown, argv, vars(values))}`{prog} --help` lists all options")
    return cls(**vars(values))


def _unknown(words: Sequence[str], argv: Sequence[str], known: Collection[str]) -> str:
    """For a message about the words of `argv` that no option takes: what they are, and what may have been meant."""
    word = words[0]
    if _is_option(word):
        return f"unknown options {join(words)}; {suggest(_option_name(word), known, '--')}"
    given = {_option_name(text) for text in argv if _is_option(text)}
    hint = f"did you mean {join(['--output', word])}? " if "output" in known and "output" not in given else ""
    return f"{join(words)} belongs to no option; {hint}"


def suggest(word: str, known: Iterable[str], prefix: str = "") -> str:
    """For a message, the known name that `word` is most like; empty if it is like none."""
    near = difflib.get_close_matches(word, list(known), n=1)
    return f"did you mean {prefix}{near[0]}? " if near else ""


def name_words(argv: Sequence[str], cls: type[Any], count: int) -> list[str]:
    """Turns positional words into options, such as `SRC DST` into `--source SRC --destination DST`.

    The words may stand anywhere among the options, but not behind one that takes several values. They become the values
    of the first `count` fields of `cls`, in order. A field that is given as an option is passed over, so that its word
    goes to the next field. A YAML file may stand among the words, and comes first in what is returned. A boolean behind
    a switch, as in `--overwrite yes`, is its value.
    """
    given = {_option_name(text) for text in argv if _is_option(text)}
    names = [f"--{field.name}" for field in dataclasses.fields(cls)[:count] if field.name not in given]
    taken = _numbers_of_values(cls)
    file: list[str] = []
    rest: list[str] = []
    expected = 0.0  # values of the last option that have not come yet

    def is_switch(text: str) -> bool:
        return _is_option(text) and "=" not in text and taken.get(_option_name(text)) == 0

    for before, text in zip(["", *argv], argv, strict=False):
        if _is_option(text):
            expected = 0 if "=" in text else taken.get(_option_name(text).removeprefix("no_"), 1)
        elif expected:
            expected -= 1
        elif is_switch(before) and text.lower() in (*TRUE, *FALSE):
            pass  # its value
        elif text.endswith(YAML_ENDINGS) and not file:
            file.append(text)
            continue
        elif names:
            rest.append(names.pop(0))
        rest.append(text)
    return file + rest


def _numbers_of_values(cls: type[Any]) -> dict[str, float]:
    """How many values each option takes: a switch none, as its value is optional, and a list any number."""
    numbers = {None: 1, "?": 0, "+": math.inf}
    hints = get_type_hints(cls)
    return {
        field.name: numbers[conversion_of(field, hints[field.name]).get("nargs")] for field in dataclasses.fields(cls)
    }


def _is_option(text: str) -> bool:
    """Whether a word of the command line is an option, and not a value such as `-5`."""
    return text.startswith("-") and re.fullmatch(r"-\d+|-\d*\.\d+", text) is None  # as argparse tells them apart


def _option_name(text: str) -> str:
    """The field that an option such as `--max-steps=3` names."""
    return text.partition("=")[0].lstrip("-").replace("-", "_")


def command_line(job: str, options: Mapping[str, Any]) -> str:
    """The command that runs a job with these options; those that are None, False or empty are left out."""
    words = ["dynattn", *job.split()]
    for name, value in options.items():
        if value is True:
            words.append(f"--{name}")
        elif value is not None and value is not False and value != []:
            words += [f"--{name}", *map(str, value if isinstance(value, list) else [value])]
    return join(words)


def make_parser(cls: type[Any], *, prog: str, description: str | None = None, file: bool = True) -> ArgumentParser:
    """Returns a parser with an option for each field of the dataclass `cls`, spelled with `_` or with `-`.

    A field without a default is required. A `bool` may stand without a value, which means true; if it is true by
    default, `--no_NAME` makes it false. A list takes one or more values, a `Literal` one of its members.

    Raises:
        TypeError: a field is a union of several types other than `str`.
    """
    options = dataclasses.fields(cls)
    words = ["%(prog)s", "[FILE.yaml]" if file else "", "[--option value ...]"]
    parser = ArgumentParser(
        prog=prog,
        description=description,
        usage=" ".join(filter(None, words)) if options else "%(prog)s",
        epilog=EPILOG if options and file else None,
        formatter_class=HelpFormatter,
        allow_abbrev=False,
    )
    hints = get_type_hints(cls)
    for field in options:
        _add_option(parser, field, hints[field.name])
    return parser


def _add_option(parser: ArgumentParser, field: dataclasses.Field[Any], hint: Any) -> None:
    names = dict.fromkeys([f"--{field.name}", f"--{field.name.replace('_', '-')}"])
    parser.add_argument(*names, **_default_of(field), **conversion_of(field, hint), **field.metadata)
    if hint is bool and field.default is True:
        opposites = [f"--no_{field.name}", f"--no-{field.name.replace('_', '-')}"]
        opposite = f"the opposite of --{field.name}"
        parser.add_argument(*opposites, dest=field.name, action="store_false", default=False, help=opposite)


def given_options(options: Any) -> list[str]:
    """The names of the options of a dataclass that differ from their defaults; one without a default always does."""
    defaults = {one.name: _default_of(one).get("default", dataclasses.MISSING) for one in dataclasses.fields(options)}
    return [name for name, default in defaults.items() if getattr(options, name) != default]


def _require_given(parser: ArgumentParser, argv: Sequence[str]) -> None:
    """Raises UserError where a required option is missing, unless help is wanted.

    Unlike argparse's own message, this one repeats the option's help, for example that it is the second word.
    """
    given = {_option_name(text) for text in argv if _is_option(text)}
    absent = [action for action in parser._actions if action.required and action.dest not in given]
    if absent and not given & {"h", "help"}:
        missing = "; ".join(f"--{action.dest} is missing: {action.help}" for action in absent)
        raise UserError(f"{missing}; `{parser.prog} --help` lists all options")


def _default_of(field: dataclasses.Field[Any]) -> dict[str, Any]:
    """Argparse's `default` of an option, or `required` for a field without a default."""
    if field.default is not dataclasses.MISSING:
        return {"default": field.default}
    if field.default_factory is not dataclasses.MISSING:
        return {"default": field.default_factory()}
    return {"required": True}


def _use_as_defaults(parser: ArgumentParser, cls: type[Any], values: Mapping[str, Any], source: str) -> None:
    """Makes values by name the defaults of the parser's options, converted and checked as on the command line.

    Raises:
        UserError: a name is not an option, or an option does not take its value. The message begins with `source`.
    """
    hints = get_type_hints(cls)
    known = {field.name for field in dataclasses.fields(cls)}
    if unknown := sorted(values.keys() - known):
        hint = suggest(unknown[0], known)
        raise UserError(f"{source} has unknown arguments {unknown}; {hint}known are {sorted(known)}")
    # `--NAME` and `--no_NAME` share a `dest`. The last entry of a key counts, and in reverse order that is `--NAME`.
    options = {action.dest: action for action in reversed(parser._actions)}
    for name, value in values.items():
        options[name].required = False
        try:
            parser.set_defaults(**{name: _as_option(parser, options[name], hints[name], value)})
        except ArgumentError as error:
            raise UserError(f"{source}: {error}") from error


def _as_option(parser: ArgumentParser, option: Action, hint: Any, value: Any) -> Any:
    """Converts a value as argparse would convert its text; None and mappings stay as they are if `hint` allows them.

    Raises:
        ArgumentError: the option does not take the value.
    """
    kinds = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
    if (value is None and NoneType in kinds) or (isinstance(value, dict) and any(get_origin(k) is dict for k in kinds)):
        return value
    if option.nargs == "+":
        return [_as_item(parser, option, item) for item in (value if isinstance(value, list) else [value])]
    return _as_item(parser, option, value)


def _as_item(parser: ArgumentParser, option: Action, value: Any) -> Any:
    """Converts and checks a single value, or one element of a list, with argparse."""
    if value is None or isinstance(value, dict | list):
        limit = "given, or left out" if value is None else "a single value"
        raise ArgumentError(option, f"{option.dest}={value!r} must be {limit}")
    converted = parser._get_value(option, str(value))
    parser._check_value(option, converted)
    return converted
