"""Trains, evaluates, saves and reloads a small DCFormer beside a plain Transformer.

    dynattn quickstart --output runs/quickstart

Every step is a command that is printed before it runs. Steps that an interrupted call has finished are skipped.
"""

import json
import shlex
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...configuration.mixers import NO_COMPOSITION
from ..common.arguments import option, parse_arguments
from ..common.atomic_file import read_json, write_json, write_whole
from ..common.errors import StoppedError, UserError
from ..common.folder_names import make_folder
from ..common.markdown import aligned_table
from ..common.metric_records import read_metrics
from ..common.signals import signals_received

MODELS = {"dcformer": "DCFormer", "transformer": "plain Transformer"}
# The MLP is wider, so that the plain Transformer has about as many parameters as the DCFormer with its composition.
PLAIN = {**NO_COMPOSITION, "intermediate_size": 381}
# A multiple of 36: among so many items of a multiple-choice task, the right answer is equally often at every position.
SAMPLES_OF_A_TASK = 36
# Validation losses of the record with default arguments, and by how much those of the second record differ (another
# processor and earlier code), rounded up.
RECORDED = {"dcformer": 4.7872, "transformer": 4.8444}
MOVED = 0.0146
# Every version of Python has another text.
RECORDED_TEXT = "pydoc_data.topics of CPython 3.11.7"
# The `warmup_steps` of tiny.yaml, with which both models are trained.
WARMUP = 20
# Lines of the plot, in the order of MODELS.
STYLES = ("-", "--")
# The exit status of a job that has refused its arguments or its input: running it again would end the same way.
REFUSED = 2
PROMPT = 'The "for" statement'
GENERATE = """
import sys
import dynattn
from transformers import AutoModelForCausalLM, AutoTokenizer, set_seed
folder, prompt = sys.argv[1:]
set_seed(0)
tokenizer = AutoTokenizer.from_pretrained(folder)
model = AutoModelForCausalLM.from_pretrained(folder)
inputs = tokenizer(prompt, return_tensors="pt")
output = model.generate(**inputs, max_new_tokens=60, do_sample=True, temperature=0.7, top_k=50)
print(type(model).__name__, "with", f"{model.num_parameters():,}", "parameters says:")
print(tokenizer.decode(output[0], skip_special_tokens=True))
"""


@dataclass
class QuickstartArguments:
    """Arguments of the quickstart."""

    output: str = option("runs/quickstart", "folder for both runs, the table and the plot")
    max_steps: int = option(300, "updates of each model")
    seed: int = option(0, "seed of both runs")

    def __post_init__(self) -> None:
        """Raises UserError unless there are updates after the warmup."""
        if self.max_steps <= WARMUP:
            raise UserError(
                f"max_steps={self.max_steps} must be above {WARMUP}, the updates until the full learning rate"
            )


def main(argv: Sequence[str]) -> int:
    """Trains and evaluates both models, prints the comparison, and reloads the DCFormer in a fresh process."""
    arguments = parse_arguments(QuickstartArguments, argv, prog="dynattn quickstart", description=__doc__)
    output = Path(arguments.output)
    make_folder(output)
    check_finished(output, arguments)
    for name in MODELS:
        run_once(output / name / "result.json", pretrain_command(output, name, arguments))
    for name in MODELS:
        folder, model = output / name / "evaluation", str(output / name / "model")
        options = ["--limit", str(SAMPLES_OF_A_TASK), "--output", str(folder)]
        run_once(folder / "results.json", ["evaluate", model, *options])
    table = comparison(output)
    write_whole(output / "table.md", table + "\n")
    write_json(output / "record.json", record(output), indent=1)
    draw_losses({label: output / name for name, label in MODELS.items()}, output / "losses.png")
    print(f"\n{table}\n\n{placement(output, arguments)}", flush=True)
    generate(output / "dcformer" / "model")
    print(closing_words(output))
    return 0


def check_finished(output: Path, arguments: QuickstartArguments) -> None:
    """Raises UserError if the folder holds a finished run with other arguments, or the result of something else.

    Otherwise these would be shown in place of what was asked for.
    """
    for file in filter(Path.exists, (output / name / "result.json" for name in MODELS)):
        trained = read_json(file, f"remove the folder {file.parent} to train anew").get("arguments")
        if not isinstance(trained, dict) or not {"max_steps", "seed"} <= trained.keys():
            raise UserError(f"{file} is not the result of a run of dynattn pretrain; give another --output")
        for setting in ("max_steps", "seed"):
            if trained[setting] != (asked := getattr(arguments, setting)):
                raise UserError(
                    f"{file} is of a run with {setting}={trained[setting]}, and not {asked}; give another --output"
                )


def pretrain_command(output: Path, name: str, arguments: QuickstartArguments) -> list[str]:
    """The command line of one run; data, tokenizer, seed and updates are the same for both."""
    command = ["pretrain", "tiny.yaml", "--output", str(output / name)]
    command += ["--max_steps", str(arguments.max_steps), "--seed", str(arguments.seed)]
    if name == "transformer":
        command += ["--tokenizer", str(output / "dcformer" / "model"), "--model_config", json.dumps(PLAIN)]
    return command


