"""What the tests of C code share."""

from collections.abc import Iterator

import pytest
import torch

from dynattn.modeling.ops import native_library
from dynattn.modeling.ops.dcmha.chunked import decode_native, native_problem, passes_native


@pytest.fixture
def libraries() -> Iterator[None]:
    """Forgets what is loaded and what has failed, before and after."""
    forget()
    yield
    forget()


@pytest.fixture
def threads(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As many threads as a parameter says or the test sets, even for little work, and afterwards as many as before."""
    monkeypatch.setattr(decode_native, "ELEMENTS_PER_THREAD", 1)
    before = torch.get_num_threads()
    torch.set_num_threads(getattr(request, "param", before))
    yield
    torch.set_num_threads(before)


def forget() -> None:
    native_library._failures.clear()
    loaders = (native_problem.load_stage, passes_native.load_passes, decode_native._load)
    for cache in (native_library.load_library, *loaders):
        cache.cache_clear()
