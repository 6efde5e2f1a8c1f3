"""Measures every attention implementation beside the strongest baselines; wrong results get no ratio.

Run: `dynattn benchmark [--quick] [--subjects attention decode ...] [--shapes 16x64@2048 ...] [--device cuda]`
Everything for the record of a GPU: `dynattn benchmark --preset gpu --output FOLDER`
"""

from collections.abc import Sequence

from ..common.arguments import parse_arguments
from .arguments import BenchmarkArguments
from .harness.process import pin_process


def main(argv: Sequence[str]) -> int:
    """Measures, prints each table as it is done, writes record and plots.

    Returns 1 if a candidate is wrong, and DEVICE_LOST if one made the device useless for this process.

    Everything slow is imported after the arguments are parsed and the process is pinned.
    """
    arguments = parse_arguments(BenchmarkArguments, argv, prog="dynattn benchmark", description=__doc__)
    if arguments.redraw is not None:
        from .report.record import redraw

        redraw(arguments)
        return 0
    pin_process(argv, arguments.threads)
    from .job import run_benchmark

    return run_benchmark(argv, arguments)
