"""A lock that one process at a time holds, and that ends with its process."""

import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from dynattn.scripts.common import folder_lock
from dynattn.scripts.common.errors import UserError
from dynattn.scripts.common.folder_lock import FolderLock

HOLD = """
import sys
from pathlib import Path
from dynattn.scripts.common.folder_lock import FolderLock
lock = FolderLock(Path(sys.argv[1]))
lock.take()
print("taken", flush=True)
sys.stdin.read()
"""

# The child reads to the end of the test, too.
HOLD_AND_FORK = HOLD.replace(
    'print("taken", flush=True)',
    "import os\nif os.fork() == 0: print('in the child:', lock.is_held, flush=True)",
)


@contextmanager
def holding(script: str, path: Path) -> Iterator[subprocess.Popen[str]]:
    """A process that runs `script` with the path of a lock, until the end of the block."""
    command = [sys.executable, "-c", script, str(path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        yield process
        process.kill()


def test_the_holder_is_named_and_nothing_is_left_at_the_end(tmp_path: Path):
    first, second = (FolderLock(tmp_path / "runs" / "run" / ".lock") for _ in range(2))
    first.take()
    with pytest.raises(UserError, match=f"in use by process {os.getpid()} on {socket.gethostname()}; wait for it"):
        second.take()
    assert (first.is_held, second.is_held) == (True, False)
    second.release()
    first.release()
    assert not list(tmp_path.iterdir())
    second.take()
    (tmp_path / "runs" / "run" / "kept").touch()
    second.release()
    assert [path.name for path in (tmp_path / "runs" / "run").iterdir()] == ["kept"]


def test_who_waits_gets_the_lock_when_it_is_released(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    first, second = (FolderLock(tmp_path / ".lock") for _ in range(2))
    first.take()
    waiting = threading.Thread(target=second.wait)
    waiting.start()
    waiting.join(2 * folder_lock.POLL_SECONDS)
    assert (waiting.is_alive(), second.is_held) == (True, False)
    first.release()
    waiting.join(60)
    assert second.is_held
    assert caplog.text.count(f"waiting, for output={tmp_path} is in use by process {os.getpid()}") == 1
    second.release()


def test_a_killed_process_holds_nothing(tmp_path: Path):
    path = tmp_path / ".lock"
    with holding(HOLD, path) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "taken\n"
        with pytest.raises(UserError, match=f"in use by process {process.pid} on"):
            FolderLock(path).take()
    lock = FolderLock(path)
    lock.take()
    assert str(os.getpid()) in path.read_text()
    lock.release()


def test_a_forked_process_neither_holds_nor_keeps_the_lock_of_its_parent(tmp_path: Path):
    """As the workers of a data loader, which live on for seconds when their run is killed."""
    path = tmp_path / ".lock"
    with holding(HOLD_AND_FORK, path) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "in the child: False\n"
        with pytest.raises(UserError, match=f"in use by process {process.pid} on"):
            FolderLock(path).take()
        process.kill()
        process.wait()
        lock = FolderLock(path)
        lock.take()  # while the child is there
        lock.release()


def test_a_file_system_without_locks_is_used_with_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    def refuse(file: object, operation: int) -> None:
        raise OSError(folder_lock.NO_LOCKS[0], "No locks available")

    monkeypatch.setattr(folder_lock.fcntl, "flock", refuse)
    lock = FolderLock(tmp_path / ".lock")
    lock.take()
    assert "has no locks (No locks available)" in caplog.text
    lock.release()
    assert not lock.path.exists()
