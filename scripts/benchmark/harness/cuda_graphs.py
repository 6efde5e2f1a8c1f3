"""Calls in CUDA graphs, whose replay takes the time of the kernels, without the Python that launches them.

Serving engines run decoding steps so. A call without a graph takes as long as its launches if these take longer than
its kernels, which depends on the CPU.
"""

from collections.abc import Callable
from typing import TypeVar

import torch

Result = TypeVar("Result")


def captured(call: Callable[[], Result], device: torch.device) -> Callable[[], Result]:
    """Returns a call that replays what `call` launches on a device; its results are the same tensors each time."""
    with torch.cuda.device(device):  # streams and graphs belong to the current device
        torch.cuda.synchronize()
        with torch.cuda.stream(torch.cuda.Stream()):  # what a first call compiles and allocates cannot be captured
            call()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            results = call()

    def replay() -> Result:
        graph.replay()
        return results

    return replay
