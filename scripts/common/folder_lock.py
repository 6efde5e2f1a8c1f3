"""A lock on a folder that the operating system releases when its process ends, however that happens."""

import errno
import fcntl
import logging
import os
import socket
import time
from contextlib import suppress
from pathlib import Path
from typing import TextIO
from weakref import WeakSet

from .errors import UserError

logger = logging.getLogger(__name__)

POLL_SECONDS = 0.2
# Errors of `flock` on file systems without locks, such as some network file systems.
NO_LOCKS = (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS, errno.EINVAL)


class FolderLock:
    """An exclusive lock on the folder in which the file `path` lies; the file names the process that holds it.

    As a context manager it takes the lock, and releases it at the end of the block. Processes that are forked meanwhile
    do not hold it.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file: TextIO | None = None
        self._made: list[Path] = []  # folders that `take` had to make, innermost first

    @property
    def is_held(self) -> bool:
        """Whether this object holds the lock."""
        return self._file is not None

    def __enter__(self) -> "FolderLock":
        self.take()
        return self

    def __exit__(self, *error: object) -> None:
        self.release()

    def take(self) -> None:
        """Takes the lock, and makes the folder if it is not there.

        Raises:
            UserError: another process holds the lock; the message names it.
            OSError: the folder cannot be made or written.
        """
        while self._file is None:
            self._made += [folder for folder in self.path.parents if not folder.exists()]
            self.path.parent.mkdir(parents=True, exist_ok=True)
            file = self.path.open("a+", encoding="utf-8")
            self._lock(file)
            # The former holder deletes the file on release. A lock on a deleted file protects nothing, so try again.
            if self._is_named(file):
                self._file = file
                _HELD.add(self)
            else:
                file.close()
        self._file.truncate(0)
        self._file.write(f"process {os.getpid()} on {socket.gethostname()}")
        self._file.flush()

    def wait(self) -> None:
        """Takes the lock as soon as no other process holds it, and logs a warning if it has to wait.

        Raises:
            OSError: the folder cannot be made or written.
        """
        is_told = False
        while self._file is None:
            try:
                self.take()
            except UserError as busy:
                if not is_told:
                    logger.warning("waiting, for %s", busy)
                is_told = True
                time.sleep(POLL_SECONDS)

    def release(self) -> None:
        """Gives the lock back, and deletes its file and the folders that were made for it, if they are empty."""
        if self._file is None:
            return
        with suppress(OSError):
            self.path.unlink()
            for folder in self._made:
                folder.rmdir()
        with suppress(OSError):
            # Closing unlocks only if no forked process has the file open, and one may not have run `_leave_to_parent`.
            fcntl.flock(self._file, fcntl.LOCK_UN)
        self._close()

    def _close(self) -> None:
        """Closes the file, without unlocking it for other processes that have it open."""
        if self._file is not None:
            with suppress(OSError):
                self._file.close()
        self._file = None

    def _lock(self, file: TextIO) -> None:
        """Locks an open file, or closes it and raises UserError with the name of the process that has locked it."""
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in NO_LOCKS:
                logger.warning(
                    "%s has no locks (%s); let no other run use it meanwhile", self.path.parent, error.strerror
                )
                return
            file.seek(0)
            holder = file.read() or "another process"
            file.close()
            if not isinstance(error, BlockingIOError):
                raise
            raise UserError(
                f"output={self.path.parent} is in use by {holder}; wait for it to end, or give another folder"
            ) from None

    def _is_named(self, file: TextIO) -> bool:
        """Whether the path still leads to this open file, and not to none or another."""
        try:
            return os.path.samestat(os.fstat(file.fileno()), self.path.stat())
        except FileNotFoundError:
            return False


# The locks of this process.
_HELD: WeakSet[FolderLock] = WeakSet()


def _leave_to_parent() -> None:
    """Closes, in a process that was forked, the files of its parent's locks.

    A lock lasts until all processes that have the file open close it. The workers of a run that is killed live on for
    seconds, and the same command, given again, would be refused.
    """
    for lock in list(_HELD):
        lock._close()


os.register_at_fork(after_in_child=_leave_to_parent)
