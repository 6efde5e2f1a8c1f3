"""The table of a study in Markdown, made from its record."""

import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ..common import markdown
from ..common.paired import interval_in_words, mean_in_words, name_seeds, p_in_words, spread, spread_in_words
from .record import AT_LEAST, AT_MOST, RunRecord, final, loss_unit

BOUNDS = {None: "", AT_LEAST: "\N{GREATER-THAN OR EQUAL TO} ", AT_MOST: "\N{LESS-THAN OR EQUAL TO} "}
# How to read the columns that compare what arms cost.
EFFICIENCY = (
    "At equal time: when the faster of the two has ended, by the median speed of training; empty if the other had not "
    "been validated by then. Tokens (and operations) the baseline needs, as a multiple of the arm's, for the worse of "
    "their last losses; only a bound if the better was below it at its first validation. The better is read in the "
    "middle of its schedule, before its learning rate has decayed, and the worse at its end, so these ratios are "
    "biased towards 1. "
)
METRICS = {"loss": "validation loss", "bits_per_byte": "bits per byte"}


def table(record: Mapping[str, Any]) -> str:
    """The study in Markdown: a row for the parents if there are any, a row for each arm, and notes on how to read it.

    There are columns for bits per byte, losses at equal time, and ratios of tokens and FLOPs if they were measured, and
    for tokens if arms read different numbers of them.
    """
    compared = record["comparison"]
    timed = bool(compared) and all("equal_seconds" in comparison for comparison in compared.values())
    arms = record["arms"].values()
    measured = [
        name for name in METRICS if any(value is not None for arm in arms for value in final(arm["runs"], name))
    ]
    differ = _tokens_differ(record)
    head = ["", "parameters", *["tokens"] * differ, *(METRICS[name] for name in measured)]
    head += ["difference", "95 % interval", "p"]
    head += ["difference at equal time", "tokens the baseline needs"] if timed else []
    counted = timed and any(comparison.get("operations_ratio") for comparison in compared.values())
    head += ["operations the baseline needs"] if counted else []
    head += ["tokens/s"]
    rows = []
    if record["parents"]:
        sizes = _sizes("parent, before", record["parents"], differ, measured)
        rows.append([*sizes, *[""] * (len(head) - len(sizes))])
    for name, arm in record["arms"].items():
        speed = statistics.median(run["tokens_per_second"] for run in arm["runs"])
        sizes = _sizes(arm["label"], arm["runs"], differ, measured)
        cells = [""] * (len(head) - len(sizes) - 1)
        if name in compared:
            cells = _difference(compared[name]) + (_efficiency(compared[name], counted) if timed else [])
        rows.append([*sizes, *cells, f"{speed:,.0f}"])
    return f"{markdown.table(head, rows)}\n\n{_reading(record, timed)}"


def _tokens_differ(record: Mapping[str, Any]) -> bool:
    return len({run["tokens"] for arm in record["arms"].values() for run in arm["runs"]}) > 1


def _sizes(label: str, runs: Sequence[RunRecord], tokens_differ: bool, measured: Sequence[str]) -> list[str]:
    tokens = [_numbers(run["tokens"] for run in runs)] if tokens_differ else []
    return [label, f"{runs[0]['parameters']:,}", *tokens, *(_spread(final(runs, name)) for name in measured)]


def _numbers(values: Iterable[int]) -> str:
    """Each of the values once; normally there is only one."""
    return " or ".join(f"{value:,}" for value in sorted(set(values)))


def _spread(values: Sequence[float | None]) -> str:
    """Mean and standard deviation, or nothing where nothing was measured."""
    measured = [value for value in values if value is not None]
    return spread_in_words(spread(measured), ".4f") if measured else ""


def _difference(comparison: Mapping[str, Any]) -> list[str]:
    p = comparison.get("p_holm", comparison["p"])
    return [f"{comparison['mean']:+.4f}", interval_in_words(comparison, "+.4f"), p_in_words(p)]


