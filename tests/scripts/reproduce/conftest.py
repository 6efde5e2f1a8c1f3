"""What the tests of the studies share."""

from cases.plots import coarse_plots  # noqa: F401 (a fixture)
