"""Arguments of files and options: values as in YAML 1.2, no key twice, and options like those of Transformers."""

import shlex
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import pytest
from transformers import HfArgumentParser

from dynattn.scripts.common.arguments import command_line, make_parser, name_words, option, parse_arguments
from dynattn.scripts.common.errors import UserError
from dynattn.scripts.common.yaml_files import read_yaml


def read(text: str, folder: Path) -> Any:
    path = folder / "arguments.yaml"
    path.write_text(text)
    return read_yaml(path)


VALUES: dict[str, Any] = {
    "1e-5": 1e-5,
    "-2E+3": -2000.0,
    "1.5": 1.5,
    ".5": 0.5,
    "1.": 1.0,
    "0100": 100,
    "-7": -7,
    "1:30": "1:30",
    "1_000": "1_000",
    "2026-01-02": "2026-01-02",
    "0x1F": "0x1F",
    "1.2.3": "1.2.3",
    "true": True,
    "no": "no",
    "null": None,
    ".inf": float("inf"),
}


@pytest.mark.parametrize("text", VALUES)
def test_values_are_those_of_yaml_1_2(text: str, tmp_path: Path) -> None:
    value = read(f"fields: {{one: {text}}}", tmp_path)["fields"]["one"]
    assert value == VALUES[text] and type(value) is type(VALUES[text])


@pytest.mark.parametrize("text", ["rate: 1\nother: 2\nrate: 3", "mixture:\n  a: {weight: 1}\n  a: {weight: 2}"])
def test_a_key_that_is_given_twice_is_refused(text: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"arguments.yaml is not valid YAML: (rate|a) is given twice"):
        read(text, tmp_path)


def test_what_a_merge_brings_may_be_overridden(tmp_path: Path) -> None:
    assert read("base: &base {a: 1, b: 2}\nmore: {<<: *base, b: 3}", tmp_path)["more"] == {"a": 1, "b": 3}


@dataclass
class Options:
    revision: str | None = None
    rate: float = 0.0
    seeds: list[int] = field(default_factory=list)
    fields: dict[str, Any] | str | None = None


def test_options_read_numbers_as_they_are_spelled(tmp_path: Path) -> None:
    path = tmp_path / "arguments.yaml"
    path.write_text("revision: &one 1.10\nrate: 1e-3\nseeds: [01, 2]\nfields: {one: *one, rate: 1.10}")
    read = parse_arguments(Options, [str(path)], prog="test")
    assert read == Options(revision="1.10", rate=1e-3, seeds=[1, 2], fields={"one": 1.1, "rate": 1.1})


def test_a_file_may_stand_among_the_options(tmp_path: Path) -> None:
    path = tmp_path / "arguments.yaml"
    path.write_text("rate: 1\nrevision: main")
    for argv in ([path, "--rate", "2"], ["--rate", "2", path], ["--rate=2", path, "--seeds", "1"]):
        read = parse_arguments(Options, list(map(str, argv)), prog="test")
        assert (read.rate, read.revision) == (2, "main")


@dataclass
class Folders:
    output: str = "runs"
    text: str | None = None
    files: list[str] = field(default_factory=list)


