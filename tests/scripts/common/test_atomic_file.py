"""Files that appear as a whole or not at all."""

import errno
import json
import os
from pathlib import Path

import pytest

from dynattn.scripts.common.atomic_file import (
    flush,
    partial_path,
    put_in_place,
    without_nan,
    write_json,
    write_whole,
)
from dynattn.scripts.common.atomic_folder import MACHINE, STAGING, check_nothing_else, recover, staged_folder
from dynattn.scripts.common.errors import UserError


def test_json_is_written_with_its_options_and_leaves_nothing_beside_it(tmp_path: Path):
    write_json(tmp_path / "a.json", {"b": tmp_path, "a": 1}, indent=1, sort_keys=True, default=str)
    assert (tmp_path / "a.json").read_text() == f'{{\n "a": 1,\n "b": {json.dumps(str(tmp_path))}\n}}\n'
    assert [path.name for path in tmp_path.iterdir()] == ["a.json"]


def test_a_link_under_the_name_of_the_unfinished_file_is_not_followed(tmp_path: Path):
    (tmp_path / "precious.txt").write_text("precious")
    partial_path(tmp_path / "a.txt").symlink_to("precious.txt")
    write_whole(tmp_path / "a.txt", "new")
    assert (tmp_path / "precious.txt").read_text() == "precious"
    assert (tmp_path / "a.txt").read_text() == "new" and not (tmp_path / "a.txt").is_symlink()


@pytest.mark.parametrize("kind", ["partial", "replaced"])
def test_only_folders_are_taken_for_what_a_killed_process_left(kind: str, tmp_path: Path):
    (tmp_path / "precious").mkdir()
    link, file = (tmp_path / f".out.{kind}-{MACHINE}-{number}" for number in (3_999_998, 3_999_999))
    link.symlink_to("precious")
    file.touch()
    recover(tmp_path / "out")
    assert {path.name for path in tmp_path.iterdir()} == {"precious", link.name, file.name}


def test_an_earlier_folder_returns_if_the_new_one_cannot_take_its_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    destination, replace = tmp_path / "out", Path.replace
    destination.mkdir()
    (destination / "earlier").touch()

    def fail(path: Path, target: Path) -> Path:
        if f".{STAGING}-" in path.name:
            raise OSError(errno.EIO, "the disk is broken")
        return replace(path, target)

    monkeypatch.setattr(Path, "replace", fail)
    with pytest.raises(UserError, match="out: the disk is broken"), staged_folder(destination) as staging:
        (staging / "new").touch()
    assert [path.relative_to(tmp_path).as_posix() for path in sorted(tmp_path.rglob("*"))] == ["out", "out/earlier"]


def test_a_folder_that_was_set_aside_goes_where_the_new_one_is_in_place(tmp_path: Path):
    """The process was killed after the last rename."""
    for name in ("out", f".out.replaced-{MACHINE}-3999999"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").write_text(name)
    recover(tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert (tmp_path / "out" / "file").read_text() == "out"


def test_only_files_that_no_pattern_matches_would_be_lost(tmp_path: Path):
    (tmp_path / "part").mkdir()
    (tmp_path / "part" / "config.json").touch()
    check_nothing_else(tmp_path, ["part/*.json"])
    (tmp_path / "part" / "notes.txt").touch()
    with pytest.raises(UserError, match=r"also holds part/notes\.txt, which would be lost"):
        check_nothing_else(tmp_path, ["part/*.json"])


def test_what_is_no_number_becomes_null():
    assert without_nan({"a": [float("nan"), 1.5, (float("inf"), "NaN")]}) == {"a": [None, 1.5, [None, "NaN"]]}


def test_the_old_file_stays_until_the_new_one_is_complete(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    write_whole(tmp_path / "a.txt", "old")

    def fail(self: Path, target: Path) -> Path:
        assert self.read_text() == "new"
        raise OSError

    monkeypatch.setattr(Path, "replace", fail)
    with pytest.raises(OSError):
        write_whole(tmp_path / "a.txt", "new")
    assert (tmp_path / "a.txt").read_text() == "old"


def test_a_file_that_cannot_be_put_in_place_leaves_nothing_beside_it(tmp_path: Path):
    (tmp_path / "folder").mkdir()
    with pytest.raises(IsADirectoryError):
        write_whole(tmp_path / "folder", "text")
    assert [path.name for path in tmp_path.iterdir()] == ["folder"]


@pytest.fixture
def events(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of what is flushed to the disk, and of what is renamed, in order."""
    seen: list[str] = []
    fsync, rename = os.fsync, Path.replace

    def note_flush(descriptor: int) -> None:
        seen.append(Path(f"/proc/self/fd/{descriptor}").readlink().name)
        fsync(descriptor)

    def note_rename(self: Path, target: Path) -> Path:
        seen.append(f"{self.name} -> {target.name}")
        return rename(self, target)

    monkeypatch.setattr(os, "fsync", note_flush)
    monkeypatch.setattr(Path, "replace", note_rename)
    return seen


def test_content_is_on_disk_before_it_gets_its_name(tmp_path: Path, events: list[str]):
    write_whole(tmp_path / "a.txt", "text")
    assert events == [".a.txt.partial", ".a.txt.partial -> a.txt", tmp_path.name]


def test_all_of_a_folder_is_on_disk_before_it_gets_its_name(tmp_path: Path, events: list[str]):
    (tmp_path / "new" / "deep").mkdir(parents=True)
    (tmp_path / "new" / "deep" / "file").write_text("text")
    (tmp_path / "new" / "link").symlink_to("nowhere")
    put_in_place(tmp_path / "new", tmp_path / "final")
    assert sorted(events[:3]) == ["deep", "file", "new"]
    assert events[3:] == ["new -> final", tmp_path.name]
    events.clear()
    with staged_folder(tmp_path / "staged") as staging:
        (staging / "file").write_text("text")
    assert events == ["file", staging.name, f"{staging.name} -> staged", tmp_path.name]
    events.clear()
    with staged_folder(tmp_path / "staged") as staging:
        (staging / "file").write_text("text")
    aside = staging.name.replace("partial", "replaced")
    assert events == ["file", staging.name, f"staged -> {aside}", f"{staging.name} -> staged", tmp_path.name]


@pytest.mark.parametrize(("number", "is_told"), [(errno.EINVAL, False), (errno.EIO, True), (errno.ENOSPC, True)])
def test_only_file_systems_that_cannot_flush_are_excused(
    number: int, is_told: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    def fail(descriptor: int) -> None:
        raise OSError(number, "no")

    monkeypatch.setattr(os, "fsync", fail)
    if is_told:
        with pytest.raises(OSError):
            flush(tmp_path)
    else:
        flush(tmp_path)
