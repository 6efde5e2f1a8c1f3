"""Shared libraries of C code that are compiled once on the machine where they run, and kept in the user's cache."""

import ctypes
import functools
import hashlib
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

import torch

# For each CPU capability that PyTorch reports: the compiler's flags, and the float32 elements in a vector register.
CAPABILITIES = {
    "AVX512": (("-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mfma", "-mprefer-vector-width=512"), 16),
    "AVX2": (("-mavx2", "-mfma"), 8),
}
FLAGS = ("-std=gnu11", "-O3", "-funroll-loops", "-fno-math-errno", "-fno-trapping-math", "-fPIC")


def lanes() -> int:
    """Returns how many float32 elements a vector register of this processor holds."""
    return _capability()[1]


def _capability() -> tuple[tuple[str, ...], int]:
    return CAPABILITIES.get(torch.backends.cpu.get_cpu_capability(), ((), 4))


def find_compiler() -> str | None:
    """Returns the path of a C compiler, or None: what the environment variable `CC` names, else cc, gcc or clang."""
    return shutil.which(os.environ.get("CC", "cc")) or shutil.which("gcc") or shutil.which("clang")


@functools.cache
def load_library(source: str, macros: tuple[tuple[str, int], ...]) -> ctypes.CDLL:
    """Returns the library compiled from `source`, from the cache if this machine has compiled the same before.

    The library is linked to no OpenMP runtime, so that it uses PyTorch's, which is loaded already, and its threads. If
    PyTorch's runtime is not the one that the compiler needs, the library is compiled without OpenMP, for one thread.

    Args:
        source: text of one C file without local includes.
        macros: names and values that the compiler defines.

    Raises:
        OSError: there is no compiler, it fails, or its result cannot be loaded.
    """
    compiler = find_compiler()
    if compiler is None:
        raise OSError("no C compiler: install gcc or clang, or set CC to one")
    flags = (*FLAGS, *_capability()[0])
    command = (compiler, *flags, *(f"-D{name}={value}" for name, value in macros))
    try:
        return _load((*command, "-fopenmp"), source)
    except OSError:
        return _load(command, source)


def _load(command: tuple[str, ...], source: str) -> ctypes.CDLL:
    """Loads the library cached under the hash of `source` and `command`, after compiling it if there is none."""
    name = hashlib.sha256("\n".join((source, *command)).encode()).hexdigest()[:24] + ".so"
    path = _cache_folder() / name
    if not path.exists():
        _compile(command, source, path)
    return ctypes.CDLL(str(path))


def _cache_folder() -> Path:
    """The user's cache, or a temporary folder where that cannot be written to."""
    root = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    folder = Path(root) / "dynattn"
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError:
        return _temporary_folder()
    return folder if os.access(folder, os.W_OK) else _temporary_folder()


@functools.cache
def _temporary_folder() -> Path:
    """One folder for the whole process."""
    return Path(tempfile.mkdtemp(prefix="dynattn-"))


def _compile(command: tuple[str, ...], source: str, path: Path) -> None:
    """Compiles into a temporary folder and then moves the library to `path`, so that no process loads half of one."""
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        compiled, linked = Path(folder) / "code.o", Path(folder) / path.name
        _call((*command, "-x", "c", "-c", "-", "-o", str(compiled)), source)
        _call((command[0], "-shared", str(compiled), "-o", str(linked), "-lm"), "")
        linked.replace(path)


def _call(command: tuple[str, ...], text: str) -> None:
    """Runs `command` with `text` as its standard input; raises OSError with its messages if it fails."""
    result = subprocess.run(command, input=text, text=True, capture_output=True, check=False)
    if result.returncode:
        raise OSError(f"{command[0]} failed with exit code {result.returncode}: {result.stderr.strip()[:2000]}")
