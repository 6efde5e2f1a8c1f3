"""The record of a study that compares trained arms: its runs and their statistics."""

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from statistics import geometric_mean
from typing import Any

import torch

from ..common.atomic_file import read_json
from ..common.environment import OF_A_RUN, distinct, of_runs
from ..common.errors import UserError, refusal_of
from ..common.metric_records import MetricRecord, read_metrics
from ..common.paired import add_holm, paired_difference
from ..pretrain.data.token_stream import TokenStream
from ..pretrain.options.model import LOSS_UNITS

RunRecord = dict[str, Any]
# The run of each seed; None if it diverged.
RunsOfArm = Mapping[int, RunRecord | None]
# The least and the most that a number can be, which are the same if it was measured.
Limits = tuple[float, float]
AT_LEAST, AT_MOST = "at least", "at most"
Record = dict[str, Any]

MEASURED = ("parameters", "steps", "tokens", "tokens_per_second", "train_seconds", "wall_seconds")
# What is normally the same in all runs of a study, so that the record has it once.
COMMON = ("objective", "dataset", "validation_targets")
OPTIONS = ("seed", "learning_rate", "composition_learning_rate", "freeze_parent_steps", "warmup_steps")


def read_run(folder: Path) -> RunRecord:
    """Reads a finished run: its options, its measurements, and its losses after each number of tokens.

    Raises:
        UserError: its result or its losses are damaged, incomplete or gone.
    """
    fix = f"remove {folder} to repeat the run"
    try:
        result = read_json(folder / "result.json", fix)
    except FileNotFoundError as error:
        raise UserError(f"{folder} holds no result.json; {fix}") from error
    lines = read_metrics(folder / "metrics.jsonl")
    if all(line["split"] != "validation" for line in lines):
        raise UserError(f"{folder / 'metrics.jsonl'} holds no validation loss; {fix}")
    try:
        run = _run_record(folder, result, lines)
    except (LookupError, TypeError) as error:
        reason = f"do not hold a finished run: {refusal_of(error)}"
        raise UserError(f"result.json and metrics.jsonl in {folder} {reason}; {fix}") from error
    # The last line may have been cut off, and the loss before it is not the one with which the run has ended.
    if (last := run["validation"][-1]["tokens"]) != run["tokens"]:
        seen = f"has its last validation after {last:,} tokens, and the run read {run['tokens']:,}"
        raise UserError(f"{folder / 'metrics.jsonl'} {seen}; {fix}")
    return run


def _run_record(folder: Path, result: Mapping[str, Any], lines: Sequence[MetricRecord]) -> RunRecord:
    """A run from its result and the lines of its metrics."""
    is_counted = result["flops_per_second"] is not None
    return {
        **{name: result["arguments"][name] for name in OPTIONS},
        **{name: result[name] for name in ("dataset", *MEASURED)},
        **{name: result[name] for name in OF_A_RUN if name in result},
        "objective": result["arguments"].get("objective", "causal_lm"),
        "validation_targets": result.get("validation_targets") or _count_targets(folder),
        "flops_per_token": flops_per_token(lines) if is_counted else None,
        "validation": _curve(lines, "validation", ("tokens", "loss", "bits_per_byte")),
        "train": _curve(lines, "train", ("tokens", "loss")),
    }


def flops_per_token(lines: Sequence[MetricRecord]) -> float:
    """The FLOPs of a token of training, a mean over the tokens between the lines of the metrics.

    The time, which differs from run to run, cancels within a line. It would not in a quotient of the medians of both
    rates, which may be of different lines, as the FLOPs of a token depend on the documents in a sequence.
    """
    train = [line for line in lines if line["split"] == "train"]
    counts = [after - before for before, after in pairwise([0, *(line["tokens"] for line in train)])]
    costs = (line["flops_per_second"] / line["tokens_per_second"] for line in train)
    return sum(count * cost for count, cost in zip(counts, costs, strict=True)) / sum(counts)