def run_once(result: Path, command: Sequence[str]) -> None:
    """Runs `dynattn COMMAND` in a process of its own, unless it has already left `result`.

    Raises:
        UserError: the command failed; what it printed says why.
        StoppedError: a signal came, and the command has ended.
    """
    print(f"\n$ dynattn {shlex.join(command)}", flush=True)
    if result.exists():
        print(f"  done before: {result}", flush=True)
        return
    working: list[subprocess.Popen[bytes]] = []

    def pass_on(number: int) -> None:
        for process in working:
            if number != signal.SIGINT:  # which a terminal sends to that process itself
                process.send_signal(number)

    with signals_received(pass_on) as requested:
        working.append(subprocess.Popen([sys.executable, "-m", "dynattn.scripts.cli", *command]))
        if requested:  # The signal came while the process was started, and could not be passed on yet.
            pass_on(requested[0])
        status = working[0].wait()
    if requested:
        raise StoppedError(requested[0], "run this again to go on from there")
    if status == REFUSED:
        raise UserError(f"'dynattn {command[0]}' did not run, as it says above")
    if status:
        raise UserError(f"'dynattn {command[0]}' ended with status {status}; run this again to go on from there")


def comparison(output: Path) -> str:
    """The table of both runs, in Markdown."""
    head = ["model", "parameters", "validation loss", "bits per byte"]
    head += ["lm-eval bits per byte", "in-context tasks acc", "training tokens/s"]
    rows = []
    for name, label in MODELS.items():
        result = read_result(output, name)
        scores = {task["task"]: task for task in read_evaluation(output, name)["tasks"]}
        accuracy = scores["dynattn_synthetic"]
        rows.append(
            [
                label,
                f"{result['parameters']:,}",
                f"{result['validation_loss']:.4f}",
                f"{result['bits_per_byte']:.4f}",
                f"{scores['builtin_heldout']['metrics']['bits_per_byte']['value']:.4f}",
                f"{accuracy['metrics']['acc']['value']:.3f} (guessing {accuracy['chance']:.3f})",
                f"{result['tokens_per_second']:,.0f}",
            ]
        )
    return "\n".join(aligned_table(head, rows))


def placement(output: Path, arguments: QuickstartArguments) -> str:
    """How far the validation losses are from the recorded ones; nothing where other arguments were given.

    Only losses of the same text are compared with the spread of the record.
    """
    if (arguments.max_steps, arguments.seed) != (QuickstartArguments.max_steps, QuickstartArguments.seed):
        return ""
    results = {name: read_result(output, name) for name in MODELS}
    moved = {name: result["validation_loss"] - RECORDED[name] for name, result in results.items()}
    distances = ", ".join(f"{MODELS[name]} {distance:+.4f}" for name, distance in moved.items())
    usual = max(map(abs, moved.values())) <= MOVED
    verdict = f"{'no more' if usual else 'more'} than the {MOVED} by which a second recorded machine was off"
    if {result["dataset"] for result in results.values()} != {RECORDED_TEXT}:
        verdict = f"those are of another text, {RECORDED_TEXT}"
    return f"Validation losses from the recorded ones: {distances}; {verdict}.\n"


def record(output: Path) -> dict[str, Any]:
    """Everything that the table and the plot are made from: settings, results, versions and hardware."""
    return {
        name: {
            "training": read_result(output, name),
            "evaluation": read_evaluation(output, name),
            "losses": read_metrics(output / name / "metrics.jsonl"),
        }
        for name in MODELS
    }


def draw_losses(runs: Mapping[str, Path], path: Path) -> None:
    """Draws training losses (lines) and validation losses (marked) of runs, by label, from their `metrics.jsonl`."""
    from ..common.figures import MARKERS, plt, save  # Matplotlib is not needed before the runs have ended

    figure, axes = plt.subplots(figsize=(7, 4.5), dpi=150, layout="tight")
    colors = plt.rcParams["axes.prop_cycle"].by_key()["color"]
    for color, marker, style, (label, run) in zip(colors, MARKERS, STYLES, runs.items(), strict=False):
        train, validation = (read_metrics(run / "metrics.jsonl", split) for split in ("train", "validation"))
        axes.plot([line["tokens"] for line in train], [line["loss"] for line in train], style, color=color, lw=1)
        axes.plot(
            [line["tokens"] for line in validation],
            [line["loss"] for line in validation],
            style,
            color=color,
            marker=marker,
            label=f"{label} (marked: validation)",
        )
    axes.set_xlabel("training tokens")
    axes.set_ylabel("loss, nats per token")
    axes.grid(alpha=0.3)
    axes.legend()
    save(figure, path)


def read_result(output: Path, name: str) -> dict[str, Any]:
    """The result of the training of one of the models."""
    return read_json(output / name / "result.json", f"remove the folder {output / name} to train anew")


def read_evaluation(output: Path, name: str) -> dict[str, Any]:
    """The results of the evaluation of one of the models."""
    return read_json(output / name / "evaluation" / "results.json", "remove it to evaluate anew")


def generate(model: Path) -> None:
    """Loads the saved model by its Auto classes in a fresh process and generates text."""
    print("Loading the saved DCFormer with AutoModelForCausalLM in a fresh process:\n", flush=True)
    status = subprocess.run([sys.executable, "-c", GENERATE, str(model), PROMPT], check=False).returncode
    if status:
        raise UserError(f"loading {model} in a fresh process ended with status {status}")


def closing_words(output: Path) -> str:
    """Where the files are, and what to try next."""
    return f"""
One seed of two very small models: the table shows that everything works, it does not compare the architectures.

{output / "losses.png"}          loss curves of both runs
{output / "table.md"}            the table above; record.json beside it holds all that it was made from
{output / "dcformer/model"}      the trained model, its tokenizer and its card
{output / "dcformer"}            metrics.jsonl, TensorBoard logs, checkpoints, evaluation/results.json

Next:
  dynattn pretrain tiny.yaml --output runs/mine --dataset my_text.txt --max_steps 1000
  dynattn evaluate {output / "dcformer/model"} --suite pythia          (needs a network)
  dynattn publish {output / "dcformer/model"}                          (a folder that loads without this package)"""
