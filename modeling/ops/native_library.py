"""Shared libraries of C code that are compiled once on the machine where they run, and kept in the user's cache.

A library in the cache is code that this process will run. So it is loaded only if nobody but the user can have written
it, and only if it is complete: its file name holds the checksum of its contents.
"""

import atexit
import ctypes
import functools
import hashlib
import os
import platform
import shlex
import shutil
import signal
import stat
import subprocess
import tempfile
import time
import warnings
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

# For each CPU capability that PyTorch reports: the compiler's flags, and the float32 elements in a vector register.
CAPABILITIES = {
    "AVX512": (("-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mfma", "-mprefer-vector-width=512"), 16),
    "AVX2": (("-mavx2", "-mfma"), 8),
}
# Further flags, by PyTorch's name for the capability that a processor needs for them. Old compilers do not know them.
NEWER_FLAGS = {"avx512_bf16": "-mavx512bf16"}
# Options for tensors that C code reads or writes, whatever the default dtype and device of PyTorch are.
C_FLOATS: dict[str, Any] = {"dtype": torch.float32, "device": "cpu"}
# A compiler that runs longer than this hangs, and is stopped.
COMPILER_SECONDS = 120
# Temporary folders in the cache that are older belong to compilations that were killed.
ABANDONED_SECONDS = 24 * 60 * 60
# Functions of a library by name, each with the types of its arguments and of its result, as `ctypes` has them.
Signatures = Mapping[str, tuple[Sequence[Any], Any]]
FLAGS = ("-std=gnu11", "-O3", "-funroll-loops", "-fno-math-errno", "-fno-trapping-math", "-fPIC")


def lanes() -> int:
    """Returns how many float32 elements a vector register of this processor holds."""
    return _capability()[1]


def _capability() -> tuple[tuple[str, ...], int]:
    return CAPABILITIES.get(torch.backends.cpu.get_cpu_capability(), ((), 4))


def _newer_flags() -> tuple[str, ...]:
    """The flags of `NEWER_FLAGS` whose capabilities this processor has, if PyTorch uses its AVX512."""
    has = getattr(torch.cpu, "get_capabilities", dict[str, bool])()
    return tuple(flag for name, flag in NEWER_FLAGS.items() if has.get(name) and lanes() == 16)


def usable_threads() -> int:
    """Returns how many threads C code may use: as many as PyTorch, but one in a forked process.

    OpenMP's threads do not survive a fork, but its records of them do: a forked process would wait for them forever.
    """
    return 1 if os.getpid() != _PROCESS else torch.get_num_threads()


# The process that has imported this module; a forked one has another number. Where PyTorch has used threads before a
# fork and this module is imported after it, PyTorch's own operators wait forever too, so nothing is lost.
_PROCESS = os.getpid()


def find_compiler() -> tuple[str, ...] | None:
    """Returns the command of a C compiler, a path and perhaps arguments, or None if there is no compiler.

    It is that of the environment variable `CC`, such as `ccache gcc`; else cc, gcc or clang. Warns if `CC` names no
    program.
    """
    named = os.environ.get("CC", "")
    commands = [_command(text) for text in (named, "cc", "gcc", "clang")]
    found = next((command for command in commands if command is not None), None)
    if named and commands[0] is None:
        used = "there is no other C compiler" if found is None else f"{found[0]} is used instead"
        warnings.warn(f"CC={named!r} names no program; {used}", stacklevel=2)
    return found


def _command(text: str) -> tuple[str, ...] | None:
    """The words of a shell command, with the path of its program; None if there is no such program."""
    with suppress(ValueError):  # there are no words, or a quotation does not end
        program, *arguments = shlex.split(text)
        path = shutil.which(program)
        return None if path is None else (path, *arguments)
    return None


def load_or_warn(source: str, macros: tuple[tuple[str, int], ...], signatures: Signatures) -> ctypes.CDLL | None:
    """Returns `load_library(source, macros)`, or None if that fails or the library lacks one of these functions.

    The first failure warns, and from then on the process loads and compiles nothing more, because a compiler that fails
    or hangs once will do so again.

    Args:
        signatures: the functions; their types are set, so that they can be called with Python's numbers.
    """
    if _failures:
        return None
    try:
        library = load_library(source, macros)
        for name, (arguments, result) in signatures.items():
            function = getattr(library, name)
            function.argtypes, function.restype = arguments, result
    except Exception as error:  # a compiler and its results can fail in any way, and there is an answer without them
        _failures.append(str(error))
        warnings.warn(f"attention on this CPU is several times slower than it could be: {error}", stacklevel=2)
        return None
    return library


