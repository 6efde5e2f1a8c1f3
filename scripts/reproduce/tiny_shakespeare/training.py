"""Training and scoring one model of the study."""

import math
import time
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.cache_utils import Cache

from ....configuration.configuration_rcmha import RCMHAConfig
from ....modeling.caches.names import cache_in, named_cache
from ....modeling.modeling_rcmha import RCMHAForCausalLM
from ...common.environment import hardware, versions
from ...common.parallel_streams import ParallelStreams
from ..model_training import update
from .plan import PEAK_RATE, Run
from .progress import StudyProgress, Tally
from .text import Corpus

CURVE_POINTS = 20


def run_one(run: Run, corpus: Corpus, checkpoint: Path, *, compiled: bool = False) -> dict[str, Any]:
    """Trains and scores one model; returns its settings, its scores on both splits and its curve.

    Args:
        checkpoint: file from which an interrupted run resumes; it is written after every pass over the text except
            the last.
        compiled: train with `torch.compile`. It rounds differently, but a run may change it when it resumes.
    """
    torch.manual_seed(run.seed)
    model = make_model(run, corpus)
    if compiled:
        model.set_attn_implementation("eager")  # plain operations, which the compiler fuses with those around them
        model.compile()
    progress = train(model, run, corpus, checkpoint)
    began = time.perf_counter()
    train_scores = evaluate(model, seen_text(run, corpus))
    if run.setting.patience is None:
        scores: dict[str, Any] = {"validation": evaluate(model, held_out(run, corpus))}
    else:
        scores = {"validation": progress.validations[progress.best_pass], "validations": progress.validations}
    return {
        "settings": run.settings(),
        "data": corpus.description,
        "parameters": count_parameters(model),
        "train": train_scores,
        **scores,
        "all_training_batches": progress.total.scores(),
        "curve": progress.curve,
        "train_seconds": progress.seconds,
        "train_cpu_seconds": progress.cpu_seconds,
        "tokens_per_second": progress.total.tokens / progress.seconds,
        "wall_seconds": progress.seconds + time.perf_counter() - began,
        "threads": torch.get_num_threads(),
        "compiled": compiled,
        "hardware": hardware(torch.device("cpu")),
        "versions": versions(),
    }


def make_model(run: Run, corpus: Corpus) -> RCMHAForCausalLM:
    """A fresh model of the run."""
    return RCMHAForCausalLM(RCMHAConfig(vocab_size=len(corpus.vocabulary), **run.model))


def train(model: RCMHAForCausalLM, run: Run, corpus: Corpus, checkpoint: Path) -> StudyProgress:
    """Trains from the segment that the seed chooses; memory is emptied before every pass over the text.

    Returns:
        Scores over the whole training and over successive parts of it; each batch is scored before the model learns
        from it.
    """
    streams, patience = training_streams(run, corpus), run.setting.patience
    steps, first = run.setting.steps, first_segment(run, streams)
    optimizer = torch.optim.Adam(model.parameters(), lr=PEAK_RATE, betas=(0.9, 0.999), eps=1e-8, fused=True)
    identity = {"settings": run.settings(), "data": corpus.description}
    progress = StudyProgress.resume(checkpoint, identity, model, optimizer)
    model.train()
    while progress.step < steps:
        index = (first + progress.step) % len(streams)
        began, began_cpu = time.perf_counter(), time.process_time()
        train_pass(model, run, streams, optimizer, progress, index)
        progress.seconds += time.perf_counter() - began
        progress.cpu_seconds += time.process_time() - began_cpu
        if patience is not None:
            progress.end_part()
            progress.validations.append(evaluate(model, held_out(run, corpus)))
            model.train()
            if len(progress.validations) - 1 - progress.best_pass >= patience:
                break
        if progress.step < steps:
            progress.save(checkpoint, identity, model, optimizer)
    return progress


def train_pass(
    model: RCMHAForCausalLM,
    run: Run,
    streams: ParallelStreams,
    optimizer: torch.optim.Optimizer,
    progress: StudyProgress,
    first: int,
) -> None:
    """Trains from segment `first` to the end of the streams or to the last step, and updates `progress`."""
    steps, memory = run.setting.steps, None
    for index in range(first, min(len(streams), first + steps - progress.step)):
        inputs, targets = streams[index]
        progress.step += 1
        for group in optimizer.param_groups:
            group["lr"] = noam_rate(progress.step, run.setting.warmup)
        with compiler_stance(run, memory, inputs):
            logits, loss, memory = read_segment(model, inputs, targets, memory)
        update(model, optimizer, loss)
        for tally in (progress.part, progress.total):
            tally.add(logits, targets, loss)
        is_due = progress.step * CURVE_POINTS // steps > (progress.step - 1) * CURVE_POINTS // steps
        if is_due and run.setting.patience is None:
            progress.end_part()


