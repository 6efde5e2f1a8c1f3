"""What tells whether a file is the one that was written."""

import zlib
from pathlib import Path

import pytest

from dynattn.scripts.pretrain.outputs import checkpoint, checksums


def test_checksums_are_those_that_earlier_versions_stored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checksums, "CHUNK_BYTES", 4)
    (tmp_path / "file").write_bytes(b"ten bytes.")
    assert checksums.measure_files(tmp_path, [tmp_path / "file"]) == {"file": (10, zlib.crc32(b"ten bytes."))}


def test_the_checksum_of_a_state_is_that_of_earlier_versions() -> None:
    """Another one would make their checkpoints seem damaged."""
    sorted_json = b'{"files": {"a": 2, "b": 1}, "step": 3}'
    assert checkpoint._state_checksum({"step": 3, "files": {"b": 1, "a": 2}}) == zlib.crc32(sorted_json)