def test_the_home_folder_is_expanded_where_a_shell_does_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a file, in quotes and behind `=`; otherwise a folder named `~` would be made."""
    monkeypatch.setenv("HOME", "/home/me")
    (file := tmp_path / "run.yaml").write_text("output: ~/run\nfiles: [~/a.txt, b~/c.txt]\n")
    given = parse_arguments(Folders, [str(file), "--text=~5 and ~/"], prog="job")
    assert given == Folders(output="/home/me/run", text="~5 and ~/", files=["/home/me/a.txt", "b~/c.txt"])
    assert parse_arguments(Folders, ["--output=~/run"], prog="job").output == "/home/me/run"


def test_aliases_are_not_multiplied(tmp_path: Path) -> None:
    """Each list stands for ten of the one before: 10^15 elements in all."""
    path = tmp_path / "arguments.yaml"
    lists = "".join(f"  a{i}: &a{i} [{f'*a{i - 1},' * 10}]\n" for i in range(1, 16))
    path.write_text(f"fields:\n  a0: &a0 [1]\n{lists}seeds: *a15\n")
    with pytest.raises(UserError, match="more than 100,000 values"):
        parse_arguments(Options, [str(path)], prog="test")
    path.write_text("seeds: &all [1, *all]")
    with pytest.raises(UserError, match="more than 100,000 values"):
        parse_arguments(Options, [str(path)], prog="test")


def test_options_read_infinities_of_yaml(tmp_path: Path) -> None:
    path = tmp_path / "arguments.yaml"
    path.write_text("rate: -.inf")
    assert parse_arguments(Options, [str(path)], prog="test").rate == -float("inf")


@dataclass
class Arguments:
    steps: int = field(metadata={"help": "how many"})
    rate: float = field(default=0.1, metadata={"help": "how fast"})
    names: list[str] | None = field(default=None, metadata={"help": "which"})


def test_yaml_then_options(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("steps: 3\nrate: 1e-4\nnames: [a, b]\n")
    assert parse_arguments(Arguments, [str(file)], prog="x") == Arguments(3, 1e-4, ["a", "b"])
    assert parse_arguments(Arguments, [str(file), "--steps", "5"], prog="x").steps == 5
    assert parse_arguments(Arguments, ["--steps", "5"], prog="x") == Arguments(5)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("step: 3", r"unknown arguments \['step'\]; did you mean steps\? known are \['names', 'rate', 'steps'\]"),
        ("- 3", "must hold a mapping"),
        ("[]", "must hold a mapping"),
        ("steps: [", "not valid YAML"),
        ("[" * 10_000, "not valid YAML"),
        ("steps: \udcff", "is not UTF-8 text"),
        (None, "cannot read the argument file"),
    ],
    ids=range(7),
)
def test_bad_yaml(tmp_path: Path, text: str | None, message: str) -> None:
    file = tmp_path / "run.yaml"
    if text is not None:
        file.write_text(text, errors="surrogateescape")
    with pytest.raises(UserError, match=message):
        parse_arguments(Arguments, [str(file)], prog="x")


@dataclass
class SeveralKinds:
    rates: list[float] | None = None
    names: list[str] = field(default_factory=list)
    on: str = "cpu"
    switch: bool = True
    precision: Literal["no", "bf16"] = "bf16"
    mapping: dict[str, Any] | str | None = None


def test_values_of_a_file_are_converted_as_those_of_the_command_line(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(
        "rates: [1, 1e-3, '2']\nnames: 7\non: on\nswitch: off\nprecision: no\n"
        "mapping: {on: {2: .1, yes: .5}, other: [true, no]}\n"
    )
    read = parse_arguments(SeveralKinds, [str(file)], prog="x")
    mapping = {"on": {"2": 0.1, "yes": 0.5}, "other": [True, "no"]}
    assert read == SeveralKinds([1.0, 1e-3, 2.0], ["7"], "on", False, "no", mapping)
    assert [type(rate) for rate in read.rates or []] == [float] * 3


@pytest.mark.parametrize("arguments", [Arguments(0), Arguments(5, 1e-4, ["a", "b c"])])
def test_a_command_line_gives_back_the_arguments_it_was_made_of(arguments: Arguments) -> None:
    words = shlex.split(command_line("reproduce x", asdict(arguments)))
    assert words[:3] == ["dynattn", "reproduce", "x"]
    assert parse_arguments(Arguments, words[3:], prog="x") == arguments


def test_a_command_line_names_what_is_switched_on_and_nothing_that_is_not_given() -> None:
    options = {"quick": True, "small": False, "arms": [], "seed": 0, "path": None}
    assert command_line("reproduce x", options) == "dynattn reproduce x --quick --seed 0"


def test_unknown_options() -> None:
    with pytest.raises(UserError, match="unknown options --stride 3; `x --help` lists"):
        parse_arguments(Arguments, ["--steps", "1", "--stride", "3"], prog="x")
    with pytest.raises(UserError, match="unknown options --rat 3; did you mean --rate"):  # not the beginning of --rate
        parse_arguments(Arguments, ["--steps", "1", "--rat", "3"], prog="x")


@dataclass
class Job:
    model: str
    output: str | None = None


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["m", "a b"], "'a b' belongs to no option; did you mean --output 'a b'? `x --help` lists"),
        (["m", "--output", "a", "b"], "b belongs to no option; `x --help` lists"),
    ],
)
def test_a_word_that_no_option_takes_may_be_the_output(words: list[str], message: str) -> None:
    with pytest.raises(UserError) as refused:
        parse_arguments(Job, name_words(words, Job, 1), prog="x")
    assert str(refused.value).startswith(message)


@dataclass
class EveryKind:
    text: str
    number: int = 1
    share: float | None = None
    switched_on: bool = True
    switched_off: bool = False
    choice: Literal["a", "b"] = "a"
    level: Literal[1, 2] | None = None
    sizes: list[int] = field(default_factory=lambda: [1, 2], metadata={"help": "which"})
    names: list[str] | None = None
    mapping: dict[str, int] | str | None = None


def test_options_are_those_of_transformers() -> None:
    usage = "%(prog)s [FILE.yaml] [--option value ...]"
    ours, theirs = make_parser(EveryKind, prog="x"), HfArgumentParser(EveryKind, prog="x", usage=usage)
    assert ours._option_string_actions.keys() == theirs._option_string_actions.keys()
    line = ["--text", "t", "--no-switched-on", "--switched_off", "yes", "--choice", "b", "--level", "2"]
    line += ["--sizes", "3", "4", "--names", "n", "--mapping", "{}"]
    for argv in (line, ["--text=t", "--number", "3", "--switched-on", "0", "--switched-off"]):
        assert vars(ours.parse_args(argv)) == vars(theirs.parse_args(argv))
    for argv in (["--choice", "c"], ["--number", "x"], ["--switched_on", "maybe"], ["--level", "3"], []):
        for parser in (ours, theirs):
            with pytest.raises(SystemExit):
                parser.parse_args(["--text", "t", *argv] if argv else argv)


def test_help_shows_each_option_once_with_its_default_or_that_it_is_required() -> None:
    shown = " ".join(make_parser(Arguments, prog="x").format_help().split())
    assert "--steps STEPS how many (required) --rate RATE how fast (default: 0.1)" in shown
    assert "--names NAMES [NAMES ...] which FILE.yaml" in shown
    shown = " ".join(make_parser(EveryKind, prog="x").format_help().split())
    assert "--switched_on [yes|no] --no_switched_on the opposite of --switched_on --switched_off [yes|no]" in shown
    assert "--sizes SIZES [SIZES ...] which (default: 1 2)" in shown


def test_help_shows_the_default_of_a_switch_as_one_would_type_it() -> None:
    @dataclass
    class Switches:
        on: bool = option(True, "one")
        off: bool = option(False, "another")

    shown = " ".join(make_parser(Switches, prog="x").format_help().split())
    assert "--on [yes|no] one (default: yes)" in shown and "--off [yes|no] another (default: no)" in shown


@dataclass
class SeveralChoices:
    trackers: list[Literal["wandb", "trackio"]] = field(default_factory=list)


def test_an_option_takes_several_of_its_choices(capsys: pytest.CaptureFixture[str]) -> None:
    assert parse_arguments(SeveralChoices, ["--trackers", "wandb", "trackio"], prog="x").trackers == [
        "wandb",
        "trackio",
    ]
    with pytest.raises(SystemExit):
        parse_arguments(SeveralChoices, ["--trackers", "tensorboard"], prog="x")
    assert "choose from" in capsys.readouterr().err
