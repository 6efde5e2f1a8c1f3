"""The maker of small models as a fixture."""

from collections.abc import Callable

import pytest
from cases import models

from dynattn import DCFormerForCausalLM


@pytest.fixture
def make_model() -> Callable[..., DCFormerForCausalLM]:
    """Returns `cases.models.make_model`."""
    return models.make_model
