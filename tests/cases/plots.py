"""Plots for tests that only need them to exist."""

import matplotlib
import pytest


@pytest.fixture
def coarse_plots(monkeypatch: pytest.MonkeyPatch) -> None:
    """Saves plots with few pixels, which is several times as fast."""
    monkeypatch.setitem(matplotlib.rcParams, "savefig.dpi", 20)
