"""C code that is compiled on the machine where it runs, once, and kept in the user's cache."""

import ctypes
import functools
import hashlib
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

import torch

# What the compiler may use of the processor, and how many float32 numbers one of its registers holds.
CAPABILITIES = {
    "AVX512": (("-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mfma", "-mprefer-vector-width=512"), 16),
    "AVX2": (("-mavx2", "-mfma"), 8),
}
FLAGS = ("-std=gnu11", "-O3", "-funroll-loops", "-fno-math-errno", "-fno-trapping-math", "-fPIC")


def lanes() -> int:
    """Returns how many float32 numbers a register of this processor holds."""
    return CAPABILITIES.get(torch.backends.cpu.get_cpu_capability(), ((), 4))[1]


def find_compiler() -> str | None:
    """Returns the C compiler that the environment variable `CC` or the path names, or None."""
    return shutil.which(os.environ.get("CC", "cc")) or shutil.which("gcc") or shutil.which("clang")


@functools.cache
def load_library(source: str, macros: tuple[tuple[str, int], ...]) -> ctypes.CDLL:
    """Returns the compiled `source`, from the cache where this machine has compiled the same before.

    Its OpenMP threads are PyTorch's: the library names no OpenMP runtime, and so finds the one that is loaded. Where
    that is not the compiler's, everything runs on one thread.

    Raises:
        OSError: there is no compiler, it fails, or what it made cannot be loaded.
    """
    compiler = find_compiler()
    if compiler is None:
        raise OSError("no C compiler: install gcc or clang, or set CC to one")
    flags = (*FLAGS, *CAPABILITIES.get(torch.backends.cpu.get_cpu_capability(), ((), 4))[0])
    command = (compiler, *flags, *(f"-D{name}={value}" for name, value in macros))
    try:
        return _load((*command, "-fopenmp"), source)
    except OSError:
        return _load(command, source)


def _load(command: tuple[str, ...], source: str) -> ctypes.CDLL:
    name = hashlib.sha256("\n".join((source, *command)).encode()).hexdigest()[:24] + ".so"
    path = _cache_folder() / name
    if not path.exists():
        _compile(command, source, path)
    return ctypes.CDLL(str(path))


def _cache_folder() -> Path:
    root = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    folder = Path(root) / "dynattn"
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError:
        return _temporary_folder()
    return folder if os.access(folder, os.W_OK) else _temporary_folder()


@functools.cache
def _temporary_folder() -> Path:
    """For a process whose user has no cache to write to."""
    return Path(tempfile.mkdtemp(prefix="dynattn-"))


def _compile(command: tuple[str, ...], source: str, path: Path) -> None:
    """Writes the library under another name first, so that no process ever loads half of one."""
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        compiled, linked = Path(folder) / "code.o", Path(folder) / path.name
        _call((*command, "-x", "c", "-c", "-", "-o", str(compiled)), source)
        _call((command[0], "-shared", str(compiled), "-o", str(linked), "-lm"), "")
        linked.replace(path)


def _call(command: tuple[str, ...], text: str) -> None:
    result = subprocess.run(command, input=text, text=True, capture_output=True, check=False)
    if result.returncode:
        raise OSError(f"{command[0]} failed with exit code {result.returncode}: {result.stderr.strip()[:2000]}")
