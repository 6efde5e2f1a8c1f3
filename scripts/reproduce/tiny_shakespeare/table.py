"""The record of the study as Markdown."""

from collections.abc import Mapping, Sequence
from typing import Any

from ...common.markdown import table
from ...common.paired import diverged, interval_in_words, p_in_words, spread_in_words
from .plan import GROUPS
from .record import PAPER_ORDER, cells_by_group
from .text import TRAIN_SHARE

Record = Mapping[str, Any]
HEAD = ["", "seeds", "parameters", "without position tables"]
HEAD += ["validation accuracy", "training accuracy", "all training batches"]
HEAD += ["validation bits/character", "training bits/character", "tokens/s", "wall s"]
DIFFERENCES = ["difference", "seeds"]
DIFFERENCES += [head for score in ("accuracy", "bits/character") for head in (score, "95 % interval", "p")]
READING = """\
Mean ± standard deviation over seeds; a seed decides the initial weights and where in the text training starts, the same
place for all variants. *Validation*: the whole split (`--quick`: its beginning), memory carried on. *Training*: as much
text that was trained on, the last of it or, after more than a pass, the end of the split. *All training batches*:
accuracy since the first update, each batch before it was learned from; the closest to the paper's running average.
*Tokens/s* and *wall s* are of runs beside other work and do not compare variants; the table of single updates does.
Differences are paired by seed; p of a two-sided paired t-test, not corrected for the number of tests."""


def format_record(record: Record) -> str:
    """All groups, the check of the paper's order, the paper's figures, time and memory, and notes on reading them."""
    parts = [format_group(record, group, cells) for group, cells in cells_by_group(record).items()]
    orders = [format_order(order) for order in record["orders"]] or ["No seed has all four types yet."]
    parts += ["### The paper's order", *orders, format_quoted(record)]
    parts += [format_probe(record["probe"])] if record["probe"] else []
    return "\n\n".join([*parts, READING, format_cost(record)]) + "\n"


def format_group(record: Record, group: str, cells: Sequence[Mapping[str, Any]]) -> str:
    """Protocol, scores and differences of one group."""
    comparisons = [one for one in record["comparisons"] if one["group"] == group and one["seeds"]]
    parts = [f"### {GROUPS[group].corpus}: {GROUPS[group].title}", format_protocol(record, group)]
    parts += [table(HEAD, [_cells(cell) for cell in cells])]
    parts += [table(DIFFERENCES, [_difference(one) for one in comparisons])] if comparisons else []
    return "\n\n".join(parts)


def format_protocol(record: Record, group: str) -> str:
    """How the runs of a group were trained; everything except the variant is the same for all of them."""
    run = next(run for run in record["runs"] if run["settings"]["group"] == group)
    settings, model, read = run["settings"], run["settings"]["model"], run["all_training_batches"]["tokens"]
    if patience := settings.get("patience"):
        length = (
            f"Updates of {settings['streams']} streams of {settings['segment']} characters, until {patience} passes in "
            f"a row had not lowered the validation loss; validation scores are of the best pass "
            f"({_best_passes(record, group)}), training scores of the last one;"
        )
    else:
        length = (
            f"{settings['steps']:,} updates of {settings['streams']} streams of {settings['segment']} characters, "
            f"{read:,} in all or {passes(run):.2f} passes;"
        )
    texts = [f"{text['text']}, {text['split']}" for text in (run["data"][split] for split in ("train", "validation"))]
    return (
        f"Trained on {texts[0]}; validated on {texts[1]}; {run['data']['vocabulary']} different characters. "
        f"{length} memory {model['mem_len']} ({model['memory_type']}). "
        f"Learning rate (Noam): {settings['peak_learning_rate']:.3g} after {settings['warmup']:,} updates. "
        f"Weights start with deviation {model['initializer_range']}. {GROUPS[group].note}".rstrip()
    )


def _best_passes(record: Record, group: str) -> str:
    """The best pass of every run of a group, counted from 1, by variant."""
    best: dict[str, list[str]] = {}
    for run in record["runs"]:
        if run["settings"]["group"] == group:
            losses = [scores["bits_per_character"] for scores in run["validations"]]
            best.setdefault(run["settings"]["variant"], []).append(str(losses.index(min(losses)) + 1))
    return "; ".join(f"{variant} {', '.join(numbers)}" for variant, numbers in best.items())


