"""The whole study: its missing runs, then record, table and plots of all finished ones."""

from dataclasses import replace
from pathlib import Path

import torch

from ...common.atomic_file import read_json, write_json, write_whole
from ...common.compiler import check_compiler
from ...common.environment import provenance, source_commit
from ...common.errors import UserError
from ...common.folder_names import make_folder, resolve_folder
from ...common.parallel_streams import ParallelStreams
from ...compare.study_folder import RECORD, TABLE, lock_of, other_commits, write_record
from .arguments import StudyArguments
from .figures import draw_bars, draw_curves
from .plan import GROUPS, MOST_PASSES, OFFICIAL_WARMUP, QUICK, SETTINGS, WARMUP_SHARE, Group, Run, Setting, plan
from .probe import measure
from .record import check_comparable, make_record, read_runs
from .table import format_record
from .text import Corpus, load_corpus
from .training import run_one

CURVES, BARS, PROBE = "curves.png", "bars.png", "probe.json"


def run_study(arguments: StudyArguments) -> str:
    """Trains what is missing and reports all finished runs; returns the table and the names of the files.

    Raises:
        UserError: a text is missing, or the folder holds runs with other settings, or no run has finished.
    """
    output = Path(str(arguments.output))
    resolve_folder(str(output))  # refuses names that no folder can have
    if not arguments.report_only:
        train_all(arguments, output)
    return f"\n{report(output)}{output}: {RECORD}, {TABLE}, {CURVES}, {BARS}"


def train_all(arguments: StudyArguments, output: Path) -> None:
    """Makes every run that is missing, and measures an update of each type once.

    Raises:
        UserError: a text is missing, a finished run does not compare with these, or another process makes runs of this
            study.
    """
    corpora = load_corpora(arguments)
    settings = {
        group: choose_setting(arguments, GROUPS[group], corpora[GROUPS[group].corpus])
        for group in arguments.groups
        if GROUPS[group].corpus in corpora
    }
    runs = plan(settings, arguments.seeds)
    finished = [run for cell in read_runs(output).values() for run in cell]
    planned = [{"settings": run.settings(), "data": corpora[run.corpus].description} for run in runs]
    check_comparable([*finished, *planned])  # before the first run, and not when it is reported
    source_commit()  # for the files of runs, much later
    if arguments.compiled:
        check_compiler("--compiled", torch.device("cpu"))
    make_folder(output)
    with lock_of(output):
        for run in runs:
            make_once(run, corpora[run.corpus], output / run.file_name, compiled=arguments.compiled)
        if not (output / PROBE).exists():
            print("time and memory of an update", flush=True)
            probe = measure(corpora["tiny-shakespeare"], SETTINGS, rounds=5 if arguments.quick else 15)
            write_json(output / PROBE, probe, indent=1)


def load_corpora(arguments: StudyArguments) -> dict[str, Corpus]:
    """The texts that were given, by the names that groups use."""
    expect = None if arguments.other_text else "Tiny Shakespeare"
    corpora = {"tiny-shakespeare": load_corpus(str(arguments.data), expect=expect)}
    if arguments.wikitext_train and arguments.wikitext_validation:
        corpora["wikitext-2"] = load_corpus(arguments.wikitext_train, arguments.wikitext_validation)
    return corpora


def choose_setting(arguments: StudyArguments, group: Group, corpus: Corpus) -> Setting:
    """The setting of a group, changed by the arguments; warmup keeps its share of the updates, except the official."""
    setting = (QUICK if arguments.quick else SETTINGS)[group.setting]
    setting = replace(setting, streams=arguments.streams or setting.streams)
    check_lengths(corpus, setting)
    segments = len(ParallelStreams.cut(corpus.train, setting.streams, setting.segment))
    if arguments.epochs is not None:
        steps = max(1, round(arguments.epochs * segments))
    elif group.patience is not None and not (arguments.steps or arguments.quick):
        steps = MOST_PASSES * segments
    else:
        steps = arguments.steps or group.longer * setting.steps
    # A run whose end is open warms up as the official one does.
    is_official = group.setting == "official" or group.patience is not None
    warmup = OFFICIAL_WARMUP if is_official else max(1, round(WARMUP_SHARE * steps))
    return replace(setting, steps=steps, warmup=warmup, patience=group.patience)


def check_lengths(corpus: Corpus, setting: Setting) -> None:
    """Raises UserError if a text is too short for so many streams."""
    for text, streams in ((corpus.train, setting.streams), (corpus.validation, setting.evaluation_streams)):
        try:
            ParallelStreams.cut(text, streams, setting.segment)
        except ValueError as error:
            raise UserError(f"{error}; give a longer text, or fewer --streams") from error


def make_once(run: Run, corpus: Corpus, path: Path, *, compiled: bool = False) -> None:
    """Trains and scores a model, unless its file exists."""
    label = f"{run.group}: {run.variant}, seed {run.seed}"
    if path.exists():
        print(f"{label}: done before", flush=True)
        return
    checkpoint = path.with_suffix(".checkpoint.pt")
    result = run_one(run, corpus, checkpoint, compiled=compiled) | provenance()
    path.parent.mkdir(parents=True, exist_ok=True)
    write_json(path, result, indent=1)
    checkpoint.unlink(missing_ok=True)  # only now that nothing is lost with it
    bits, accuracy = (result["validation"][name] for name in ("bits_per_character", "accuracy"))
    seconds = result["wall_seconds"]
    print(f"{label}: validation {bits:.4f} bits per character, accuracy {accuracy:.4f}, {seconds:.0f} s", flush=True)


def report(output: Path) -> str:
    """Writes record, table and plots of all finished runs; returns the table, and a line if code has changed.

    Raises:
        UserError: there is no finished run, or some do not compare.
    """
    runs = read_runs(output)
    if not runs:
        raise UserError(f"{output} holds no finished run; run the study without --report_only first")
    probe = read_json(output / PROBE, "remove it to measure again") if (output / PROBE).exists() else None
    record = make_record(runs, probe)
    text = format_record(record)
    write_record(output, record)
    write_whole(output / TABLE, text)
    draw_curves(record, output / CURVES)
    draw_bars(record, output / BARS)
    return f"{text}\n{other_commits(record)}"
