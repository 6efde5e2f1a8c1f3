"""Time and memory of an update of each attention type, measured in interleaved rounds of one process."""

import statistics
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from transformers.cache_utils import Cache

from ...common.measuring import interleave, peak_memory, sample
from ...common.parallel_streams import ParallelStreams
from ..model_training import update
from .plan import TYPES, Run, Setting
from .text import Corpus
from .training import make_model, read_segment, training_streams

CPU = torch.device("cpu")


def measure(corpus: Corpus, settings: Mapping[str, Setting], rounds: int) -> dict[str, Any]:
    """Time and memory of an update with full memory, by setting and attention type.

    A round takes one update of each type in turn, so that other load on the machine affects all types alike.
    """
    return {
        "threads": torch.get_num_threads(),
        "rounds": rounds,
        "settings": {name: _measure_setting(corpus, name, setting, rounds) for name, setting in settings.items()},
    }


def _measure_setting(corpus: Corpus, name: str, setting: Setting, rounds: int) -> dict[str, Any]:
    runs = {kind: Run(name, kind, 0, "tiny-shakespeare", setting, {"attention_type": kind}) for kind in TYPES}
    steps = {kind: Updates(run, corpus) for kind, run in runs.items()}
    for step in steps.values():
        step.fill_memory()
    samplers: dict[str, Callable[[], float]] = {kind: partial(sample, step, 1, CPU) for kind, step in steps.items()}
    seconds = interleave(samplers, rounds)
    base = statistics.median(seconds["mha"])
    tokens = setting.streams * setting.segment
    return {
        kind: {
            "seconds": statistics.median(times),
            "all_seconds": times,
            "tokens_per_second": tokens / statistics.median(times),
            "times_mha": statistics.median(times) / base,
            "peak_bytes": peak_memory(steps[kind], CPU),
            "held_bytes": steps[kind].held_bytes(),
        }
        for kind, times in seconds.items()
    }


class Updates:
    """A model in training; a call reads the next segment and updates the weights."""

    def __init__(self, run: Run, corpus: Corpus) -> None:
        torch.manual_seed(run.seed)
        self.run, self.model = run, make_model(run, corpus)
        self.streams: ParallelStreams = training_streams(run, corpus)
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=1e-4)
        self.memory: Cache | None = None
        self.position = 0

    def __call__(self) -> None:
        inputs, targets = self.streams[self.position % len(self.streams)]
        _, loss, self.memory = read_segment(self.model, inputs, targets, self.memory)
        update(self.model, self.optimizer, loss)
        self.position += 1

    def held_bytes(self) -> int:
        """What weights and optimizer state take between two updates."""
        states = [value for state in self.optimizer.state.values() for value in state.values()]
        held = [*self.model.parameters(), *self.model.buffers(), *filter(torch.is_tensor, states)]
        return sum(tensor.numel() * tensor.element_size() for tensor in held)

    def fill_memory(self) -> None:
        """Updates until the memory is full, and once more."""
        for _ in range(-(-self.run.setting.mem_len // self.run.setting.segment) + 1):
            self()
