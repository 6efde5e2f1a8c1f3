"""Environment variables that are set for a while."""

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager


@contextmanager
def variables_set(values: Mapping[str, str]) -> Iterator[None]:
    """Sets environment variables during the block, for code in it and for processes that are started in it."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
