"""What every test gets: one thread, no network, a fixed seed, poisoned fresh memory."""

import gc
import os

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


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)
