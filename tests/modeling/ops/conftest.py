"""What the tests of C code share."""

from collections.abc import Iterator

import pytest

from dynattn.modeling.ops import native_library
from dynattn.modeling.ops.dcmha.chunked import decode_native
from dynattn.modeling.ops.dcmha.chunked.composers import native


@pytest.fixture
def libraries() -> Iterator[None]:
    """Forgets what is loaded and what has failed, before and after."""
    forget()
    yield
    forget()


def forget() -> None:
    native_library._failures.clear()
    for cache in (native_library.load_library, native._load, decode_native._load):
        cache.cache_clear()
