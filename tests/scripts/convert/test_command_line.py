"""What every conversion's command line has in common."""

from dataclasses import dataclass, field

import pytest

from dynattn.scripts import convert
from dynattn.scripts.cli import main
from dynattn.scripts.common.arguments import name_words
from dynattn.scripts.common.errors import UserError
from dynattn.scripts.convert.common.arguments import parse_size
from dynattn.scripts.convert.official.arguments import OfficialArguments


def test_sizes_with_units_are_bytes() -> None:
    assert [parse_size(text) for text in ("5GB", "1.5 kb", "2MiB", "300")] == [5 * 10**9, 1500, 2 * 2**20, 300]
    for text in ("5XB", "-1GB", "GB", ""):
        with pytest.raises(UserError, match="is no size"):
            parse_size(text)


@pytest.mark.parametrize(
    "argv",
    [
        ["a", "b", "--reverse", "--dtype", "float16"],
        ["--reverse", "a", "--dtype", "float16", "b"],
        ["--dtype=float16", "--reverse", "a", "b"],
        ["--no-verify", "--overwrite", "a", "--max-shard-size", "5GB", "b"],
    ],
)
def test_folders_may_stand_anywhere(argv: list[str]) -> None:
    named = name_words(argv, OfficialArguments, 2)
    assert named[named.index("--source") + 1] == "a"
    assert named[named.index("--destination") + 1] == "b"
    assert len(named) == len(argv) + 2


def test_a_folder_that_is_given_by_name_leaves_the_other_words_to_the_others() -> None:
    assert name_words(["--source", "a", "b"], OfficialArguments, 2) == ["--source", "a", "--destination", "b"]
    assert name_words(["a", "--destination=b"], OfficialArguments, 2) == ["--source", "a", "--destination=b"]


@dataclass
class Kinds:
    model: str | None = None
    other: str | None = None
    sizes: list[int] = field(default_factory=list)
    output: str | None = None
    fast: bool = False


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("a", "--model a"),
        ("--output o a b", "--output o --model a --other b"),
        ("--output=o a", "--output=o --model a"),
        ("--fast a --no-fast b", "--fast --model a --no-fast --other b"),
        ("a --sizes 1 2 3 --fast b", "--model a --sizes 1 2 3 --fast --other b"),
        ("--fast yes a", "--fast yes --model a"),
        ("--fast FALSE a 1", "--fast FALSE --model a --other 1"),
        ("--fast=1 yes", "--fast=1 --model yes"),
        ("--no-fast yes", "--no-fast --model yes"),
        ("--fast yes on", "--fast yes --model on"),
        ("a run.yaml --fast b", "run.yaml --model a --fast --other b"),
        ("run.yaml a", "run.yaml --model a"),
        ("--output o a run.yml", "run.yml --output o --model a"),
        ("a --output o.yaml", "--model a --output o.yaml"),
        ("--model a b", "--model a --other b"),
        ("a b c", "--model a --other b c"),
        ("--output -5 a", "--output -5 --model a"),
        ("--sizes 1 -2 -.5 --fast a", "--sizes 1 -2 -.5 --fast --model a"),
        ("", ""),
    ],
)
def test_words_go_to_the_first_options(words: str, expected: str) -> None:
    """Options keep their values, a switch takes none but a boolean, and a list all; a file of settings comes first."""
    assert name_words(words.split(), Kinds, 2) == expected.split()


def test_the_command_tells_its_kinds(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["convert"]) == 2
    assert main(["convert", "--help"]) == 0
    assert "official" in capsys.readouterr().out
    assert main(["convert", "gguf"]) == 2
    assert "unknown conversion 'gguf'" in capsys.readouterr().err


def test_a_missing_folder_is_called_as_in_the_usage(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["convert", "llama", "parent"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "--destination is missing: folder to write (DST, the second argument)" in line
    assert main(["convert", "check"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "(A, the first argument)" in line and "(B, the second argument)" in line
    with pytest.raises(SystemExit) as ended:
        main(["convert", "llama", "--help"])
    assert ended.value.code == 0


def test_the_library_names_are_all_there() -> None:
    assert {name for name in convert.__all__ if getattr(convert, name) is None} == set()
    assert set(convert.__all__) <= set(dir(convert))
    with pytest.raises(AttributeError, match="no attribute 'convert_gguf'"):
        _ = convert.convert_gguf
