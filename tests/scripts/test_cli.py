"""The command line's frame: jobs, arguments from YAML and options, the built-in corpus, the quickstart's table."""

import errno
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from dataclasses import asdict, dataclass, field
from multiprocessing import get_context
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import pytest
from transformers import HfArgumentParser

from dynattn import __version__
from dynattn.scripts import cli
from dynattn.scripts.common.arguments import command_line, make_parser, parse_arguments
from dynattn.scripts.common.atomic_folder import staged_folder
from dynattn.scripts.common.builtin_corpus import builtin_documents
from dynattn.scripts.common.errors import StoppedError, UserError
from dynattn.scripts.common.signals import signals_end_the_block
from dynattn.scripts.reproduce import quickstart
from dynattn.scripts.reproduce.plots import draw_losses


@dataclass
class Arguments:
    steps: int = field(metadata={"help": "how many"})
    rate: float = field(default=0.1, metadata={"help": "how fast"})
    names: list[str] | None = field(default=None, metadata={"help": "which"})


def test_an_unknown_way_of_compiling_is_one_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DYNATTN_COMPILE", "banana")
    assert cli.main(["report", "nowhere"]) == 2
    assert capsys.readouterr().err == (
        "dynattn: error: DYNATTN_COMPILE='banana' is not known; use '0', '1' or 'auto'\n"
    )


def test_jobs_are_listed_and_unknown_ones_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--help"]) == 0
    shown = capsys.readouterr().out
    assert all(f"\n  {job} " in shown for job in cli.JOBS.commands)
    assert "--import MODULE" in shown
    assert cli.main([]) == 2
    assert cli.main(["train"]) == 2
    assert "unknown job 'train'; choose from pretrain," in capsys.readouterr().err


