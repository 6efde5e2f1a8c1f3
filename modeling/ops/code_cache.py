"""The folder in which compiled code is kept, and which of its files are safe to run.

A library there is code that this process will run. So it is loaded only if nobody but the user can have written it, and
only if it is complete: its file name holds the checksum of its contents.
"""

import atexit
import functools
import hashlib
import os
import shutil
import stat
import tempfile
import time
from contextlib import suppress
from pathlib import Path

# Temporary folders in the cache that are older belong to compilations that were killed.
ABANDONED_SECONDS = 24 * 60 * 60


def is_intact(path: Path) -> bool:
    """Whether only the user can have written a file, and its contents have the checksum in its name."""
    try:
        return _is_private(path) and path.stem.endswith(checksum(path))
    except OSError:  # another process has just removed it
        return False


def checksum(path: Path) -> str:
    """What the file name of a library has to end with."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _is_private(path: Path) -> bool:
    """Whether a file or folder, which must not be a link, belongs to this user and nobody else can write to it."""
    status = path.lstat()
    is_link, others_write = stat.S_ISLNK(status.st_mode), status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    return not is_link and status.st_uid == os.geteuid() and not others_write


def code_folder() -> Path:
    """The user's cache, a folder of the user among the temporary files, or a new temporary folder.

    It is the first of them that is safe and takes code. Where there is no home to write to, the second spares each
    process from compiling again. A relative path in `XDG_CACHE_HOME` is ignored, as the XDG specification wants: each
    working directory would get a cache.
    """
    if not hasattr(os, "geteuid"):
        raise OSError("C code is not compiled on Windows; in WSL it is")
    given = Path(os.environ.get("XDG_CACHE_HOME", ""))
    root = given if given.is_absolute() else Path("~/.cache")
    for place in (root / "dynattn", Path(tempfile.gettempdir()) / f"dynattn-{os.geteuid()}"):
        try:
            folder = place.expanduser()
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            if _is_private(folder) and _takes_code(folder) and not _can_be_replaced(folder):
                return folder
        except (OSError, RuntimeError):  # `expanduser` raises RuntimeError for a user without a home
            continue
    return _temporary_folder(os.getpid())


def _takes_code(folder: Path) -> bool:
    """Whether this process can write to a folder and load code from there, as far as the system tells."""
    forbids_code = os.statvfs(folder).f_flag & getattr(os, "ST_NOEXEC", 0)  # only Linux tells
    return os.access(folder, os.W_OK | os.X_OK) and not forbids_code


def _can_be_replaced(folder: Path) -> bool:
    """Whether any user could replace the folder by renaming it or a folder that it is in.

    That takes write access to the folder above; with the sticky bit, only the owner of a folder may rename it. The
    owners of the folders above, and groups that may write to them, are trusted.
    """
    modes = (parent.stat().st_mode for parent in folder.resolve().parents)
    return any(mode & stat.S_IWOTH and not mode & stat.S_ISVTX for mode in modes)


@functools.cache
def _temporary_folder(process: int) -> Path:
    """One folder for a whole process, removed at its end."""
    folder = Path(tempfile.mkdtemp(prefix="dynattn-"))
    atexit.register(_remove, folder, process)
    return folder


def _remove(folder: Path, process: int) -> None:
    """Removes the folder if this process made it; processes that are forked from that one must not."""
    if os.getpid() == process:
        shutil.rmtree(folder, ignore_errors=True)


def remove_abandoned(folder: Path) -> None:
    """Removes the temporary folders that killed compilations have left in `folder`."""
    for path in folder.glob(f"{tempfile.gettempprefix()}*"):
        with suppress(OSError):  # another process has just removed it
            if time.time() - path.stat().st_mtime > ABANDONED_SECONDS:
                shutil.rmtree(path)
