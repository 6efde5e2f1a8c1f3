"""What every test gets: one thread, no network, empty caches, a fixed seed, poisoned fresh memory, a quick Triton."""

import gc
import os
import sys
import tempfile
from collections.abc import Callable, Generator
from dataclasses import replace
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["HF_DATASETS_OFFLINE"] = "1"
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import pytest
import torch

# Data and code that tests load stay out of the user's caches, which may be full of other things, or not writable.
_CACHES = tempfile.TemporaryDirectory(prefix="dynattn-tests-")
os.environ["HF_HOME"] = _CACHES.name
# Other names would take precedence, and without C code the tests of it would find nothing to test.
for name in ("HF_DATASETS_CACHE", "HF_HUB_CACHE", "HF_MODULES_CACHE", "DYNATTN_COMPILE"):
    os.environ.pop(name, None)

# Imports make a million objects that stay. Looking for garbage among them meanwhile takes a fifth of the imports' time.
gc.disable()

# Without a GPU, Triton's kernels run in its interpreter; Triton asks once, when it is first imported.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

torch.set_num_threads(1)
# The first backward pass counts the devices. If fake tensors came before, it would count a CUDA device that is not
# there, start a thread for it, and copies of this process could not differentiate.
torch.ones(1, requires_grad=True).sum().backward()
# In this mode PyTorch fills uninitialised memory with NaN, so code that reads memory before writing it fails loudly.
torch.use_deterministic_algorithms(True, warn_only=True)
# No test cuts the power, and a slow disk takes longer to flush files than tests take. Wrong descriptors stay errors.
os.fsync = os.fstat  # type: ignore[assignment]


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """What the imports made stays: collecting garbage, as Accelerate does for every run, need not look at it."""
    result = yield
    gc.freeze()
    gc.enable()
    return result


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """Nor at what the tests of a file leave: libraries that they import and graphs that they compile are many objects.

    In the end a collection would take a fifth of a second, and continuous batching collects whenever a manager stops.
    """
    if nextitem is not None and nextitem.path != item.path:
        gc.collect()
        gc.freeze()


def pytest_collection_finish() -> None:
    if "triton" in sys.modules and os.environ.get("TRITON_INTERPRET") == "1":
        _hasten_interpreter()


def _hasten_interpreter() -> None:
    """Spares Triton's interpreter most of its work without a change of results, of reads and writes, or of errors."""
    import triton

    if not triton.__version__.startswith("3.6."):
        return  # the names below are internal, and another version may do this work for a reason
    from triton import language
    from triton.runtime import interpreter

    # It computes whether integers overflow and throws the answer away, because it asserts nothing without `debug`.
    builder = interpreter.interpreter_builder
    builder.options = replace(builder.options, sanitize_overflow=False)
    # Whenever a kernel calls a function it looks for what it has to replace in the language, and finds all replaced.
    patch = interpreter._patch_lang

    def patch_once(function: Callable[..., Any]) -> Any:
        seen = [value for value in function.__globals__.values() if value is language or value is language.core]
        if any(language.core.is_builtin(module.load) for module in seen):
            return patch(function)
        return interpreter._LangPatchScope()

    interpreter._patch_lang = patch_once


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Ends a process whose CUDA device a test has lost: every later test in it would fail, whatever it tests.

    Under `pytest -n` the report names the test as the one that crashed its worker, and another worker goes on.
    """
    report = yield
    if report.failed and item.get_closest_marker("gpu") is not None and _device_is_lost():
        with item.config.pluginmanager.getplugin("capturemanager").global_and_fixture_disabled():
            print(f"\n{item.nodeid} lost the CUDA device:\n{report.longreprtext}", file=sys.stderr, flush=True)
        if "PYTEST_XDIST_WORKER" in os.environ:
            os._exit(1)
        pytest.exit("the CUDA device is lost; with -n 4 other processes go on", returncode=1)
    return report


def _device_is_lost() -> bool:
    try:
        torch.cuda.synchronize()
    except RuntimeError:
        return torch.cuda.is_initialized()
    return False


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)
