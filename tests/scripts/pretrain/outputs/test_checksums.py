"""What tells whether a file is the one that was written."""

import zlib
from pathlib import Path

import pytest

from dynattn.scripts.pretrain.outputs import checksums


def test_checksums_are_those_that_earlier_versions_stored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checksums, "CHUNK_BYTES", 4)
    (tmp_path / "file").write_bytes(b"ten bytes.")
    assert checksums.measure_files(tmp_path, [tmp_path / "file"]) == {"file": (10, zlib.crc32(b"ten bytes."))}