def make_record(
    settings: Mapping[str, Any],
    arms: Mapping[str, RunsOfArm],
    labels: Mapping[str, str],
    parents: Sequence[RunRecord] = (),
) -> Record:
    """Everything that the table and the plot are made from.

    Args:
        settings: the settings of the study.
        arms: the runs of each arm; the first arm is the baseline of the others.
        labels: the names of the arms in table and plot.
        parents: the runs that all arms continue, one per seed; empty if they start from scratch.

    Raises:
        UserError: all runs of the baseline diverged.
    """
    baseline, *others = arms
    finished = {name: [run for run in runs.values() if run is not None] for name, runs in arms.items()}
    if not finished[baseline]:
        raise UserError(f"all runs of the baseline, {labels[baseline]}, diverged; give it a lower learning rate")
    runs = [*parents, *(run for runs in finished.values() for run in runs)]
    pairs = {name: compare_arms(arms[baseline], arms[name]) for name in others}
    compared = {name: comparison for name, comparison in pairs.items() if comparison is not None}
    add_holm(compared.values())
    return {
        **{name: distinct(run[name] for run in runs) for name in COMMON},
        **of_runs(runs),
        "threads": torch.get_num_threads(),
        "settings": dict(settings),
        "parents": _own_fields(parents),
        "arms": {name: {"label": labels[name], "runs": _own_fields(runs)} for name, runs in finished.items() if runs},
        "diverged": {
            name: {"label": labels[name], "seeds": seeds}
            for name, runs in arms.items()
            if (seeds := [seed for seed, run in runs.items() if run is None])
        },
        "comparison": compared,
    }


def _own_fields(runs: Sequence[RunRecord]) -> list[RunRecord]:
    """The runs without what the record says once for all of them."""
    return [{name: value for name, value in run.items() if name not in (*COMMON, *OF_A_RUN)} for run in runs]


def compare_arms(baseline: RunsOfArm, runs: RunsOfArm) -> dict[str, Any] | None:
    """Compares two arms on the `seeds` (an entry of the result) on which neither diverged; None if there are none."""
    pairs = {seed: (run, baseline[seed]) for seed, run in runs.items()}
    finished = {seed: (run, other) for seed, (run, other) in pairs.items() if run is not None and other is not None}
    if not finished:
        return None
    ours, theirs = zip(*finished.values(), strict=True)
    return {"seeds": list(finished), **compare(theirs, ours)}


def compare(baseline: Sequence[RunRecord], runs: Sequence[RunRecord]) -> dict[str, Any]:
    """Compares `runs` with those of `baseline`, paired by seed.

    Returns:
        The `paired_difference` of the last validation losses, with three further entries. `equal_seconds` is the
        difference of the losses at the time when the faster of the two had ended, None if the other had not been
        validated by then. `token_ratio` says how many times the tokens of `runs` the baseline needs for the same loss
        (above 1, `runs` learn faster): see `summarize_ratios`. `operations_ratio` is the same for FLOPs, None if the
        FLOPs of a token are not known.
    """
    pairs = list(zip(runs, baseline, strict=True))
    ratios = [token_ratio(run, other) for run, other in pairs]
    at_equal_seconds = [losses_at_equal_seconds(*pair) for pair in pairs]
    known = all(loss is not None for losses in at_equal_seconds for loss in losses)
    return {
        **paired_difference(final(runs, "loss"), final(baseline, "loss")),
        "equal_seconds": paired_difference(*zip(*at_equal_seconds, strict=True)) if known else None,
        "token_ratio": summarize_ratios(ratios),
        "operations_ratio": _operations_ratio(pairs, ratios),
    }


def _operations_ratio(pairs: Sequence[tuple[RunRecord, RunRecord]], ratios: Sequence[Limits]) -> dict[str, Any] | None:
    """Turns `ratios` of tokens into ratios of FLOPs, or returns None if the FLOPs of a token are not known."""
    if not all(one.get("flops_per_token") for pair in pairs for one in pair):
        return None
    costs = [baseline["flops_per_token"] / run["flops_per_token"] for run, baseline in pairs]
    return summarize_ratios([(low * cost, high * cost) for (low, high), cost in zip(ratios, costs, strict=True)])


