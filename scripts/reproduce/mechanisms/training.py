"""Training and scoring one model on one task."""

import math
import time
from dataclasses import asdict, replace
from typing import Any
from zlib import crc32

import torch
from torch import Generator, Tensor
from torch.nn import functional as F
from transformers import PreTrainedModel

from ...common.environment import hardware
from ..model_training import update
from .arms import ARMS
from .plan import SOLVED, Preset, Run
from .tasks import IGNORED, Task

WARMUP_SHARE, LAST_RATE, WEIGHT_DECAY = 0.05, 0.1, 0.1
# The seed of the sequences on which models are scored; no run trains with it.
HELD_OUT_SEED = 2**31


def run_one(run: Run, preset: Preset, device: str = "cpu") -> dict[str, Any]:
    """Trains one model until it has solved its task or the preset's updates are over.

    Returns:
        The settings; `solved_at`, the number of sequences after which the model had solved the task, or None; and its
        accuracies by number of sequences.
    """
    task = preset.tasks[run.task]
    torch.manual_seed(run.seed)
    size = replace(preset.size, layers=run.layers, heads=run.heads)
    model = ARMS[run.arm].make(size, task.vocabulary, task.length)
    model.to(device)  # type: ignore[arg-type]
    began = time.process_time()
    curve = train(model, task, run, preset, device)
    solved = [sequences for sequences, accuracy in curve if accuracy >= SOLVED]
    return {
        "run": asdict(run),
        "parameters": model.num_parameters(),
        "length": task.length,
        "solved_at": solved[0] if solved else None,
        "accuracy": curve[-1][1],
        "curve": curve,
        "cpu_seconds": time.process_time() - began,
        "hardware": hardware(torch.device(device)),
    }


def definition(run: Run, preset: Preset) -> dict[str, str]:
    """What the names of the run stand for, to tell its file from those of other versions of this study."""
    return {"task": str(preset.tasks[run.task]), "attention": str(ARMS[run.arm])}


def train(model: PreTrainedModel, task: Task, run: Run, preset: Preset, device: str) -> list[tuple[int, float]]:
    """Trains on fresh sequences; returns (sequences, accuracy) of every score.

    All arms of a seed read the same sequences in the same order. Those that are scored are not learned from.
    """
    fresh = Generator().manual_seed(crc32(f"{run.task} {run.seed}".encode()))
    held_out = task.sample(preset.held_out, Generator().manual_seed(HELD_OUT_SEED))
    known = set(map(_bytes, held_out[0]))
    optimizer = torch.optim.AdamW(model.parameters(), lr=run.learning_rate, weight_decay=WEIGHT_DECAY, fused=True)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: rate_at(step, preset.steps))
    curve: list[tuple[int, float]] = []
    for step in range(1, preset.steps + 1):
        model.train()
        tokens, targets = task.sample(preset.batch, fresh)
        targets[[_bytes(row) in known for row in tokens]] = IGNORED
        loss = F.cross_entropy(*answers(model, tokens.to(device), targets.to(device)))
        update(model, optimizer, loss)
        schedule.step()
        if step % preset.score_every == 0 or step == preset.steps:
            curve.append((step * preset.batch, score(model, *held_out, device)))
            if curve[-1][1] >= SOLVED:
                break
    return curve


def _bytes(row: Tensor) -> bytes:
    """The tokens `[T]` of a sequence as something to compare by."""
    return row.numpy().tobytes()


def answers(model: PreTrainedModel, tokens: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Logits `[answers, vocabulary]` and targets `[answers]` of all positions that ask for something."""
    asked = targets != IGNORED
    return model(input_ids=tokens, use_cache=False).logits[asked], targets[asked]


@torch.no_grad()
def score(model: PreTrainedModel, tokens: Tensor, targets: Tensor, device: str) -> float:
    """The share of questions that are answered right."""
    model.eval()
    logits, expected = answers(model, tokens.to(device), targets.to(device))
    return (logits.argmax(dim=-1) == expected).float().mean().item()


def rate_at(step: int, steps: int) -> float:
    """The learning rate as a share of its peak: a linear warmup, then half a cosine."""
    warmup = max(1, round(WARMUP_SHARE * steps))
    if step < warmup:
        return (step + 1) / warmup
    return LAST_RATE + (1 - LAST_RATE) * (1 + math.cos(math.pi * (step - warmup) / max(1, steps - warmup))) / 2
