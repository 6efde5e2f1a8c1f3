"""The options of `dynattn evaluate`."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from ..common.arguments import given_options, option
from ..common.errors import UserError
from ..common.number_ranges import check_seed
from .quoted import NEAREST, check_quoted
from .suites import SUITES

PYTHIA_SHOTS = (0, 5)
TASK_OPTIONS = ("tasks", "include_path", "num_fewshot", "quoted", "batch_size", "truncate", "log_samples")
# Options that have no meaning for an evaluation without lm-eval.
UNREAD = {
    "--dataset": (*TASK_OPTIONS, "seed"),
    "--suite long": (*TASK_OPTIONS, "carry_memory"),
}


@dataclass
class EvaluateArguments:
    """Arguments of one evaluation, from options or a YAML file.

    Raises:
        UserError: a value is not valid, or an option would have no effect beside the others.
    """

    model: str = field(metadata={"help": "checkpoint folder or Hub name; may be given without the option's name"})
    tokenizer: str | None = option(
        None, "tokenizer folder or Hub name, for all checkpoints; by default each has its own"
    )
    suite: Literal["builtin", "dcformer", "pythia", "long"] = option(
        "builtin",
        "builtin (held-out text and synthetic questions), dcformer (the DCFormer paper's 74 forms of "
        "in-context question), pythia (the papers' downstream tasks, whose data is on the Hub; the others need "
        "no network) or long (loss by position and pass keys in texts of up to 8 times --max_length)",
    )
    rope_parameters: str | None = option(
        None, "--suite long: rotary parameters to change, as JSON; base and rotated share stay"
    )
    tasks: list[str] | None = option(None, "names or patterns of lm-eval tasks to score instead of a suite")
    dataset: str | None = option(
        None,
        "a .txt, .json, .jsonl or .parquet file whose documents are scored in bits per byte, instead of "
        "tasks; with --suite long, the text to read",
    )
    text_column: str = option("text", "column of --dataset that holds the text")
    others: list[str] = option([], "further checkpoints to compare with the first, on --dataset or with --suite long")
    quoted: list[str] | None = option(
        None,
        "Pythia models, such as pythia-410m, whose published scores are shown too, marked as quoted; "
        "nearest is the one of the nearest size, which is the default of --suite pythia",
    )
    include_path: str | None = option(None, "folder with further lm-eval task files")
    num_fewshot: list[int] | None = option(
        None,
        "few-shot examples in the prompt; with several numbers tasks are scored with each; by default each "
        "task's own number, for --suite pythia 0 5",
    )
    limit: int | None = option(
        None, "score only this many documents of each task, from its start (--suite long: windows and pass keys)"
    )
    batch_size: int = option(8, "sequences in a forward pass; scores do not depend on it")
    max_length: int | None = option(None, "tokens of context; the model's max_position_embeddings by default")
    truncate: bool = option(False, "cut prompts that are too long from the left instead of refusing them")
    carry_memory: bool = option(
        False, "for perplexities, read each document in segments and carry the model's memory along (rcmha)"
    )
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = option("auto", "dtype of the weights; auto: as saved")
    device: str | None = option(None, "cpu, cuda, cuda:1 ...; by default a GPU if there is one")
    seed: int = option(1234, "seed for the choice of few-shot examples and of pass keys")
    trust_remote_code: bool = option(False, "run model code that comes with the checkpoint")
    output: str | None = option(
        None, "folder for results.json, results.md and samples.jsonl; by default only a table is printed"
    )
    log_samples: bool = option(False, "write every document with its scores; needs --output")
    overwrite: bool = option(False, "replace the results that are in --output")

    def __post_init__(self) -> None:
        at_least = {"limit": 1, "batch_size": 1, "max_length": 2}
        values = [(name, getattr(self, name), least) for name, least in at_least.items()]
        values += [("num_fewshot", number, 0) for number in self.num_fewshot or []]
        for name, value, least in values:
            if value is not None and (not isinstance(value, int) or value < least):
                raise UserError(f"{name} must be a whole number of at least {least}, not {value!r}")
        check_seed("seed", self.seed)
        check_quoted(self.quoted or [])
        if self.dataset is not None and (self.tasks is not None or self.suite not in ("builtin", "long")):
            raise UserError(f"dataset={self.dataset} and tasks exclude each other; evaluate them one after the other")
        if self.others and self.dataset is None and self.suite != "long":
            raise UserError(
                f"others={self.others} are compared on --dataset FILE or by --suite long; give one of these"
            )
        self._check_rope()
        self._check_unread()
        if self.log_samples and self.output is None:
            raise UserError("log_samples needs a folder to write to; give --output DIR")

    @property
    def kind(self) -> str:
        """The kind of evaluation, as messages call it: "tasks" (of lm-eval), "--dataset" or "--suite long"."""
        if self.suite == "long":
            return "--suite long"
        return "tasks" if self.dataset is None else "--dataset"

    def _check_unread(self) -> None:
        """Refuses options that would change nothing."""
        given = given_options(self)
        if unread := [name for name in UNREAD.get(self.kind, ()) if name in given]:
            raise UserError(f"{self.kind} has no {', '.join(unread)}; leave it out")
        if self.tasks is not None and self.suite != "builtin":
            raise UserError(f"tasks={self.tasks} and suite={self.suite} exclude each other; give one")
        if "text_column" in given and self.dataset is None:
            raise UserError(f"text_column={self.text_column} is of --dataset FILE; give one, or leave it out")

    def _check_rope(self) -> None:
        """Refuses rotary parameters without --suite long, or for several checkpoints."""
        if self.rope_parameters is not None and self.suite != "long":
            raise UserError(f"rope_parameters={self.rope_parameters} is for --suite long; save others in config.json")
        if self.rope_parameters is not None and self.others:
            raise UserError("rope_parameters is for a single checkpoint; evaluate the others apart")

    def task_names(self) -> Sequence[str]:
        """The named tasks, or the suite's."""
        if self.tasks is None:
            return SUITES[self.suite]
        return [name for names in self.tasks for name in str(names).split(",") if name]

    def quoted_models(self) -> Sequence[str]:
        """Names of models whose published scores are shown."""
        if self.quoted is None:
            return [NEAREST] if self.suite == "pythia" else []
        return self.quoted

    def shots(self) -> Sequence[int] | None:
        """Numbers of few-shot examples; None leaves each task its own."""
        return PYTHIA_SHOTS if self.num_fewshot is None and self.suite == "pythia" else self.num_fewshot
