"""What every conversion's command line has in common, and that it answers before torch is imported."""

import ast
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path

import pytest

from dynattn.scripts import convert
from dynattn.scripts.cli import main
from dynattn.scripts.common.arguments import name_words
from dynattn.scripts.common.errors import UserError
from dynattn.scripts.convert.common.arguments import parse_size
from dynattn.scripts.convert.main import CONVERSIONS
from dynattn.scripts.convert.official.arguments import OfficialArguments

HEAVY = {"torch", "transformers", "safetensors", "huggingface_hub", "tokenizers", "numpy"}
OURS = "dynattn.scripts.convert"


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


def modules_imported_at_the_top(module: str) -> set[str]:
    """Full names of what a module imports when it is imported itself: not in functions, not for type checkers."""
    spec = find_spec(module)
    assert spec is not None and spec.origin is not None
    package = module if spec.submodule_search_locations else module.rpartition(".")[0]
    found: set[str] = set()
    for node in ast.parse(Path(spec.origin).read_text()).body:
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            parts = package.split(".")
            base = ".".join(parts[: len(parts) - node.level + 1]) if node.level else ""
            name = ".".join(filter(None, (base, node.module)))
            # `from . import main` names a module, `from .main import run` what is in one.
            submodules = (f"{name}.{alias.name}" for alias in node.names)
            found |= {name, *(path for path in submodules if name.startswith(OURS) and exists(path))}
    return found


def exists(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:  # its parent is a module, not a package
        return False


@pytest.mark.parametrize("module", [OURS, f"{OURS}.main", *(module for module, _ in CONVERSIONS.commands.values())])
def test_entry_points_import_nothing_heavy(module: str) -> None:
    seen, waiting = set[str](), {module}
    while waiting:
        name = waiting.pop()
        seen.add(name)
        if name.startswith(OURS):
            waiting |= modules_imported_at_the_top(name) - seen
    assert not {name for name in seen if name.split(".")[0] in HEAVY}
    assert not {name for name in seen if name.startswith(("dynattn.modeling", "dynattn.configuration"))}


def test_the_library_names_are_all_there() -> None:
    assert {name for name in convert.__all__ if getattr(convert, name) is None} == set()
    assert set(convert.__all__) <= set(dir(convert))
    with pytest.raises(AttributeError, match="no attribute 'convert_gguf'"):
        _ = convert.convert_gguf
