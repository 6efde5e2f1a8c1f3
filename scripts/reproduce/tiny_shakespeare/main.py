"""The RCMHA paper's comparison of MHA, MDHA, RMHA and RCMHA on characters, with training and validation kept apart.

    dynattn reproduce tiny-shakespeare --data tinyshakespeare.txt [--quick]

Trains all four attention types under one protocol, at the official segment of 2 characters and at one of 128, with
several seeds; then ablations of RCMHA, and WikiText-2 characters where `--wikitext_train` and `--wikitext_validation`
are given. Finished runs are not repeated, so an interrupted study goes on where it stopped, and more seeds can follow.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ...common.arguments import parse_arguments
from ...common.atomic_file import write_json, write_whole
from ...common.errors import UserError
from ...common.token_streams import TokenStreams
from .figures import draw_bars, draw_curves
from .plan import GROUPS, QUICK, SETTINGS, WARMUP_SHARE, Group, Run, Setting, plan
from .probe import measure
from .record import make_record, read_runs
from .table import format_record
from .text import Corpus, load_corpus
from .training import run_one

RECORD, TABLE, CURVES, BARS, PROBE = "record.json", "table.md", "curves.png", "bars.png", "probe.json"


@dataclass
class StudyArguments:
    """Arguments of the study.

    Raises:
        UserError: a value is out of its range, or a text is missing.
    """

    output: str | None = field(
        default=None,
        metadata={"help": "folder of the study; runs/tiny-shakespeare, with --quick runs/tiny-shakespeare-quick"},
    )
    data: str | None = field(default=None, metadata={"help": "Tiny Shakespeare: a file or a Hub dataset"})
    wikitext_train: str | None = field(default=None, metadata={"help": "characters to train on: a file or Hub dataset"})
    wikitext_validation: str | None = field(default=None, metadata={"help": "characters to validate on"})
    other_text: bool = field(default=False, metadata={"help": "take a text that is not the one of the known checksum"})
    groups: list[str] = field(
        default_factory=lambda: list(GROUPS), metadata={"help": f"groups of runs, in order: {', '.join(GROUPS)}"}
    )
    seeds: list[int] = field(default_factory=lambda: [0, 1, 2], metadata={"help": "seeds of every group"})
    steps: int | None = field(default=None, metadata={"help": "updates of each run, in place of the setting's"})
    epochs: float | None = field(
        default=None, metadata={"help": "passes over the text of each run, in place of steps; the paper's are 10"}
    )
    streams: int | None = field(default=None, metadata={"help": "texts side by side, in place of the setting's"})
    quick: bool = field(default=False, metadata={"help": "few updates, two seeds and short scoring: minutes"})
    report_only: bool = field(default=False, metadata={"help": "train nothing, report the runs that are finished"})

    def __post_init__(self) -> None:
        if self.quick:
            self.seeds = self.seeds[:2]
        self.output = self.output or f"runs/tiny-shakespeare{'-quick' if self.quick else ''}"
        if unknown := [group for group in self.groups if group not in GROUPS]:
            raise UserError(f"there is no group {unknown[0]!r}; choose from {', '.join(GROUPS)}")
        if not self.seeds or len(set(self.seeds)) < len(self.seeds):
            raise UserError(f"seeds={self.seeds} must be one or more different ones")
        for name in ("steps", "epochs", "streams"):
            value = getattr(self, name)
            if value is not None and value <= 0:
                raise UserError(f"{name}={value} must be positive")
        if self.steps is not None and self.epochs is not None:
            raise UserError(f"steps={self.steps} and epochs={self.epochs} both say how long to train; give one")
        if (self.wikitext_train is None) != (self.wikitext_validation is None):
            raise UserError("give both --wikitext_train and --wikitext_validation, or neither")


def main(argv: Sequence[str]) -> int:
    """Trains what is missing, then writes and prints what came out."""
    arguments = parse_arguments(StudyArguments, argv, prog="dynattn reproduce tiny-shakespeare", description=__doc__)
    output = Path(str(arguments.output))
    if not arguments.report_only:
        train_all(arguments, output)
    print(f"\n{report(output)}\n{output}: {RECORD}, {TABLE}, {CURVES}, {BARS}")
    return 0


def train_all(arguments: StudyArguments, output: Path) -> None:
    """Makes every run that is not there yet, and measures an update of each type once."""
    corpora = load_corpora(arguments)
    settings = {
        group: choose_setting(arguments, GROUPS[group], corpora[GROUPS[group].corpus])
        for group in arguments.groups
        if GROUPS[group].corpus in corpora
    }
    for run in plan(settings, arguments.seeds):
        make_once(run, corpora[run.corpus], output / run.file_name)
    if not (output / PROBE).exists():
        print("time and memory of an update", flush=True)
        probe = measure(corpora["tiny-shakespeare"], SETTINGS, rounds=5 if arguments.quick else 15)
        write_json(output / PROBE, probe, indent=1)


def load_corpora(arguments: StudyArguments) -> dict[str, Corpus]:
    """The texts that were given, by the names that groups know them by."""
    if not arguments.data:
        raise UserError("give --data, a file with Tiny Shakespeare or the name of a Hub dataset that holds it")
    expect = None if arguments.other_text else "Tiny Shakespeare"
    corpora = {"tiny-shakespeare": load_corpus(arguments.data, expect=expect)}
    if arguments.wikitext_train and arguments.wikitext_validation:
        corpora["wikitext-2"] = load_corpus(arguments.wikitext_train, arguments.wikitext_validation)
    return corpora


def choose_setting(arguments: StudyArguments, group: Group, corpus: Corpus) -> Setting:
    """The setting of a group with what the arguments change; warmup keeps its share of the updates unless official."""
    setting = (QUICK if arguments.quick else SETTINGS)[group.setting]
    setting = replace(setting, streams=arguments.streams or setting.streams)
    steps = arguments.steps or group.longer * setting.steps
    if arguments.epochs is not None:
        segments = len(TokenStreams.cut(corpus.train, setting.streams, setting.segment))
        steps = max(1, round(arguments.epochs * segments))
    warmup = setting.warmup if group.setting == "official" else max(1, round(WARMUP_SHARE * steps))
    return replace(setting, steps=steps, warmup=warmup)


def make_once(run: Run, corpus: Corpus, path: Path) -> None:
    """Trains and scores a model, unless its file is there.

    Raises:
        UserError: the file is of a run with other settings.
    """
    label = f"{run.group}: {run.variant}, seed {run.seed}"
    if path.exists():
        check_same(json.loads(path.read_text(encoding="utf-8")), run, corpus, path)
        print(f"{label}: done before", flush=True)
        return
    result = run_one(run, corpus, path.with_suffix(".checkpoint.pt"))
    path.parent.mkdir(parents=True, exist_ok=True)
    write_json(path, result, indent=1)
    bits, accuracy = (result["validation"][name] for name in ("bits_per_character", "accuracy"))
    seconds = result["wall_seconds"]
    print(f"{label}: validation {bits:.4f} bits per character, accuracy {accuracy:.4f}, {seconds:.0f} s", flush=True)


def check_same(result: Mapping[str, Any], run: Run, corpus: Corpus, path: Path) -> None:
    """Raises UserError where a finished run had other settings or another text."""
    wanted = {"settings": json.loads(json.dumps(run.settings())), "data": corpus.sources}
    stored = {"settings": result["settings"], "data": {name: result["data"].get(name) for name in corpus.sources}}
    if stored != wanted:
        raise UserError(f"{path} is a run with other settings or another text; give another --output")


def report(output: Path) -> str:
    """Writes record, table and plots of the finished runs, however many there are; returns the table.

    Raises:
        UserError: there is none.
    """
    runs = read_runs(output)
    if not runs:
        raise UserError(f"{output} holds no finished run; run the study without --report_only first")
    probe = json.loads((output / PROBE).read_text(encoding="utf-8")) if (output / PROBE).exists() else None
    record = make_record(runs, probe)
    text = format_record(record)
    write_json(output / RECORD, record, indent=1)
    write_whole(output / TABLE, text)
    draw_curves(record, output / CURVES)
    draw_bars(record, output / BARS)
    return text