def _efficiency(comparison: Mapping[str, Any], counted: bool) -> list[str]:
    timed = comparison["equal_seconds"]
    ratios = [comparison["token_ratio"], *([comparison["operations_ratio"]] if counted else [])]
    return ["" if timed is None else mean_in_words(timed, "+.4f"), *map(_ratio, ratios)]


def _ratio(ratio: Mapping[str, Any] | None) -> str:
    """A ratio with its interval, or only a bound of the ratio; empty if neither is known."""
    if ratio is None:
        return ""
    interval = interval_in_words(ratio, ".2f")
    return f"{BOUNDS[ratio.get('bound')]}{ratio['mean']:.2f} x" + (f" ({interval})" if interval else "")


def _reading(record: Mapping[str, Any], timed: bool) -> str:
    arms = record["arms"]
    seeds = {run["seed"] for arm in arms.values() for run in arm["runs"]}
    count = len(record["comparison"])
    corrected = any("p_holm" in comparison for comparison in record["comparison"].values())
    comparisons = f"{count} comparison{'s' * (count != 1)}"
    correction = f"corrected for {comparisons} (Holm)" if corrected else f"not corrected for {comparisons}"
    equal = "Tokens are equal; parameters and computation are not."
    if _tokens_differ(record):
        equal = "Tokens, parameters and computation are not equal."
    quoted = record.get("quoted")
    line = f" Quoted: {quoted['label']}, {quoted['source']}." if quoted else ""
    return (
        f"Mean ± standard deviation over {len(seeds)} seeds ({_decided_by_seeds(record)}); {_spent(record)}; "
        f"loss in {loss_unit(record)} on {_numbers(record['validation_targets'])} held-out tokens. Difference: paired "
        f"by seed, from {next(iter(arms.values()))['label']}; p of a two-sided paired t-test, {correction}. "
        f"{EFFICIENCY if timed else ''}{_learning_rates(record)} {equal}{line}{_diverged(record)}"
    )


def _decided_by_seeds(record: Mapping[str, Any]) -> str:
    """What differs between seeds: if the study did not train the parents, only weights that it adds are random."""
    settings = record["settings"]
    variants = settings.get("variants", {}).values()
    is_given = isinstance(settings.get("parent"), str) or (variants and all(map(_is_trained, variants)))
    return "order of the data, and weights that are added" if is_given else "initial weights and order of the data"


def _is_trained(options: Mapping[str, Any]) -> bool:
    """Whether the runs of a variant continue a checkpoint."""
    return options.get("init_from") is not None


def _spent(record: Mapping[str, Any]) -> str:
    """The tokens that runs have read."""
    first = next(iter(record["arms"].values()))["runs"][0]["tokens"]
    rows = "tokens as in the table" if _tokens_differ(record) else f"{first:,} tokens for each row"
    parents = record["parents"]
    return f"{parents[0]['tokens']:,} tokens for each parent, then {rows}" if parents else rows


def _diverged(record: Mapping[str, Any]) -> str:
    """Which arms diverged on which seeds, and on which they are compared nevertheless."""
    sentences = []
    for name, arm in record.get("diverged", {}).items():
        what = f" {arm['label']} diverged on {name_seeds(arm['seeds'])}"
        if name == next(iter(record["arms"])):
            sentences.append(f"{what}, of which there is no comparison.")
        elif name in record["comparison"]:
            sentences.append(f"{what}; the comparison is of {name_seeds(record['comparison'][name]['seeds'])}.")
        else:
            sentences.append(f"{what}; there is no comparison.")
    return "".join(sentences)


def _learning_rates(record: Mapping[str, Any]) -> str:
    grid, tuning_seed = record["settings"]["learning_rates"], record["settings"]["tuning_seed"]
    tuned = len(grid or ()) > 1
    choice = f"chosen on seed {tuning_seed} from {', '.join(f'{rate:g}' for rate in grid)}" if tuned else "not tuned"
    rates = "; ".join(f"{arm['label']} {arm['runs'][0]['learning_rate']:g}" for arm in record["arms"].values())
    return f"Learning rates ({choice}): {rates}."