# What has failed in this process: at most one message.
_failures: list[str] = []


@functools.cache
def load_library(source: str, macros: tuple[tuple[str, int], ...]) -> ctypes.CDLL:
    """Returns the library compiled from `source`, from the cache if this machine has compiled the same before.

    If there is no compiler any more, a library of any earlier compiler in the cache serves. The library is not linked
    to an OpenMP runtime: threads.h uses that of PyTorch, which is loaded already.

    Args:
        source: text of one C file without local includes.
        macros: names and values that the compiler defines.

    Raises:
        OSError: there is no compiler, it fails or takes longer than `COMPILER_SECONDS`, or its result cannot be loaded.
    """
    options = (*FLAGS, *_capability()[0], *(f"-D{name}={value}" for name, value in macros))
    newer = _newer_flags()
    if newer:
        try:
            return _load((*options, *newer), source)
        except TimeoutError:
            raise
        except OSError:  # the compiler does not know these flags, or would fail without them too
            pass
    return _load(options, source)


def _load(options: tuple[str, ...], source: str) -> ctypes.CDLL:
    """Loads the library that is cached for `source` and `options`, after compiling it if there is none."""
    compiler, folder = find_compiler(), _cache_folder()
    key = _hash("\n".join((platform.machine(), source, *options)))
    made_by = key if compiler is None else f"{key}-{_hash(' '.join(compiler))}"
    for path in folder.glob(f"{made_by}-*.so"):
        if not _is_intact(path):
            path.unlink(missing_ok=True)
            continue
        with suppress(OSError):  # as of a file from another machine, if they share a home
            return ctypes.CDLL(str(path))
    if compiler is None:
        raise OSError("no C compiler: install gcc or clang, or set CC to one")
    return ctypes.CDLL(str(_compile(compiler, options, source, folder, made_by)))


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:24]


def _is_intact(path: Path) -> bool:
    """Whether only the user can have written a file, and its contents have the checksum in its name."""
    try:
        return _is_private(path) and path.stem.endswith(_checksum(path))
    except OSError:  # another process has just removed it
        return False


def _checksum(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _is_private(path: Path) -> bool:
    """Whether a file or folder, which must not be a link, belongs to this user and nobody else can write to it."""
    status = path.lstat()
    is_link, others_write = stat.S_ISLNK(status.st_mode), status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    return not is_link and status.st_uid == os.geteuid() and not others_write


def _cache_folder() -> Path:
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


def _compile(compiler: tuple[str, ...], options: tuple[str, ...], source: str, folder: Path, name: str) -> Path:
    """Compiles in a temporary folder and then moves the library into `folder`, so that no process loads half of one."""
    _remove_abandoned(folder)
    with tempfile.TemporaryDirectory(dir=folder, ignore_cleanup_errors=True) as temporary:
        compiled, linked = Path(temporary) / "code.o", Path(temporary) / "library.so"
        _call((*compiler, *options, "-x", "c", "-c", "-", "-o", str(compiled)), source)
        _call((*compiler, "-shared", str(compiled), "-o", str(linked), "-lm"), "")
        linked.chmod(0o700)
        return linked.rename(folder / f"{name}-{_checksum(linked)}.so")


def _remove_abandoned(folder: Path) -> None:
    """Removes the temporary folders that killed compilations have left in `folder`."""
    for path in folder.glob(f"{tempfile.gettempprefix()}*"):
        with suppress(OSError):  # another process has just removed it
            if time.time() - path.stat().st_mtime > ABANDONED_SECONDS:
                shutil.rmtree(path)


def _call(command: tuple[str, ...], text: str) -> None:
    """Runs `command` with `text` as its standard input; raises OSError with its messages if it fails."""
    with subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        start_new_session=True,
    ) as process:
        try:
            _, messages = process.communicate(text, timeout=COMPILER_SECONDS)
        except subprocess.TimeoutExpired:
            raise TimeoutError(f"{command[0]} has not ended after {COMPILER_SECONDS} seconds") from None
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)  # with the processes that a compiler's driver starts
    if process.returncode:
        raise OSError(f"{command[0]} failed with exit code {process.returncode}: {messages.strip()[:2000]}")
