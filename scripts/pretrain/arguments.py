"""The arguments of `dynattn pretrain`: their meanings, defaults and ranges."""

import json
import math
from dataclasses import dataclass, field, fields
from typing import Any, Literal, get_args

from ..common.errors import UserError

Precision = Literal["no", "bf16"]
EngineName = Literal["ddp", "fsdp2", "hsdp"]

POSITIVE = (
    "vocab_size",
    "batch_size",
    "gradient_accumulation_steps",
    "max_steps",
    "epochs",
    "learning_rate",
    "composition_learning_rate",
    "max_grad_norm",
    "adam_epsilon",
    "shard_processes",
    "max_seconds",
    "log_every",
    "eval_every",
    "save_every",
)
# Smaller numbers are zero, or nearly, in float32: a weight without a gradient would be divided by them.
SMALLEST_EPSILON = 1e-37
NOT_NEGATIVE = ("freeze_parent_steps", "warmup_steps", "weight_decay", "dataloader_workers", "keep_checkpoints")
FRACTIONS = ("min_learning_rate_ratio", "adam_beta1", "adam_beta2")
# Adam never forgets with a decay of 1.
BELOW_ONE = ("adam_beta1", "adam_beta2")
# A norm of infinity clips nothing.
MAY_BE_INFINITE = ("max_grad_norm",)
LARGEST_INTEGER = 2**31 - 1
# NumPy takes seeds below 2**32, and each process adds its number.
LARGEST_SEED = 2**32 - 2**16
MOST_WORKERS = 1024