def compiler_stance(run: Run, memory: Cache | None, inputs: Tensor) -> AbstractContextManager[None]:
    """Leaves code for other shapes than those of almost all segments `[B, T]`, those with a full memory, uncompiled."""
    setting = run.setting
    is_usual = memory is not None and memory.get_seq_length() >= setting.mem_len and inputs.shape[1] == setting.segment
    return torch.compiler.set_stance("default" if is_usual else "force_eager")


def noam_rate(step: int, warmup: int) -> float:
    """The learning rate of update `step`, from 1: linear up to `PEAK_RATE`, then falling with the inverse square root.

    With the official 2,000 updates of warmup it is `d ** -0.5 * min(step ** -0.5, step * warmup ** -1.5)`.
    """
    return PEAK_RATE * min(step / warmup, math.sqrt(warmup / step))


def read_segment(
    model: nn.Module, inputs: Tensor, targets: Tensor, memory: Cache | None
) -> tuple[Tensor, Tensor, Cache]:
    """Logits `[B, T, V]` of a segment `[B, T]`, their mean loss `[]`, and the memory for the next segment."""
    output = model(input_ids=inputs, use_cache=True, **named_cache(memory))
    loss = F.cross_entropy(output.logits.flatten(0, 1), targets.flatten())
    return output.logits, loss, cache_in(output)


@torch.no_grad()
@torch.compiler.set_stance("force_eager")
def evaluate(model: nn.Module, streams: ParallelStreams) -> dict[str, float]:
    """Scores on all segments in order, with memory carried from each to the next."""
    model.eval()
    memory: Cache | None = None
    tally = Tally()
    for inputs, targets in streams:
        logits, loss, memory = read_segment(model, inputs, targets, memory)
        tally.add(logits, targets, loss)
    return tally.scores()


def training_streams(run: Run, corpus: Corpus) -> ParallelStreams:
    """The training split as the run reads it."""
    return ParallelStreams.cut(corpus.train, run.setting.streams, run.setting.segment)


def first_segment(run: Run, streams: ParallelStreams) -> int:
    """The index of the first segment: random so that training ends before the text does; 0 for a pass or more."""
    latest = max(len(streams) - run.setting.steps, 0)
    return int(torch.randint(latest + 1, (), generator=torch.Generator().manual_seed(run.seed)))


def held_out(run: Run, corpus: Corpus) -> ParallelStreams:
    """The validation split, or its beginning if the setting limits the tokens to score."""
    setting = run.setting
    tokens = corpus.validation[: setting.evaluation_tokens]
    return ParallelStreams.cut(tokens, setting.evaluation_streams, setting.segment)


def seen_text(run: Run, corpus: Corpus) -> ParallelStreams:
    """Text that was trained on, as much as `held_out` scores or all of it if that is less.

    It is the last that was read. After more than a pass it is the end of the split, which was read in the last pass or
    in the one before.
    """
    setting, streams = run.setting, training_streams(run, corpus)
    first, length = first_segment(run, streams), streams.inputs.shape[1]
    stop = min((first + setting.steps) * setting.segment, length)
    wanted = min(held_out(run, corpus).inputs.numel() // setting.streams, stop - first * setting.segment)
    pieces = max(min(setting.evaluation_streams // setting.streams, wanted), 1)
    part = slice(stop - wanted // pieces * pieces, stop)
    inputs, targets = (
        side[:, part].reshape(setting.streams * pieces, -1) for side in (streams.inputs, streams.targets)
    )
    return ParallelStreams(inputs, targets, setting.segment)


def count_parameters(model: nn.Module) -> dict[str, int]:
    """The number of all parameters, and of those in tables with one row for each position or distance."""
    tables = ("position_embeddings", "position_bias", "embed_positions.weight")
    sizes = {name: parameter.numel() for name, parameter in model.named_parameters()}
    return {
        "all": sum(sizes.values()),
        "position_tables": sum(size for name, size in sizes.items() if name.endswith(tables)),
    }
