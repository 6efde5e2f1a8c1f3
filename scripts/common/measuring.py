"""Measures how long a call takes and how much memory it needs, on a CPU or a GPU."""

import math
import os
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

MOST_CALLS = 1000  # of a sample
# A call that takes this many times the intended time of a sample is timed only once: it is slow, not interrupted.
SLOW_SAMPLES = 20
LEAST_ROUNDS = 3  # for candidates that exceed their budget


@dataclass(frozen=True)
class Timing:
    """Seconds per call over `n` rounds, each the mean of `calls` calls; `spread` is the inter-quartile range."""

    n: int
    calls: int
    median: float
    minimum: float
    spread: float


def sample(call: Callable[[], Any], calls: int, device: torch.device) -> float:
    """Mean seconds per call of `calls` calls in a row, measured with CUDA events on a GPU."""
    if device.type == "cuda":
        return _sample_cuda(call, calls, device)
    start = time.perf_counter()
    for _ in range(calls):
        call()
    return (time.perf_counter() - start) / calls


def _sample_cuda(call: Callable[[], Any], calls: int, device: torch.device) -> float:
    with torch.cuda.device(device):
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        start.record()
        for _ in range(calls):
            call()
        stop.record()
        stop.synchronize()
        return start.elapsed_time(stop) / 1000 / calls


def calls_of_a_sample(call: Callable[[], Any], device: torch.device, seconds: float) -> int:
    """How many calls make a sample of at least `seconds`, at most `MOST_CALLS`.

    It is estimated from the fastest of three calls, because other processes may interrupt one.
    """
    once = sample(call, 1, device)
    if once > SLOW_SAMPLES * seconds:
        return 1
    once = max(min(once, *(sample(call, 1, device) for _ in range(2))), 1e-9)
    return min(math.ceil(seconds / once), MOST_CALLS)


def interleave(
    samplers: Mapping[str, Callable[[], float]], rounds: int, budget: float | None = None
) -> dict[str, list[float]]:
    """Takes one sample of each candidate, then a second of each, and so on: drift of the machine affects all alike.

    After `LEAST_ROUNDS` rounds, candidates whose samples took more than `budget` seconds in all are left out.
    """
    samples: dict[str, list[float]] = {name: [] for name in samplers}
    spent = dict.fromkeys(samplers, 0.0)
    for turn in range(rounds):
        for name, take in samplers.items():
            if turn >= LEAST_ROUNDS and budget is not None and spent[name] > budget:
                continue
            start = time.perf_counter()
            samples[name].append(take())
            spent[name] += time.perf_counter() - start
    return samples


def summarize(samples: list[float], calls: int) -> Timing:
    """Median, minimum and inter-quartile range of samples of `calls` calls each; the range of a single sample is 0."""
    quartiles = statistics.quantiles(samples, n=4, method="inclusive") if len(samples) > 1 else [samples[0]] * 3
    return Timing(len(samples), calls, statistics.median(samples), min(samples), quartiles[2] - quartiles[0])


def peak_memory(call: Callable[[], Any], device: torch.device) -> int:
    """The most bytes that a call holds at once, its results included, beyond those allocated before it."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        call()
        torch.cuda.synchronize(device)
        return torch.cuda.max_memory_allocated(device) - before
    with quiet_profiler(), profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        call()
    events = profiler.profiler.kineto_results.events()
    held = highest = 0
    for event in sorted((event for event in events if event.name() == "[memory]"), key=lambda one: one.start_ns()):
        held += event.nbytes()
        highest = max(highest, held)
    return highest


@contextmanager
def quiet_profiler() -> Iterator[None]:
    """Discards what native code writes to stderr in the block: some profiler builds report every start and stop."""
    kept = os.dup(2)
    with Path(os.devnull).open("w") as nowhere:
        os.dup2(nowhere.fileno(), 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)


def gemm_rate(dtype: torch.dtype, device: torch.device) -> float:
    """FLOP/s of a large matrix product, the best of five, as the most that this device can reach in practice."""
    size = 8192 if device.type == "cuda" else 1024
    matrix = torch.randn(size, size, device=device).to(dtype)
    return 2 * size**3 / _best(lambda: matrix @ matrix, device)


def copy_rate(device: torch.device) -> float:
    """Bytes/s read and written by copying 256 MiB, the best of five."""
    source = torch.ones(2**26, device=device)
    target = torch.empty_like(source)
    return 2 * source.nbytes / _best(lambda: target.copy_(source), device)


def _best(call: Callable[[], Any], device: torch.device) -> float:
    call()
    return min(sample(call, 1, device) for _ in range(5))
