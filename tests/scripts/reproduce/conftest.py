"""What the tests of the studies share."""

from cases.plots import coarse_plots  # noqa: F401 (a fixture)
from cases.training import one_machine  # noqa: F401 (a fixture)
