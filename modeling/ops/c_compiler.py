"""The C compiler of the machine, and what it is told of the processor."""

import os
import shlex
import shutil
import signal
import subprocess
import warnings
from contextlib import suppress

import torch

# For each CPU capability that PyTorch reports: the compiler's flags, and the float32 elements in a vector register.
CAPABILITIES = {
    "AVX512": (("-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mfma", "-mprefer-vector-width=512"), 16),
    "AVX2": (("-mavx2", "-mfma"), 8),
}
# Further flags, by PyTorch's name for the capability that a processor needs for them. Old compilers do not know them.
NEWER_FLAGS = {"avx512_bf16": "-mavx512bf16"}
FLAGS = ("-std=gnu11", "-O3", "-funroll-loops", "-fno-math-errno", "-fno-trapping-math", "-fPIC")
# A compiler that runs longer than this hangs, and is stopped.
COMPILER_SECONDS = 120


def lanes() -> int:
    """Returns how many float32 elements a vector register of this processor holds."""
    return _capability()[1]


def _capability() -> tuple[tuple[str, ...], int]:
    return CAPABILITIES.get(torch.backends.cpu.get_cpu_capability(), ((), 4))


def common_flags() -> tuple[str, ...]:
    """The flags that all compilers know, those for the vector registers of this processor included."""
    return (*FLAGS, *_capability()[0])


def newer_flags() -> tuple[str, ...]:
    """The flags of `NEWER_FLAGS` whose capabilities this processor has, if PyTorch uses its AVX512."""
    has = getattr(torch.cpu, "get_capabilities", dict[str, bool])()
    return tuple(flag for name, flag in NEWER_FLAGS.items() if has.get(name) and lanes() == 16)


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


def run_compiler(command: tuple[str, ...], text: str) -> None:
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
