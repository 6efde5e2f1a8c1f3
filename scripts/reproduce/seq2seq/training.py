"""One run of the study: an encoder-decoder learns a task and is tested on what it has not seen."""

import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import PreTrainedModel

from ..model_training import forward_flops, train_steps
from ..paired_study.job import Run
from .arms import Shape, make_model
from .edit_distance import edit_distance
from .generated import TRANSFORMATIONS, VOCABULARY, draw_pairs
from .names import Names, Pair, load_names
from .pairs import IGNORED, Batch

# Each use of random numbers has a stream of its own, so that one does not change the others.
# What is tested on to choose a learning rate is never what is measured.
TRAINING, TESTING, TUNING = 0, 1, 2
TEST_BATCH = 128

Outcome = tuple[dict[str, float], dict[str, Any]]


@dataclass(frozen=True)
class TaskSizes:
    """The models of a task, their training, and their tests.

    Attributes:
        shortest, longest: lengths of what is trained on; for generated pairs, tests go on to twice the longest.
        tests: examples of each test.
    """

    shape: Shape
    steps: int
    batch: int
    shortest: int
    longest: int
    tests: int


FULL_SHAPE = Shape(VOCABULARY, 128, num_hidden_layers=2, num_attention_heads=8, max_position_embeddings=80)
QUICK_SHAPE = replace(FULL_SHAPE, hidden_size=64, num_hidden_layers=1, num_attention_heads=4)
# The vocabulary of names is counted when they are read.
FULL = {
    "sequences": TaskSizes(FULL_SHAPE, steps=4000, batch=64, shortest=4, longest=16, tests=64),
    "names": TaskSizes(
        replace(FULL_SHAPE, vocab_size=0, hidden_dropout=0.1), steps=4000, batch=64, shortest=1, longest=32, tests=1000
    ),
}
QUICK = {
    "sequences": TaskSizes(QUICK_SHAPE, steps=800, batch=32, shortest=4, longest=6, tests=32),
    "names": TaskSizes(replace(QUICK_SHAPE, vocab_size=0), steps=600, batch=32, shortest=1, longest=12, tests=300),
}
# The sizes by whether the study is the quick one.
SIZES = {False: FULL, True: QUICK}


def run_one(run: Run) -> dict[str, Any]:
    """Trains and tests the model of a run; returns its settings, costs and metrics."""
    began = time.process_time()
    sizes = SIZES[run.quick][run.task]
    model, (metrics, details) = TASKS[run.task](run, sizes)
    seconds = time.process_time() - began
    tokens = torch.ones(1, sizes.longest, dtype=torch.long)
    return {
        "run": asdict(run),
        "sizes": asdict(sizes),
        "parameters": model.num_parameters(),
        "flops": forward_flops(model, input_ids=tokens, decoder_input_ids=tokens, use_cache=False),
        # A model that diverged also answers, but says nothing about what it could have learned.
        "metrics": dict.fromkeys(metrics, math.nan) if math.isnan(metrics["loss"]) else metrics,
        "details": details,
        "cpu_seconds": seconds,
    }


