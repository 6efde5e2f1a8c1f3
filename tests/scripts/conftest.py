"""What the tests of the command line share: plots that only need to exist, and a machine that is known."""

import pytest
from cases.training import one_machine  # noqa: F401 (a fixture)
from matplotlib import rcParams
from matplotlib.figure import Figure


@pytest.fixture(autouse=True)
def coarse_plots(monkeypatch: pytest.MonkeyPatch) -> None:
    """Saves plots with few pixels and without arranging their parts, for which each would be drawn twice."""
    monkeypatch.setitem(rcParams, "savefig.dpi", 20)
    monkeypatch.setattr(Figure, "get_layout_engine", lambda figure: None)
    monkeypatch.setattr(Figure, "tight_layout", lambda figure, **_: None)
