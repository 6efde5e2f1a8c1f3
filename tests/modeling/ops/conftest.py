"""What the tests of C code share."""

from collections.abc import Iterator

import pytest

from dynattn.modeling.ops import native_library
from dynattn.modeling.ops.dcmha.chunked import decode_native, native_problem, passes_native


@pytest.fixture
def libraries() -> Iterator[None]:
    """Forgets what is loaded and what has failed, before and after."""
    forget()
    yield
    forget()


def forget() -> None:
    native_library._failures.clear()
    loaders = (native_problem.load_stage, passes_native.load_passes, decode_native._load)
    for cache in (native_library.load_library, *loaders):
        cache.cache_clear()
