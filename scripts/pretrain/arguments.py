"""The arguments of `dynattn pretrain`: their meanings, defaults and ranges."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Literal, get_args

from ..common.errors import UserError
from .mappings import SourceOptions, parse_mapping, parse_source, require

Precision = Literal["no", "bf16"]
EngineName = Literal["ddp", "fsdp2", "hsdp"]
Packing = Literal["concatenate", "best_fit"]
BadUpdateChoice = Literal["stop", "skip", "rollback"]
Schedule = Literal["cosine", "wsd"]
Tracker = Literal["wandb", "trackio"]

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
    "shuffle_buffer",
    "spike_threshold",
    "price_per_gpu_hour",
)
NOT_NEGATIVE = (
    "freeze_parent_steps",
    "warmup_steps",
    "weight_decay",
    "dataloader_workers",
    "keep_checkpoints",
    "skip_sequences",
    "tokenizer_workers",
    "max_bad_updates",
)
# Smaller numbers are zero, or nearly, in float32: a weight without a gradient would be divided by them.
SMALLEST_EPSILON = 1e-37
FRACTIONS = ("min_learning_rate_ratio", "decay_share", "adam_beta1", "adam_beta2")
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
        metadata={
            "help": "builtin, a .txt/.jsonl/.parquet file, glob or folder, a Hub dataset name, or a Megatron .idx file"
        },
    )
    mixture: dict[str, Any] | str | None = field(
        default=None,
        metadata={
            "help": "several sources in place of dataset: a name for each with its dataset, its weight or epochs, and "
            "perhaps max_epochs; a mapping in YAML, JSON on the command line"
        },
    )
    streaming: bool = field(
        default=False, metadata={"help": "read and tokenize the dataset while the run trains, instead of before"}
    )
    shuffle_buffer: int = field(
        default=4096, metadata={"help": "sequences of a stream that are shuffled among each other"}
    )
    skip_sequences: int = field(
        default=0, metadata={"help": "sequences to pass over first, such as those that the parent has read"}
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

    chat_column: str | None = field(
        default=None,
        metadata={"help": "column of conversations to train on; only what the assistant says is then a target"},
    )
    chat_template: str | None = field(
        default=None,
        metadata={
            "help": "file with the chat template, in Jinja, saved with the model; if not given: the tokenizer's own, "
            "or one that ships"
        },
    )

    tokenizer: str | None = field(
        default=None,
        metadata={"help": "bpe (train one on the data), a folder or a Hub name; if not given: init_from, or bpe"},
    )
    vocab_size: int = field(default=8192, metadata={"help": "vocabulary of the tokenizer that bpe trains"})

    tokenizer_workers: int = field(
        default=0, metadata={"help": "processes that tokenize; 0 leaves it to the tokenizer"}
    )
    token_cache: str | None = field(
        default=None,
        metadata={"help": "folder of tokenized data that runs share, and from which interrupted tokenizing goes on"},
    )

    sequence_length: int = field(default=256, metadata={"help": "tokens in each packed sequence"})
    mask_documents: bool = field(
        default=True, metadata={"help": "keep attention inside each document of a packed sequence"}
    )

    packing: Packing = field(
        default="concatenate",
        metadata={"help": "concatenate documents and cut, or best_fit: few documents are cut, and there is padding"},
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
    schedule: Schedule = field(
        default="cosine",
        metadata={"help": "how the learning rate falls: cosine, or wsd: stable, then down in the last decay_share"},
    )
    decay_share: float = field(
        default=0.2, metadata={"help": "share of the updates in which the schedule wsd lowers the learning rate"}
    )
    min_learning_rate_ratio: float = field(
        default=0.1, metadata={"help": "end of the schedule, as a fraction of the peak"}
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

    on_bad_update: BadUpdateChoice = field(
        default="stop",
        metadata={
            "help": "at a loss or gradient that is not finite, or a spike: stop; skip the update; or rollback to the "
            "newest checkpoint and leave out the data since then"
        },
    )
    spike_threshold: float | None = field(
        default=None,
        metadata={
            "help": "a loss that many standard deviations above the mean of the last 100 is a spike; none if not given"
        },
    )
    max_bad_updates: int = field(default=10, metadata={"help": "bad updates after which skip and rollback stop, too"})

    trackers: list[Tracker] = field(
        default_factory=list, metadata={"help": "where to log besides metrics.jsonl and TensorBoard: wandb, trackio"}
    )
    dry_run: bool = field(
        default=False, metadata={"help": "print parameters, operations, memory, time and cost of the run, and end"}
    )
    on: str = field(default="h100:1", metadata={"help": "GPU and their number that a dry run is about, like h100:64"})
    price_per_gpu_hour: float | None = field(
        default=None, metadata={"help": "what an hour of one GPU costs, for the sum that a dry run prints"}
    )

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
        self.model_config = parse_mapping("model_config", self.model_config)
        self.mixture = parse_mapping("mixture", self.mixture)
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
    def sources(self) -> Mapping[str, SourceOptions]:
        """The sources of training data by name; the one of `dataset` is called `train`."""
        if not isinstance(self.mixture, dict):
            return {"train": SourceOptions(self.dataset, weight=1.0)}
        return {name: parse_source(name, options) for name, options in self.mixture.items()}

    @property
    def treats_composition_apart(self) -> bool:
        """Whether the weights that compose heads follow a schedule of their own."""
        return self.composition_learning_rate is not None or self.freeze_parent_steps > 0

    def _check_ranges(self) -> None:
        self._check_limits()
        for name in POSITIVE:
            value = getattr(self, name)
            require(value is None or value > 0, name, value, "positive")
        for name in NOT_NEGATIVE:
            value = getattr(self, name)
            require(value is None or value >= 0, name, value, "zero or more")
        for name in FRACTIONS:
            require(0 <= getattr(self, name) <= 1, name, getattr(self, name), "between 0 and 1")
        for name in BELOW_ONE:
            require(getattr(self, name) < 1, name, getattr(self, name), "below 1")
        require(self.adam_epsilon >= SMALLEST_EPSILON, "adam_epsilon", self.adam_epsilon, f"{SMALLEST_EPSILON} or more")
        require(0 < self.validation_share < 1, "validation_share", self.validation_share, "above 0 and below 1")
        require(self.sequence_length >= 2, "sequence_length", self.sequence_length, "2 or more")
        for name, kind in {
            "mixed_precision": Precision,
            "packing": Packing,
            "schedule": Schedule,
            "on_bad_update": BadUpdateChoice,
            "engine": EngineName,
        }.items():
            value, choices = getattr(self, name), get_args(kind)
            require(value is None or value in choices, name, value, f"one of {choices}")

    def _check_limits(self) -> None:
        """Refuses missing values, and numbers that nothing can compute with."""
        for argument in fields(self):
            name, value = argument.name, getattr(self, argument.name)
            require(value is not None or argument.default is None, name, value, "given, or left out")
            if isinstance(value, float) and name not in MAY_BE_INFINITE:
                require(not math.isinf(value), name, value, "finite")
            if isinstance(value, int) and name != "seed":
                require(value <= LARGEST_INTEGER, name, value, f"at most {LARGEST_INTEGER}")
        require(0 <= self.seed <= LARGEST_SEED, "seed", self.seed, f"between 0 and {LARGEST_SEED}")
        require(
            self.dataloader_workers <= MOST_WORKERS,
            "dataloader_workers",
            self.dataloader_workers,
            f"at most {MOST_WORKERS}",
        )
        require(_is_writable_name(str(self.output)), "output", repr(self.output), "a path in UTF-8 without null bytes")

    def _check_combinations(self) -> None:
        if self.max_steps is not None and self.epochs is not None:
            raise UserError(f"max_steps={self.max_steps} and epochs={self.epochs} exclude each other; give one")
        rate = max(self.learning_rate, self.composition_learning_rate or 0.0)
        if rate * self.weight_decay >= 1:
            raise UserError(
                f"weight_decay={self.weight_decay} times the learning rate {rate} must be below 1: an update would "
                "take more from a weight than it has; lower one of them"
            )
        fresh = [name for name in ("model_type", "model_size", "model_config") if getattr(self, name)]
        if self.init_from and fresh:
            raise UserError(f"init_from={self.init_from} already fixes the model; leave out {', '.join(fresh)}")
        self._check_data()
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

    def _check_data(self) -> None:
        """Refuses ways of reading that exclude each other."""
        sources = self.sources
        if self.mixture is not None and self.dataset != "builtin":
            raise UserError(f"dataset={self.dataset} and mixture exclude each other; name it in the mixture")
        if len({source.weight is None for source in sources.values()}) > 1:
            raise UserError("some sources of the mixture have weights and others epochs; choose one for all")
        for option in ("mixture", "streaming", "skip_sequences", "chat_column"):
            if self.carry_memory and getattr(self, option):
                raise UserError(f"carry_memory reads one text from its start to its end; leave out {option}")
        if self.carry_memory and self.packing != "concatenate":
            raise UserError(f"carry_memory reads a stream without gaps; leave out packing={self.packing}")
        for option in ("mixture", "skip_sequences"):
            if self.streaming and getattr(self, option):
                raise UserError(f"streaming reads one dataset from its start; leave out {option} or streaming")
        if self.streaming and (self.packing != "concatenate" or self.max_steps is None):
            raise UserError("a stream has no end that is known: give max_steps, and leave out packing: best_fit")
        if self.tokenizer == "bpe" and (self.streaming or self.chat_column):
            raise UserError("a tokenizer that exists is needed for streaming and chat_column; set tokenizer")
        if self.chat_template and not self.chat_column:
            raise UserError(f"chat_template={self.chat_template} needs conversations; name their chat_column")


def _is_writable_name(path: str) -> bool:
    """Whether libraries in Rust, which know paths in UTF-8 alone, can write there."""
    return "\0" not in path and path == path.encode("utf-8", "replace").decode()
