"""The checks of `dynattn doctor`."""

import os
import platform
import re
import shlex
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, requires, version
from typing import Literal

import torch
from packaging.requirements import Requirement

from dynattn import __version__
from dynattn.modeling.ops.c_compiler import find_compiler, lanes
from dynattn.modeling.ops.dcmha.attention import dcmha_attention, resolve_implementation
from dynattn.modeling.ops.dcmha.chunked.composers.choice import compile_mode
from dynattn.modeling.ops.dcmha.composition import Composition

from ..common.environment import hardware
from ..common.errors import first_line

# Environment variables that change what is reported here or what jobs do; docs/environment.md describes them.
VARIABLES = (
    "DYNATTN_COMPILE",
    "DYNATTN_IMPORT",
    "DYNATTN_COMMIT",
    "CC",
    "CXX",
    "XDG_CACHE_HOME",
    "OMP_NUM_THREADS",
    "OMP_WAIT_POLICY",
    "TRITON_INTERPRET",
    "HF_HUB_OFFLINE",
)


@dataclass(frozen=True)
class Finding:
    """A line of the report: the state of something, its name, and what was found or how to get it."""

    state: Literal["ok", "missing", "fails"]  # what is missing is optional; what fails keeps the package from working
    subject: str
    text: str

    def __str__(self) -> str:
        return f"{self.state:<9}{self.subject:<23}{self.text}"


def examine() -> list[Finding]:
    """Looks at everything, without the network."""
    here = Finding("ok", "dynattn", f"{__version__}, Python {platform.python_version()} on {platform.platform()}")
    variables = [Finding("ok", name, os.environ[name]) for name in VARIABLES if name in os.environ]
    return [here, *_packages(), *_devices(), _native_code(), _default_implementation(), *variables]


def _packages() -> Iterator[Finding]:
    """Every requirement of this package, and those of its extras, except for those with which it is developed."""
    for line in requires("dynattn") or ():
        requirement = Requirement(line)
        extra = _extra_of(requirement)
        if extra in ("dev", "docs") or (extra is None and requirement.marker and not requirement.marker.evaluate()):
            continue
        yield _package(requirement, extra)


def _extra_of(requirement: Requirement) -> str | None:
    """The extra that brings a requirement along, or None if every user needs it."""
    named = re.search(r'extra == "([^"]+)"', str(requirement.marker))
    return named[1] if named else None


def _package(requirement: Requirement, extra: str | None) -> Finding:
    fix = f"pip install 'dynattn[{extra}]'" if extra else f"pip install '{requirement.name}{requirement.specifier}'"
    absent: Literal["missing", "fails"] = "missing" if extra else "fails"
    subject = requirement.name + (f"[{','.join(sorted(requirement.extras))}]" if requirement.extras else "")
    if (found := _version(requirement.name)) is None:
        return Finding(absent, subject, f"not installed; {fix}")
    if not requirement.specifier.contains(found, prereleases=True):
        return Finding(absent, subject, f"{found}, needs {requirement.specifier}; {fix}")
    if lacking := [name for name in _brought_by_extras(requirement) if _version(name) is None]:
        return Finding(absent, subject, f"{found}, without {', '.join(lacking)}; {fix}")
    return Finding("ok", subject, found)


def _brought_by_extras(requirement: Requirement) -> Iterator[str]:
    """The packages that the extras of a requirement need, such as the web server of `transformers[serving]`."""
    for line in (requires(requirement.name) or ()) if requirement.extras else ():
        part = Requirement(line)
        if part.marker and any(part.marker.evaluate({"extra": extra}) for extra in requirement.extras):
            yield part.name


def _version(name: str) -> str | None:
    """The version of a package; None if it is not installed."""
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _devices() -> Iterator[Finding]:
    yield Finding("ok", "cpu", f"{hardware(torch.device('cpu'))}, threads for PyTorch: {torch.get_num_threads()}")
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        memory = f"{properties.total_memory / 2**30:.0f} GiB"
        capability = f"compute capability {properties.major}.{properties.minor}"
        yield Finding("ok", f"cuda:{index}", f"{properties.name}, {memory}, {capability}")
    if not torch.cuda.is_available():
        yield Finding("missing", "cuda", f"PyTorch {torch.__version__} sees no GPU")


def _native_code() -> Finding:
    """Calls the composed op once, which compiles its C code or finds it compiled; a failure to do so is a warning."""
    try:
        if compile_mode() == "0":
            return Finding("missing", "C compiler", "not used, because DYNATTN_COMPILE=0")
    except ValueError as error:
        return Finding("fails", "C compiler", str(error))
    heads = torch.zeros(1, 4, 2, 8)  # [B, H, T, D]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        compiler = find_compiler()
        if compiler is None:
            text = "attention on a CPU is slower without; install gcc or clang, or set CC"
            return Finding("missing", "C compiler", text)
        dcmha_attention(heads, heads, heads, pre=Composition(query_gate=torch.zeros(1, 2, 4)))
    command = shlex.join(compiler)
    if caught:
        return Finding("missing", "C compiler", f"{command}: {first_line(str(caught[0].message))}")
    return Finding("ok", "C compiler", f"{command}, vectors of {lanes()} float32 elements")


def _default_implementation() -> Finding:
    composed, plain = (resolve_implementation(None, composed=composed) for composed in (True, False))
    return Finding("ok", "attention", f"by default {composed!r} for composed heads, {plain!r} without composition")
