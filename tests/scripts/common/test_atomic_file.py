"""Files that appear as a whole or not at all."""

import json
from pathlib import Path

import pytest

from dynattn.scripts.common.atomic_file import write_json, write_whole


def test_json_is_written_with_its_options_and_leaves_nothing_beside_it(tmp_path: Path):
    write_json(tmp_path / "a.json", {"b": tmp_path, "a": 1}, indent=1, sort_keys=True, default=str)
    assert (tmp_path / "a.json").read_text() == f'{{\n "a": 1,\n "b": {json.dumps(str(tmp_path))}\n}}\n'
    assert [path.name for path in tmp_path.iterdir()] == ["a.json"]


def test_the_old_file_stays_until_the_new_one_is_complete(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    write_whole(tmp_path / "a.txt", "old")

    def fail(self: Path, target: Path) -> Path:
        assert self.read_text() == "new"
        raise OSError

    monkeypatch.setattr(Path, "replace", fail)
    with pytest.raises(OSError):
        write_whole(tmp_path / "a.txt", "new")
    assert (tmp_path / "a.txt").read_text() == "old"
