"""What every test gets: one thread, no network, a fixed seed, poisoned fresh memory."""

import gc
import os
import sys
from collections.abc import Generator

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["HF_DATASETS_OFFLINE"] = "1"
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import pytest
import torch

# Without a GPU, Triton's kernels run in its interpreter; Triton asks once, when it is first imported.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

torch.set_num_threads(1)
# Uninitialised memory is filled with NaN, so that a path that reads what nothing wrote fails loudly.
torch.utils.deterministic.fill_uninitialized_memory = True


def pytest_collection_finish() -> None:
    """What the imports made stays: collecting garbage, as Accelerate does for every run, need not look at it again."""
    gc.collect()
    gc.freeze()


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