def passes(run: Mapping[str, Any]) -> float:
    """How often a run read its training split."""
    source = run["data"]["train"]
    share = 1 if source["split"] == "whole" else TRAIN_SHARE
    return run["all_training_batches"]["tokens"] / (share * source["characters"])


def format_order(order: Mapping[str, Any]) -> str:
    """Whether the results are in the paper's order, with the tests of neighbours in that order."""
    group = GROUPS[order["group"]]
    verdict = "holds" if order["is_the_papers"] else "does not hold"
    return (
        f"**{group.corpus}, {group.title}**: {' > '.join(PAPER_ORDER)} **{verdict}** on validation accuracy. "
        f"The means give {' > '.join(order['order'])}; {len(order['seeds_in_the_papers_order'])} of "
        f"{len(order['seeds'])} seeds have the paper's order. {'; '.join(_pair(pair) for pair in order['pairs'])}."
    )


def format_quoted(record: Record) -> str:
    """The figures that the paper reports, and what they mean."""
    quoted = record["quoted"]
    head = ["quoted, not measured", *quoted["accuracy"]]
    figures = ["accuracy", *(f"{figure:.3f}" for figure in quoted["accuracy"].values())]
    return f"{table(head, [figures])}\n\n{quoted['source']} {quoted['meaning']} {quoted['memory']}"


def format_probe(probe: Mapping[str, Any]) -> str:
    """Time and memory of an update."""
    head, rows = ["an update", "", "ms", "tokens/s", "time / MHA", "peak MiB", "in all MiB"], []
    for setting, types in probe["settings"].items():
        for kind, one in types.items():
            cells = [f"{one['seconds'] * 1e3:.1f}", f"{one['tokens_per_second']:,.0f}", f"{one['times_mha']:.2f}"]
            in_all = one["peak_bytes"] + one["held_bytes"] if "held_bytes" in one else None
            sizes = ["" if size is None else f"{size / 2**20:.1f}" for size in (one["peak_bytes"], in_all)]
            rows.append([setting, kind, *cells, *sizes])
    reading = (
        f"Medians of {probe['rounds']} rounds, one update of each type by turns in one process, {probe['threads']} "
        "thread(s). Peak: the most that an update allocates above weights and optimizer state, by PyTorch's "
        "allocator. In all: with these, what the paper's figures for a whole training process are closest to."
    )
    return f"### Time and memory\n\n{table(head, rows)}\n\n{reading}"


def format_cost(record: Record) -> str:
    """Time and hardware of the runs."""
    hours = sum(run["wall_seconds"] for run in record["runs"]) / 3600
    return (
        f"{len(record['runs'])} runs, {hours:.1f} h on {', '.join(record['hardware'])} with "
        f"{', '.join(map(str, record['threads']))} thread(s), beside other work; torch "
        f"{', '.join(sorted({versions['torch'] for versions in record['versions']}))}, transformers "
        f"{', '.join(sorted({versions['transformers'] for versions in record['versions']}))}."
    )


def _cells(cell: Mapping[str, Any]) -> list[str]:
    parameters = cell["parameters"]
    scores = [
        diverged(cell[split][score], cell["seeds"]) or spread_in_words(cell[split][score], ",.4f")
        for score, splits in (
            ("accuracy", ("validation", "train", "all_training_batches")),
            ("bits_per_character", ("validation", "train")),
        )
        for split in splits
    ]
    sizes = [f"{parameters['all']:,}", f"{parameters['all'] - parameters['position_tables']:,}"]
    cost = [spread_in_words(cell[name], ",.0f") for name in ("tokens_per_second", "wall_seconds")]
    return [cell["variant"], str(len(cell["seeds"])), *sizes, *scores, *cost]


def _difference(comparison: Mapping[str, Any]) -> list[str]:
    cells = [f"{comparison['variant']} - {comparison['than'][1]}", str(len(comparison["seeds"]))]
    for score in ("accuracy", "bits_per_character"):
        one = comparison[score]
        if told := diverged(one, comparison["seeds"]):
            cells += [told, "", ""]
            continue
        cells += [f"{one['mean']:+.4f}", interval_in_words(one, "+.4f"), p_in_words(one["p"])]
    return cells


def _pair(comparison: Mapping[str, Any]) -> str:
    one = comparison["accuracy"]
    untested = "no test on one seed" if len(one["values"]) == 1 else "no spread to test"
    p = untested if one["p"] is None else f"p = {one['p']:.2g}"
    return f"{comparison['variant']} - {comparison['than'][1]}: {one['mean']:+.4f} ({p})"