@pytest.mark.parametrize("job", ["reproduce", "convert"])
def test_jobs_that_choose_among_others_list_each_on_a_line(job: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([job, "--help"]) == 0
    listed = [line.split()[0] for line in capsys.readouterr().out.splitlines() if line.startswith("  ")]
    assert cli.main([job, "nothing"]) == 2
    assert f"choose from {', '.join(listed)}" in capsys.readouterr().err


def test_a_users_mistake_is_one_line(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert cli.main(["pretrain", "--output", str(tmp_path / "run"), "--dataset", str(tmp_path / "none.txt")]) == 2
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert error.startswith("dynattn pretrain: error: ")
    assert "none.txt" in error


@pytest.mark.parametrize(
    ("ended", "status", "message"),
    [
        (
            StoppedError(signal.SIGTERM, "update 3 is saved"),
            128 + signal.SIGTERM,
            "stopped by SIGTERM; update 3 is saved",
        ),
        (StoppedError(0, "update 3 is saved"), 124, "stopped by max_seconds; update 3 is saved"),
        (KeyboardInterrupt(), 128 + signal.SIGINT, "interrupted"),
    ],
)
def test_what_a_signal_ends_is_one_line_of_any_job(
    ended: BaseException, status: int, message: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def main(argv: list[str]) -> int:
        raise ended

    monkeypatch.setattr("dynattn.scripts.doctor.main.main", main)
    assert cli.main(["doctor"]) == status
    assert capsys.readouterr().err == f"\n{message}\n"
    monkeypatch.setenv("RANK", "1")
    assert cli.main(["doctor"]) == status
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_job_that_a_signal_ends_removes_what_it_has_begun(
    number: int, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def main(argv: list[str]) -> int:
        with staged_folder(tmp_path / "model") as staging:
            (staging / "config.json").write_text("{}")
            os.kill(os.getpid(), number)
            time.sleep(60)
        return 0

    monkeypatch.setattr("dynattn.scripts.doctor.main.main", main)
    earlier = signal.signal(number, signal.SIG_DFL)
    assert cli.main(["doctor"]) == 128 + number
    assert signal.signal(number, earlier) == signal.SIG_DFL
    assert capsys.readouterr().err == f"\nstopped by {signal.Signals(number).name}\n"
    assert not list(tmp_path.iterdir())


def test_signals_end_forked_workers_and_processes_of_a_torchrun_themselves(monkeypatch: pytest.MonkeyPatch) -> None:
    ready = (forks := get_context("fork")).Event()

    def work() -> None:
        ready.set()
        time.sleep(60)

    with signals_end_the_block():
        worker = forks.Process(target=work)
        worker.start()
        ready.wait()
        worker.terminate()
        worker.join()
    assert worker.exitcode == -signal.SIGTERM
    monkeypatch.setenv("WORLD_SIZE", "2")
    before = signal.getsignal(signal.SIGTERM)
    with signals_end_the_block():
        assert signal.getsignal(signal.SIGTERM) == before


def test_a_job_that_loses_the_exception_of_a_signal_ends_all_the_same() -> None:
    program = """
import os, signal, time, weakref
from dynattn.scripts.common import signals
signals.GRACE_SECONDS = 0.2
class Something: pass
thing = Something()
ref = weakref.ref(thing, lambda _: os.kill(os.getpid(), signal.SIGTERM))
with signals.signals_end_the_block():
    del thing
    print("went on", flush=True)
    time.sleep(60)
"""
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=50)
    assert (ended.returncode, ended.stdout) == (-signal.SIGTERM, "went on\n")


def test_a_job_whose_reader_is_gone_ends_without_a_word(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """`--help` of a job ends by SystemExit, before what it has written reaches the pipe."""
    for argv in (["--version"], ["completion", "bash"], ["reproduce", "upcycling", "--help"]):
        reader, writer = os.pipe()
        with os.fdopen(writer, "w") as output, monkeypatch.context() as patch:
            patch.setattr(sys, "stdout", output)
            os.close(reader)
            assert cli.main(argv) == 128 + signal.SIGPIPE
            print("more", flush=True)  # goes nowhere, and is no error at the end
    assert capsys.readouterr().err == ""


def test_a_pipe_of_its_own_that_breaks_is_an_error_of_the_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def main(argv: list[str]) -> int:
        raise BrokenPipeError("a worker is gone")

    monkeypatch.setattr("dynattn.scripts.doctor.main.main", main)
    with (tmp_path / "output").open("w") as output, pytest.raises(BrokenPipeError, match="a worker is gone"):
        monkeypatch.setattr(sys, "stdout", output)
        cli.main(["doctor"])


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no device that is always full")
@pytest.mark.parametrize("argv", [["--help"], ["doctor"]])
def test_output_that_cannot_be_written_is_an_error_in_one_line(argv: list[str]) -> None:
    command = [sys.executable, "-m", "dynattn", *argv]
    with Path("/dev/full").open("w") as output:
        done = subprocess.run(command, stdout=output, stderr=subprocess.PIPE, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr == "dynattn: error: cannot write the output: No space left on device\n"


def test_an_error_of_the_job_stays_one_if_the_output_can_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def main(argv: list[str]) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("dynattn.scripts.doctor.main.main", main)
    with (tmp_path / "output").open("w") as output, pytest.raises(OSError, match="No space left"):
        monkeypatch.setattr(sys, "stdout", output)
        cli.main(["doctor"])


def test_the_module_runs_as_the_command_does() -> None:
    command = [sys.executable, "-m", "dynattn", "--version"]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout == f"dynattn {__version__}\n"


@pytest.fixture
def user_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A module in the current folder that writes a file when it is imported."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setenv(cli.IMPORTS, "")
    monkeypatch.delitem(sys.modules, "a_variant", raising=False)
    (tmp_path / "a_variant.py").write_text("open('imported', 'a').write('once')")
    return tmp_path / "imported"


@pytest.mark.parametrize("option", [["--import", "a_variant"], ["--import=a_variant"]])
def test_jobs_import_a_module_of_the_user_first(option: list[str], user_module: Path) -> None:
    assert cli.main(["convert", *option, "--help"]) == 0
    assert user_module.read_text() == "once"
    assert os.environ[cli.IMPORTS] == "a_variant"
    command = [sys.executable, "-m", "dynattn", "convert", "--help"]  # a process that a job starts imports it too
    subprocess.run(command, capture_output=True, check=True)
    assert user_module.read_text() == "onceonce"


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (
            ["convert", "--import", "no_variant"],
            "--import no_variant: ModuleNotFoundError: No module named 'no_variant'",
        ),
        (["convert", "--import"], "--import needs the name of a module"),
    ],
)
def test_a_module_that_cannot_be_imported_is_one_line(
    argv: list[str], message: str, user_module: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(argv) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith(f"dynattn: error: {message}")


def test_a_mistake_is_signed_by_the_command_that_was_given(capsys: pytest.CaptureFixture[str]) -> None:
    for argv, name in {
        ("reproduce", "vision", "--seeds", "0", "0"): "dynattn reproduce vision",
        ("reproduce", "visions"): "dynattn reproduce",
        ("evaluate", "vision", "--limit", "0"): "dynattn evaluate",
        ("evaluates",): "dynattn",
    }.items():
        assert cli.main(argv) == 2
        assert capsys.readouterr().err.startswith(f"{name}: error: ")


def test_completion_reads_unfinished_words(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["completion", "--words", "pretrain", "--import"]) == 0
    assert capsys.readouterr().err == ""


def test_signs_that_a_terminal_lacks_cost_nothing(tmp_path: Path) -> None:
    (tmp_path / "arrow.py").write_text("print('\\u2191')")
    environment = {**os.environ, "PYTHONIOENCODING": "latin-1", cli.IMPORTS: "arrow"}
    command = [sys.executable, "-m", "dynattn", "convert", "--help"]
    done = subprocess.run(command, capture_output=True, cwd=tmp_path, env=environment, check=True)
    assert done.stdout.startswith(b"?")


def test_yaml_then_options(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("steps: 3\nrate: 1e-4\nnames: [a, b]\n")
    assert parse_arguments(Arguments, [str(file)], prog="x") == Arguments(3, 1e-4, ["a", "b"])
    assert parse_arguments(Arguments, [str(file), "--steps", "5"], prog="x").steps == 5
    assert parse_arguments(Arguments, ["--steps", "5"], prog="x") == Arguments(5)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("step: 3", r"unknown arguments \['step'\]; did you mean steps\? known are \['names', 'rate', 'steps'\]"),
        ("- 3", "must hold a mapping"),
        ("[]", "must hold a mapping"),
        ("steps: [", "not valid YAML"),
        ("[" * 10_000, "not valid YAML"),
        ("steps: \udcff", "is not UTF-8 text"),
        (None, "cannot read the argument file"),
    ],
    ids=range(7),
)
def test_bad_yaml(tmp_path: Path, text: str | None, message: str) -> None:
    file = tmp_path / "run.yaml"
    if text is not None:
        file.write_text(text, errors="surrogateescape")
    with pytest.raises(UserError, match=message):
        parse_arguments(Arguments, [str(file)], prog="x")


@dataclass
class SeveralKinds:
    rates: list[float] | None = None
    names: list[str] = field(default_factory=list)
    on: str = "cpu"
    switch: bool = True
    precision: Literal["no", "bf16"] = "bf16"
    mapping: dict[str, Any] | str | None = None


def test_values_of_a_file_are_converted_as_those_of_the_command_line(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(
        "rates: [1, 1e-3, '2']\nnames: 7\non: on\nswitch: off\nprecision: no\n"
        "mapping: {on: {2: .1, yes: .5}, other: [true, no]}\n"
    )
    read = parse_arguments(SeveralKinds, [str(file)], prog="x")
    mapping = {"on": {"2": 0.1, "yes": 0.5}, "other": [True, "no"]}
    assert read == SeveralKinds([1.0, 1e-3, 2.0], ["7"], "on", False, "no", mapping)
    assert [type(rate) for rate in read.rates or []] == [float] * 3


@pytest.mark.parametrize("arguments", [Arguments(0), Arguments(5, 1e-4, ["a", "b c"])])
def test_a_command_line_gives_back_the_arguments_it_was_made_of(arguments: Arguments) -> None:
    words = shlex.split(command_line("reproduce x", asdict(arguments)))
    assert words[:3] == ["dynattn", "reproduce", "x"]
    assert parse_arguments(Arguments, words[3:], prog="x") == arguments


def test_a_command_line_names_what_is_switched_on_and_nothing_that_is_not_given() -> None:
    options = {"quick": True, "small": False, "arms": [], "seed": 0, "path": None}
    assert command_line("reproduce x", options) == "dynattn reproduce x --quick --seed 0"


def test_unknown_options() -> None:
    with pytest.raises(UserError, match="unknown options --stride 3; `x --help` lists"):
        parse_arguments(Arguments, ["--steps", "1", "--stride", "3"], prog="x")
    with pytest.raises(UserError, match="unknown options --rat 3; did you mean --rate"):  # not the beginning of --rate
        parse_arguments(Arguments, ["--steps", "1", "--rat", "3"], prog="x")


@dataclass
class EveryKind:
    text: str
    number: int = 1
    share: float | None = None
    switched_on: bool = True
    switched_off: bool = False
    choice: Literal["a", "b"] = "a"
    level: Literal[1, 2] | None = None
    sizes: list[int] = field(default_factory=lambda: [1, 2], metadata={"help": "which"})
    names: list[str] | None = None
    mapping: dict[str, int] | str | None = None


def test_options_are_those_of_transformers() -> None:
    usage = "%(prog)s [FILE.yaml] [--option value ...]"
    ours, theirs = make_parser(EveryKind, prog="x"), HfArgumentParser(EveryKind, prog="x", usage=usage)
    assert ours._option_string_actions.keys() == theirs._option_string_actions.keys()
    line = ["--text", "t", "--no-switched-on", "--switched_off", "yes", "--choice", "b", "--level", "2"]
    line += ["--sizes", "3", "4", "--names", "n", "--mapping", "{}"]
    for argv in (line, ["--text=t", "--number", "3", "--switched-on", "0", "--switched-off"]):
        assert vars(ours.parse_args(argv)) == vars(theirs.parse_args(argv))
    for argv in (["--choice", "c"], ["--number", "x"], ["--switched_on", "maybe"], ["--level", "3"], []):
        for parser in (ours, theirs):
            with pytest.raises(SystemExit):
                parser.parse_args(["--text", "t", *argv] if argv else argv)


def test_help_shows_each_option_once_with_its_default_or_that_it_is_required() -> None:
    shown = " ".join(make_parser(Arguments, prog="x").format_help().split())
    assert "--steps STEPS how many (required) --rate RATE how fast (default: 0.1)" in shown
    assert "--names NAMES [NAMES ...] which FILE.yaml" in shown
    shown = " ".join(make_parser(EveryKind, prog="x").format_help().split())
    assert "--switched_on [yes|no] --no_switched_on the opposite of --switched_on --switched_off [yes|no]" in shown
    assert "--sizes SIZES [SIZES ...] which (default: 1 2)" in shown


@dataclass
class SeveralChoices:
    trackers: list[Literal["wandb", "trackio"]] = field(default_factory=list)


def test_an_option_takes_several_of_its_choices(capsys: pytest.CaptureFixture[str]) -> None:
    assert parse_arguments(SeveralChoices, ["--trackers", "wandb", "trackio"], prog="x").trackers == [
        "wandb",
        "trackio",
    ]
    with pytest.raises(SystemExit):
        parse_arguments(SeveralChoices, ["--trackers", "tensorboard"], prog="x")
    assert "choose from" in capsys.readouterr().err


def test_the_builtin_corpus_holds_out_a_tenth_without_overlap() -> None:
    train, validation = builtin_documents("train"), builtin_documents("validation")
    sizes = [sum(map(len, documents)) for documents in (train, validation)]
    assert 0.05 < sizes[1] / sum(sizes) < 0.12
    assert sizes[0] > 200_000
    seen = {" ".join(p.split()) for document in train for p in document.split("\n\n")}
    assert not seen & {" ".join(p.split()) for document in validation for p in document.split("\n\n")}
    assert builtin_documents("train") == train
    with pytest.raises(ValueError, match="has the splits"):
        builtin_documents("test")  # type: ignore[arg-type]


@pytest.fixture
def finished_runs(tmp_path: Path) -> Path:
    """Result files as both jobs leave them, with numbers that are easy to find again."""
    for number, name in enumerate(quickstart.MODELS, start=1):
        (tmp_path / name / "evaluation").mkdir(parents=True)
        result = {"parameters": 1000 * number, "validation_loss": number, "bits_per_byte": number / 2}
        (tmp_path / name / "result.json").write_text(json.dumps(result | {"tokens_per_second": 5000.4}))
        tasks = [
            {"task": "builtin_heldout", "metrics": {"bits_per_byte": {"value": number / 4}}},
            {"task": "dynattn_synthetic", "metrics": {"acc": {"value": 0.25}}, "chance": 0.361},
        ]
        (tmp_path / name / "evaluation" / "results.json").write_text(json.dumps({"tasks": tasks}))
        lines = [
            {"step": 1, "split": "train", "tokens": 10, "loss": 3.0},
            {"step": 2, "split": "train", "tokens": 20, "loss": 2.5},
            {"step": 2, "split": "validation", "tokens": 20, "loss": 2.7},
        ]
        (tmp_path / name / "metrics.jsonl").write_text("\n".join(map(json.dumps, lines)))
    return tmp_path


def test_the_quickstarts_table_and_plot_come_from_the_runs(finished_runs: Path) -> None:
    rows = [
        [cell.strip() for cell in line.split("|")[1:-1]] for line in quickstart.comparison(finished_runs).split("\n")
    ]
    assert rows[2] == ["DCFormer", "1,000", "1.0000", "0.5000", "0.2500", "0.250 (guessing 0.361)", "5,000"]
    assert rows[3][0] == "plain Transformer"
    draw_losses(
        {label: finished_runs / name for name, label in quickstart.MODELS.items()}, finished_runs / "losses.png"
    )
    assert (finished_runs / "losses.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(("moved", "says"), [(0.004, "no more than the 0.0199"), (-0.3, "; more than the 0.0199")])
def test_the_quickstart_says_where_its_losses_fell(finished_runs: Path, moved: float, says: str) -> None:
    for name, loss in quickstart.RECORDED.items():
        (finished_runs / name / "result.json").write_text(json.dumps({"validation_loss": loss + moved}))
    shown = quickstart.placement(finished_runs, quickstart.QuickstartArguments())
    assert f"DCFormer {moved:+.4f}, plain Transformer {moved:+.4f}" in shown and says in shown
    assert quickstart.placement(finished_runs, quickstart.QuickstartArguments(seed=1)) == ""


@pytest.mark.parametrize("option", [["--max_steps", "25"], ["--seed", "1"]], ids=["max_steps", "seed"])
def test_the_quickstart_does_not_show_runs_with_other_arguments(
    option: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the two models one is finished."""
    (tmp_path / "dcformer").mkdir()
    result = {"arguments": {"max_steps": 300, "seed": 0}}
    (tmp_path / "dcformer" / "result.json").write_text(json.dumps(result))
    monkeypatch.setattr(quickstart, "run_once", None)
    assert cli.main(["quickstart", "--output", str(tmp_path), *option]) == 2
    name, value = option[0].removeprefix("--"), option[1]
    told = f"is of a run with {name}={result['arguments'][name]}, and not {value}; give another --output"
    assert told in capsys.readouterr().err
    quickstart.check_finished(tmp_path, quickstart.QuickstartArguments())


def test_the_recorded_losses_are_those_of_the_record() -> None:
    content = json.loads((Path(__file__).parents[2] / "model_cards/records/quickstart/record.json").read_text())
    losses = {name: round(runs["training"]["validation_loss"], 4) for name, runs in content.items()}
    assert losses == quickstart.RECORDED
    other = json.loads((Path(__file__).parents[2] / "model_cards/records/quickstart/other-processor.json").read_text())
    moved = [abs(other[name]["training"]["validation_loss"] - loss) for name, loss in quickstart.RECORDED.items()]
    assert quickstart.MOVED - 1e-4 < max(moved) <= quickstart.MOVED


def test_the_quickstart_refuses_fewer_updates_than_the_warmup_in_its_own_words(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = Path(quickstart.__file__).parents[1] / "pretrain" / "recipes" / "tiny.yaml"
    assert f"warmup_steps: {quickstart.WARMUP}\n" in recipe.read_text(encoding="utf-8")
    assert cli.main(["quickstart", "--output", str(tmp_path / "q"), "--max_steps", "20"]) == 2
    assert "max_steps=20 must be above 20" in capsys.readouterr().err
    assert not (tmp_path / "q").exists()


def test_the_quickstart_does_not_repeat_what_is_done(
    finished_runs: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[list[str]] = []

    def start(command: list[str]) -> SimpleNamespace:
        started.append(command)
        return SimpleNamespace(wait=lambda: 2)

    monkeypatch.setattr(subprocess, "Popen", start)
    quickstart.run_once(finished_runs / "dcformer" / "result.json", ["pretrain", "--no-such-option"])
    assert "done before" in capsys.readouterr().out
    assert not started
    with pytest.raises(UserError, match="'dynattn pretrain' did not run, as it says above"):
        quickstart.run_once(finished_runs / "missing.json", ["pretrain", "--no-such-option"])
    monkeypatch.setattr(subprocess, "Popen", lambda command: SimpleNamespace(wait=lambda: 1))
    with pytest.raises(UserError, match="'dynattn pretrain' ended with status 1; run this again"):
        quickstart.run_once(finished_runs / "missing.json", ["pretrain"])
    assert started == [[sys.executable, "-m", "dynattn.scripts.cli", "pretrain", "--no-such-option"]]


@pytest.mark.slow
def test_the_whole_quickstart(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["quickstart", "--output", str(tmp_path / "q"), "--max_steps", "25"]) == 0
    shown = capfd.readouterr().out
    assert "DCFormerForCausalLM with 1,373,568 parameters says:" in shown
    assert {"losses.png", "table.md"} <= {path.name for path in (tmp_path / "q").iterdir()}