def summarize_ratios(ratios: Sequence[Limits]) -> dict[str, Any] | None:
    """The geometric mean of ratios and its 95 % interval, None where the ratios have no spread.

    If some ratios are known only to be at least or at most something, so is the mean; `bound` says which, and there is
    no interval. The result is None if nothing is known of the mean.
    """
    lows, highs = zip(*ratios, strict=True)
    if lows == highs:
        logs = paired_difference([math.log(ratio) for ratio in lows], [0.0] * len(lows))
        interval = logs["interval_95"] and [math.exp(limit) for limit in logs["interval_95"]]
        return {"values": list(lows), "mean": math.exp(logs["mean"]), "interval_95": interval, "bound": None}
    if min(lows) > 0:
        return {"values": list(lows), "mean": geometric_mean(lows), "interval_95": None, "bound": AT_LEAST}
    if max(highs) < math.inf:
        return {"values": list(highs), "mean": geometric_mean(highs), "interval_95": None, "bound": AT_MOST}
    return None


def losses_at_equal_seconds(run: RunRecord, other: RunRecord) -> tuple[float | None, float | None]:
    """The losses of both runs at the time when the faster one had ended, by their median speed of training."""
    seconds = min(one["tokens"] / one["tokens_per_second"] for one in (run, other))
    first, second = (loss_at(one, seconds * one["tokens_per_second"]) for one in (run, other))
    return first, second


def token_ratio(run: RunRecord, baseline: RunRecord) -> Limits:
    """How many times the tokens of `run` the baseline needs for the higher of their last losses, which both reach.

    The better run is read in the middle of its schedule, before its learning rate has decayed, and the worse at its
    end, so that ratios are biased towards 1.
    """
    loss = max(one["validation"][-1]["loss"] for one in (run, baseline))
    (fewest, most), (baseline_fewest, baseline_most) = (tokens_to(one, loss) for one in (run, baseline))
    return baseline_fewest / most, baseline_most / fewest if fewest else math.inf


def loss_at(run: RunRecord, tokens: float) -> float | None:
    """The validation loss after `tokens` tokens, interpolated linearly; None before the first validation."""
    points = [(line["tokens"], line["loss"]) for line in run["validation"]]
    if tokens < points[0][0] * (1 - 1e-9):  # tokens computed from a time are rounded
        return None
    for (before, high), (after, low) in pairwise(points):
        if tokens <= after:
            return high + (low - high) * max(0.0, tokens - before) / (after - before)
    return points[-1][1]


def tokens_to(run: RunRecord, loss: float) -> Limits:
    """The tokens after which the validation loss is first as low as `loss`, interpolated linearly.

    If the loss was below that at the first validation, the tokens of that validation are only an upper limit.
    """
    points = [(line["tokens"], line["loss"]) for line in run["validation"]]
    first, highest = points[0]
    if highest <= loss:
        return first if highest == loss else 0.0, first
    for (before, high), (after, low) in pairwise(points):
        if low <= loss:
            tokens = before + (after - before) * (high - loss) / (high - low)
            return tokens, tokens
    return points[-1][0], points[-1][0]


def loss_unit(record: Mapping[str, Any]) -> str:
    """The unit of the losses of a study; records of earlier versions, which name no objective, are of causal models."""
    (objective,) = record.get("objective", ["causal_lm"])
    return LOSS_UNITS[objective]


def final(runs: Sequence[RunRecord], name: str) -> list[float]:
    """The last validation measurement `name` of each run."""
    return [run["validation"][-1][name] for run in runs]


def _curve(lines: Sequence[RunRecord], split: str, names: Sequence[str]) -> list[dict[str, float]]:
    return [{name: line[name] for name in names} for line in lines if line["split"] == split]


def _count_targets(folder: Path) -> int:
    """The number of held-out targets of a run of an earlier version, whose result does not have it."""
    held_out = TokenStream.open(folder / "data" / "validation")
    return len(held_out.tokens) - len(held_out.starts)
