"""Shared libraries of C code that are compiled once on the machine where they run, and kept in the user's cache."""

import ctypes
import functools
import hashlib
import os
import platform
import tempfile
import warnings
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from .c_compiler import common_flags, find_compiler, newer_flags, run_compiler
from .code_cache import checksum, code_folder, is_intact, remove_abandoned

# Options for tensors that C code reads or writes, whatever the default dtype and device of PyTorch are.
C_FLOATS: dict[str, Any] = {"dtype": torch.float32, "device": "cpu"}
# Functions of a library by name, each with the types of its arguments and of its result, as `ctypes` has them.
Signatures = Mapping[str, tuple[Sequence[Any], Any]]


def usable_threads() -> int:
    """Returns how many threads C code may use: as many as PyTorch, but one in a forked process.

    OpenMP's threads do not survive a fork, but its records of them do: a forked process would wait for them forever.
    """
    return 1 if os.getpid() != _PROCESS else torch.get_num_threads()


# The process that has imported this module; a forked one has another number. Where PyTorch has used threads before a
# fork and this module is imported after it, PyTorch's own operators wait forever too, so nothing is lost.
_PROCESS = os.getpid()


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
        OSError: there is no compiler, it fails or takes too long, or its result cannot be loaded.
    """
    options = (*common_flags(), *(f"-D{name}={value}" for name, value in macros))
    newer = newer_flags()
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
    compiler, folder = find_compiler(), code_folder()
    key = _hash("\n".join((platform.machine(), source, *options)))
    made_by = key if compiler is None else f"{key}-{_hash(' '.join(compiler))}"
    for path in folder.glob(f"{made_by}-*.so"):
        if not is_intact(path):
            path.unlink(missing_ok=True)
            continue
        with suppress(OSError):  # as of a file from another machine, if they share a home
            return ctypes.CDLL(str(path))
    if compiler is None:
        raise OSError("no C compiler: install gcc or clang, or set CC to one")
    return ctypes.CDLL(str(_compile(compiler, options, source, folder, made_by)))


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:24]


def _compile(compiler: tuple[str, ...], options: tuple[str, ...], source: str, folder: Path, name: str) -> Path:
    """Compiles in a temporary folder and then moves the library into `folder`, so that no process loads half of one."""
    remove_abandoned(folder)
    with tempfile.TemporaryDirectory(dir=folder, ignore_cleanup_errors=True) as temporary:
        compiled, linked = Path(temporary) / "code.o", Path(temporary) / "library.so"
        run_compiler((*compiler, *options, "-x", "c", "-c", "-", "-o", str(compiled)), source)
        run_compiler((*compiler, "-shared", str(compiled), "-o", str(linked), "-lm"), "")
        linked.chmod(0o700)
        return linked.rename(folder / f"{name}-{checksum(linked)}.so")
