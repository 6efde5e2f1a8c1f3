"""Threads and processes that use the library for the first time at once, and processes that fork after use."""

import os
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from random import Random
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from dynattn import Composition, dcmha_attention

from ..harness import Case, Child, Kind, expect, in_child

SECONDS = 90


def generate(random: Random) -> Case:
    return {
        "class": random.choice(list(WAYS)),
        "count": random.choice((2, 3, 4)),
        "heads": random.choice((2, 3, 4, 6, 8)),
        "queries": random.choice((1, 5, 40)),
        "threads": random.choice((1, 2)),
    }


def check(case: Case) -> None:
    # Temporary files lie there, too: where no cache can be written, C code of an earlier case would be found in others.
    with tempfile.TemporaryDirectory(prefix="dynattn-fuzz-") as cache, patch.object(tempfile, "tempdir", cache):
        os.environ["XDG_CACHE_HOME"] = cache
        if case["class"] == "cache that cannot be written":
            os.environ["XDG_CACHE_HOME"] = "/proc/none"
        if case["class"] == "broken cache":
            break_cache(case, Path(cache))
        results = WAYS[case["class"]](case)
        expected = attend(case, "eager")
        for result in results:
            expect(not isinstance(result, str), f"{case['class']}: {result}")
            error = float((result - expected).abs().max())
            expect(error < 1e-4, f"{case['class']}: wrong by {error:.1e}")
        left = [path.name for path in Path(cache).rglob("*") if path.name.startswith("tmp")]
        expect(not left, f"{case['class']}: leaves {left} in the cache")


def attend(case: Case, implementation: str = "chunked") -> Tensor:
    """The op on fixed inputs; float32 on a CPU is what C code serves."""
    generator = torch.Generator().manual_seed(0)
    heads, queries, keys = case["heads"], case["queries"], case["queries"] + 3
    query, key, value = (torch.randn(2, heads, n, 8, generator=generator) for n in (queries, keys, keys))
    gate = torch.randn(2, keys, heads, generator=generator)
    return dcmha_attention(query, key, value, pre=Composition(key_gate=gate), implementation=implementation)


def attend_forked(case: Case, tell: Callable[[Any], None]) -> None:
    """Keeps to one thread: OpenMP's threads, which an earlier case may have started, do not survive a fork."""
    torch.set_num_threads(1)
    tell(attend(case))


def in_processes(case: Case) -> list[Any]:
    with ExitStack() as stack:
        children = [stack.enter_context(in_child(partial(attend_forked, case))) for _ in range(case["count"])]
        return [hear(child) for child in children]


def in_threads(case: Case) -> list[Any]:
    torch.set_num_threads(case["threads"])
    with ThreadPoolExecutor(case["count"]) as pool:
        return list(pool.map(lambda _: attend(case), range(case["count"])))


def after_use(case: Case) -> list[Any]:
    torch.set_num_threads(case["threads"])
    first = attend(case)
    with in_child(partial(attend_forked, case)) as child:
        return [first, hear(child)]


def break_cache(case: Case, cache: Path) -> None:
    """A disk that was full, or an older machine, left half of every library."""
    with in_child(partial(attend_forked, case)) as child:
        hear(child)
    for library in cache.rglob("*.so"):
        os.truncate(library, library.stat().st_size // 2)


def hear(child: Child) -> Any:
    """What a process reports: its result, or how it ended."""
    try:
        return child.hear(SECONDS)
    except TimeoutError:
        return "hangs"
    except EOFError:
        return child.wait()


WAYS: dict[str, Callable[[Case], list[Any]]] = {
    "processes": in_processes,
    "threads": in_threads,
    "fork after use": after_use,
    "cache that cannot be written": in_processes,
    "broken cache": in_processes,
}
KIND = Kind("processes", generate, check, fast=2, seconds=2 * SECONDS, batch=1)
