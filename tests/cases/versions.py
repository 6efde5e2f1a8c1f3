"""Tests of what needs a newer Transformers than the oldest that the package supports."""

from importlib.metadata import version

import pytest
from packaging.version import Version
from transformers.cache_utils import StaticLayer


def is_before(release: str) -> bool:
    """Whether the installed Transformers is older than a release."""
    return Version(Version(version("transformers")).base_version) < Version(release)


def needs_transformers(release: str) -> pytest.MarkDecorator:
    """Marks a test that is skipped with an older Transformers than `release`."""
    return pytest.mark.skipif(is_before(release), reason=f"needs transformers>={release}")


crops_static_caches = pytest.mark.skipif(
    not hasattr(StaticLayer, "crop"), reason="this version of Transformers crops no static caches"
)