@dataclass
class PretrainArguments:
    """Arguments of one run; a YAML file holds the same names.

    Raises:
        UserError: a value is out of its range, or two values contradict each other.
    """

    output: str = field(metadata={"help": "folder of the run: checkpoints, metrics, final model"})

    model_type: str | None = field(
        default=None, metadata={"help": "architecture to train from scratch; dcformer when not given"}
    )
    model_size: str | None = field(
        default=None, metadata={"help": "named size of the architecture; tiny when not given and it has sizes"}
    )
    model_config: dict[str, Any] | str | None = field(
        default=None, metadata={"help": "changes to the configuration: a mapping in YAML, JSON on the command line"}
    )
    init_from: str | None = field(
        default=None, metadata={"help": "checkpoint folder or Hub name to continue from, instead of fresh weights"}
    )
    attn_implementation: str | None = field(
        default=None, metadata={"help": "attention implementation; the model's default when not given"}
    )

    dataset: str = field(
        default="builtin",
        metadata={"help": "builtin, a .txt/.jsonl/.parquet file, glob or folder, or a Hub dataset name"},
    )
    dataset_config: str | None = field(default=None, metadata={"help": "configuration name of a Hub dataset"})
    train_split: str = field(default="train", metadata={"help": "split of a Hub dataset to train on"})
    validation_split: str | None = field(default=None, metadata={"help": "split of a Hub dataset to validate on"})
    validation_dataset: str | None = field(
        default=None, metadata={"help": "file, glob, folder or Hub dataset to validate on"}
    )
    validation_share: float = field(
        default=0.05, metadata={"help": "share of the documents to hold out when no validation data is named"}
    )
    text_column: str = field(default="text", metadata={"help": "column that holds the text"})

    tokenizer: str | None = field(
        default=None,
        metadata={"help": "bpe (train one on the data), a folder or a Hub name; if not given: init_from, or bpe"},
    )
    vocab_size: int = field(default=8192, metadata={"help": "vocabulary of the tokenizer that bpe trains"})

    sequence_length: int = field(default=256, metadata={"help": "tokens in each packed sequence"})
    mask_documents: bool = field(
        default=True, metadata={"help": "keep attention inside each document of a packed sequence"}
    )

    carry_memory: bool = field(
        default=False,
        metadata={
            "help": "read the corpus as streams, one for each sequence of an update, and carry the model's memory from "
            "update to update; for models that have one (rcmha)"
        },
    )

    batch_size: int = field(default=8, metadata={"help": "sequences in one forward pass of one process"})
    gradient_accumulation_steps: int = field(default=1, metadata={"help": "forward passes that make one update"})
    max_steps: int | None = field(default=None, metadata={"help": "updates to make; give this or epochs"})
    epochs: float | None = field(
        default=None, metadata={"help": "passes over the data; one when max_steps is not given either"}
    )
    learning_rate: float = field(default=1e-3, metadata={"help": "peak of the schedule"})
    composition_learning_rate: float | None = field(
        default=None, metadata={"help": "peak for the weights that compose heads; learning_rate when not given"}
    )
    freeze_parent_steps: int = field(
        default=0, metadata={"help": "first updates in which only the weights that compose heads learn"}
    )
    min_learning_rate_ratio: float = field(
        default=0.1, metadata={"help": "end of the cosine, as a fraction of the peak"}
    )
    warmup_steps: int | None = field(
        default=None,
        metadata={
            "help": "updates of linear warmup, at the start (with init_from too) and when frozen weights begin to "
            "learn; a fiftieth of all when not given"
        },
    )
    weight_decay: float = field(
        default=0.1, metadata={"help": "decay of matrices; embeddings, biases and norms have none"}
    )
    adam_beta1: float = field(default=0.9, metadata={"help": "AdamW's first moment"})
    adam_beta2: float = field(default=0.95, metadata={"help": "AdamW's second moment"})
    adam_epsilon: float = field(default=1e-8, metadata={"help": "AdamW's epsilon"})
    max_grad_norm: float = field(default=1.0, metadata={"help": "gradients are clipped to this norm"})

    seed: int = field(default=0, metadata={"help": "seed of the initial weights, the order of the data and dropout"})
    mixed_precision: Precision = field(
        default="no", metadata={"help": "no (float32) or bf16 (autocast; weights stay float32)"}
    )
    engine: EngineName | None = field(
        default=None,
        metadata={
            "help": "how processes share the model: ddp (each has all of it), fsdp2 (each a shard) or hsdp (shards in "
            "a machine, replicas over machines); ddp when neither this nor `accelerate launch` says"
        },
    )
    shard_processes: int | None = field(
        default=None, metadata={"help": "hsdp: processes that share a replica; those of a machine when not given"}
    )
    gradient_checkpointing: bool = field(
        default=False,
        metadata={"help": "save memory: recompute a layer in its backward pass, all but the outputs of its attention"},
    )
    compile: bool = field(default=False, metadata={"help": "compile the model with torch.compile"})
    dataloader_workers: int = field(default=0, metadata={"help": "processes that prepare batches"})

    log_every: int = field(default=10, metadata={"help": "updates between two lines of training metrics"})
    eval_every: int = field(
        default=100, metadata={"help": "updates between two validations; the last update is always validated"}
    )
    save_every: int = field(
        default=100, metadata={"help": "updates between two checkpoints; the last update is always saved"}
    )
    save_in_background: bool = field(
        default=False,
        metadata={"help": "go on training while a checkpoint is written, from a copy in the memory of the CPU"},
    )
    max_seconds: float | None = field(
        default=None,
        metadata={"help": "stop after the update in which this time since the start is over, with a checkpoint"},
    )
    keep_checkpoints: int = field(default=3, metadata={"help": "newest checkpoints to keep; 0 keeps all"})
    resume: str = field(
        default="auto",
        metadata={
            "help": "auto (newest checkpoint of the output folder), intact (the newest that is not damaged), never, or "
            "a checkpoint folder"
        },
    )
    overwrite: bool = field(default=False, metadata={"help": "replace the run that the output folder holds"})

    def __post_init__(self) -> None:
        """Resolves what depends on other values and checks every range."""
        self.model_config = _parse_mapping(self.model_config)
        # YAML reads a bare `no` as false.
        if str(self.mixed_precision) == "False":
            self.mixed_precision = "no"
        if self.tokenizer is None:
            self.tokenizer = self.init_from or "bpe"
        if self.max_steps is None and self.epochs is None:
            self.epochs = 1.0
        self._check_ranges()
        self._check_combinations()

    @property
    def config_overrides(self) -> dict[str, Any]:
        """`model_config` as a mapping, empty when not given."""
        return self.model_config if isinstance(self.model_config, dict) else {}

    @property
    def treats_composition_apart(self) -> bool:
        """Whether the weights that compose heads follow a schedule of their own."""
        return self.composition_learning_rate is not None or self.freeze_parent_steps > 0

    def _check_ranges(self) -> None:
        self._check_limits()
        for name in POSITIVE:
            value = getattr(self, name)
            _require(value is None or value > 0, name, value, "positive")
        for name in NOT_NEGATIVE:
            value = getattr(self, name)
            _require(value is None or value >= 0, name, value, "zero or more")
        for name in FRACTIONS:
            _require(0 <= getattr(self, name) <= 1, name, getattr(self, name), "between 0 and 1")
        for name in BELOW_ONE:
            _require(getattr(self, name) < 1, name, getattr(self, name), "below 1")
        _require(
            self.adam_epsilon >= SMALLEST_EPSILON, "adam_epsilon", self.adam_epsilon, f"{SMALLEST_EPSILON} or more"
        )
        _require(0 < self.validation_share < 1, "validation_share", self.validation_share, "above 0 and below 1")
        _require(self.sequence_length >= 2, "sequence_length", self.sequence_length, "2 or more")
        for name, kind in {"mixed_precision": Precision, "engine": EngineName}.items():
            value, choices = getattr(self, name), get_args(kind)
            _require(value is None or value in choices, name, value, f"one of {choices}")

    def _check_limits(self) -> None:
        """Refuses missing values, and numbers that nothing can compute with."""
        for argument in fields(self):
            name, value = argument.name, getattr(self, argument.name)
            _require(value is not None or argument.default is None, name, value, "given, or left out")
            if isinstance(value, float) and name not in MAY_BE_INFINITE:
                _require(not math.isinf(value), name, value, "finite")
            if isinstance(value, int) and name != "seed":
                _require(value <= LARGEST_INTEGER, name, value, f"at most {LARGEST_INTEGER}")
        _require(0 <= self.seed <= LARGEST_SEED, "seed", self.seed, f"between 0 and {LARGEST_SEED}")
        _require(
            self.dataloader_workers <= MOST_WORKERS,
            "dataloader_workers",
            self.dataloader_workers,
            f"at most {MOST_WORKERS}",
        )
        _require(_is_writable_name(str(self.output)), "output", repr(self.output), "a path in UTF-8 without null bytes")

    def _check_combinations(self) -> None:
        if self.max_steps is not None and self.epochs is not None:
            raise UserError(f"max_steps={self.max_steps} and epochs={self.epochs} exclude each other; give one")
        fresh = [name for name in ("model_type", "model_size", "model_config") if getattr(self, name)]
        if self.init_from and fresh:
            raise UserError(f"init_from={self.init_from} already fixes the model; leave out {', '.join(fresh)}")
        if self.carry_memory and self.mask_documents:
            raise UserError(
                "carry_memory lets each document of a stream see those before it, and mask_documents hides them; "
                "give mask_documents: false (--no_mask_documents)"
            )
        if self.carry_memory and self.gradient_checkpointing:
            raise UserError(
                "gradient_checkpointing runs the layers twice, and carry_memory would put each segment into the memory "
                "twice; leave one of them out"
            )
        if self.max_steps is not None and self.warmup_steps is not None and self.warmup_steps >= self.max_steps:
            raise UserError(
                f"warmup_steps={self.warmup_steps} must be below max_steps={self.max_steps}; lower it, or leave it out"
            )


def _parse_mapping(value: dict[str, Any] | str | None) -> dict[str, Any] | None:
    if not isinstance(value, str):
        parsed = value
    else:
        try:
            parsed = json.loads(value)
        except json.JSONDecodeError as error:
            raise UserError(
                f"model_config {value!r} is not JSON ({error}); write it like '{{\"hidden_size\": 64}}'"
            ) from error
    if parsed is not None and not isinstance(parsed, dict):
        raise UserError(f"model_config must be a mapping of field names to values, not {value!r}")
    return parsed


def _is_writable_name(path: str) -> bool:
    """Whether libraries in Rust, which know paths in UTF-8 alone, can write there."""
    return "\0" not in path and path == path.encode("utf-8", "replace").decode()


def _require(condition: bool, name: str, value: object, limit: str) -> None:
    if not condition:
        raise UserError(f"{name}={value} must be {limit}")