def run_sequences(run: Run, sizes: TaskSizes) -> tuple[PreTrainedModel, Outcome]:
    """Trains on sequences of some lengths, and tests on those and on longer ones."""
    model, rng = make_model(run.arm, sizes.shape, run.seed), np.random.default_rng([run.seed, TRAINING])
    names = list(TRANSFORMATIONS)

    def loss_of(step: int) -> Tensor:
        """The mean cross-entropy of a batch of one length, in which all transformations occur."""
        length = int(rng.integers(sizes.shortest, sizes.longest, endpoint=True))
        return model(**draw_pairs(names, rng, sizes.batch // len(names), length)._asdict()).loss

    train_steps(model, run.learning_rate, sizes.steps, loss_of)
    return model, score_sequences(model, sizes, TUNING if run.tuning else TESTING)


def score_sequences(model: PreTrainedModel, sizes: TaskSizes, stream: int) -> Outcome:
    """Exact match of trained and of longer lengths, and the loss of the former; in detail by transformation, length.

    Every token is predicted from the correct tokens before it. All predictions are right exactly if greedy decoding is.
    The random numbers of a `stream` and a length, and so its examples, are the same for all runs.
    """
    lengths = range(sizes.shortest, 2 * sizes.longest + 1)
    exact: dict[str, list[float]] = {}
    losses: list[float] = []
    for name in TRANSFORMATIONS:
        rows = [
            read_answers(model, draw_pairs([name], np.random.default_rng([length, stream]), sizes.tests, length))
            for length in lengths
        ]
        exact[name] = [right.float().mean().item() for right, _ in rows]
        losses += [loss.item() for (_, loss), length in zip(rows, lengths, strict=True) if length <= sizes.longest]
    trained = sizes.longest - sizes.shortest + 1
    metrics = {
        "exact": statistics.mean(share for shares in exact.values() for share in shares[:trained]),
        "exact_longer": statistics.mean(share for shares in exact.values() for share in shares[trained:]),
        "loss": statistics.mean(losses),
    }
    return metrics, {"lengths": list(lengths), "exact": exact}


@torch.no_grad()
def read_answers(model: PreTrainedModel, batch: Batch) -> tuple[Tensor, Tensor]:
    """Which targets `[B]` are right in every token, and the mean cross-entropy of a token."""
    model.eval()
    logits = model(**batch._asdict()).logits
    right = (logits.argmax(dim=-1) == batch.labels) | (batch.labels == IGNORED)
    return right.all(dim=-1), F.cross_entropy(logits.flatten(0, 1), batch.labels.flatten())


def run_names(run: Run, sizes: TaskSizes) -> tuple[PreTrainedModel, Outcome]:
    """Trains on pairs of names, and tests on others; learning rates are chosen on names apart from these."""
    names = load_names(sizes.longest)
    shape = replace(sizes.shape, vocab_size=names.vocabulary)
    model, rng = make_model(run.arm, shape, run.seed), np.random.default_rng([run.seed, TRAINING])
    train, test = names.part("train"), names.part("validation" if run.tuning else "test")

    def loss_of(step: int) -> Tensor:
        """The mean cross-entropy of a random batch."""
        rows = rng.choice(len(train), size=sizes.batch, replace=False)
        return model(**names.batch([train[row] for row in rows])._asdict()).loss

    train_steps(model, run.learning_rate, sizes.steps, loss_of)
    return model, score_names(model, names, test[: sizes.tests], sizes.longest)


def score_names(model: PreTrainedModel, names: Names, pairs: Sequence[Pair], longest: int) -> Outcome:
    """Character error rate and exact match of greedy decoding, and the cross-entropy of the right characters."""
    translations: list[str] = []
    losses: list[tuple[float, int]] = []
    for first in range(0, len(pairs), TEST_BATCH):
        batch = names.batch(pairs[first : first + TEST_BATCH])
        losses.append((read_answers(model, batch)[1].item(), int((batch.labels != IGNORED).sum())))
        given = {"input_ids": batch.input_ids, "attention_mask": batch.attention_mask}
        tokens = model.generate(**given, max_new_tokens=longest + 1, do_sample=False)  # type: ignore[operator]
        translations += [names.decode(row) for row in tokens.tolist()]
    targets = [target for _, target in pairs]
    edits = sum(edit_distance(*each) for each in zip(translations, targets, strict=True))
    metrics = {
        "character_errors": edits / sum(len(target) for target in targets),
        "exact": statistics.mean(each == target for each, target in zip(translations, targets, strict=True)),
        "loss": sum(loss * count for loss, count in losses) / sum(count for _, count in losses),
    }
    examples = [[*pair, translation] for pair, translation in zip(pairs[:5], translations, strict=False)]
    return metrics, {"tested": len(pairs), "source_target_translation": examples}


TASKS: dict[str, Callable[[Run, TaskSizes], tuple[PreTrainedModel, Outcome]]] = {
    "sequences": run_sequences,
    "names": run_names,
}
