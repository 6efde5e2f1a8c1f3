"""Names of folders and revisions that a user may give, and those that nothing can have."""

from pathlib import Path

import pytest

from dynattn.scripts.common.errors import UserError
from dynattn.scripts.common.folder_names import (
    LONGEST_FOLDER_NAME,
    check_revision,
    make_folder,
    may_be_on_the_hub,
    resolve_destination,
    resolve_folder,
)


def test_links_are_followed(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to("folder")
    assert resolve_folder(str(tmp_path / "link" / "inside")) == tmp_path / "folder" / "inside"


@pytest.mark.parametrize("name", ["", "a\0b", "a\nb", "a\u2028b", "a\udcffb", "x" * 300, "x/" * 3000])
def test_names_that_no_folder_has(name: str) -> None:
    with pytest.raises(UserError) as error:
        resolve_folder(name)
    assert len(str(error.value)) < 250
    assert str(error.value).isprintable()


def test_destinations_that_cannot_be_folders_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    longest = "x" * LONGEST_FOLDER_NAME
    assert resolve_destination(f"made/{longest}") == tmp_path / "made" / longest
    (tmp_path / "file").touch()
    for name in (".", "..", "/", longest + "x", "file/inside"):
        with pytest.raises(UserError, match=r"give (another|one)"):
            resolve_destination(name)


def test_folders_that_cannot_be_made_are_told(tmp_path: Path) -> None:
    make_folder(tmp_path / "a" / "b")
    make_folder(tmp_path / "a" / "b")
    (tmp_path / "file").touch()
    for place in (tmp_path / "file", tmp_path / "file" / "inside", tmp_path / ("x" * 300)):
        with pytest.raises(UserError, match="cannot"):
            make_folder(place)


def test_only_names_of_branches_tags_and_commits_are_revisions() -> None:
    for revision in (None, "main", "v1.0", "refs/pr/1", "step3000", "feature#1", "0123456789abcdef"):
        check_revision(revision)
    for revision in ("", "a b", "a\n", "a..b", "../a", "-a", "/a", "a:b", "a\\b", "x" * 300):
        with pytest.raises(UserError, match="is no branch, tag or commit"):
            check_revision(revision)


def test_only_names_without_folders_of_this_machine_may_be_on_the_hub() -> None:
    names = ("gpt2", "EleutherAI/pythia-70m", "/home/me/model", "~/model", "./model", "../model", "runs/a/model", "")
    assert [name for name in names if may_be_on_the_hub(name)] == ["gpt2", "EleutherAI/pythia-70m"]
