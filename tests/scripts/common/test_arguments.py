"""The values of argument files: numbers as YAML 1.2 has them, and no key twice."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from dynattn.scripts.common.arguments import parse_arguments
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
