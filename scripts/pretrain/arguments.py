"""The arguments of `dynattn pretrain`: all options together, and which of them exclude each other."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ..common.errors import UserError
from ..common.option_values import parse_mapping
from .data.indexed_names import is_indexed
from .options.data import DataOptions
from .options.model import ModelOptions
from .options.optimization import OptimizationOptions
from .options.ranges import check_ranges
from .options.running import RunningOptions
from .options.sources import SourceOptions, parse_source
from .options.sweep import Sweep


@dataclass(kw_only=True)
class PretrainArguments(OptimizationOptions, DataOptions, ModelOptions, RunningOptions):
    """Arguments of one run; a YAML file holds the same names.

    Raises:
        UserError: a value is out of its range, or two values contradict each other.
    """

    def __post_init__(self) -> None:
        """Resolves what depends on other values and checks every range."""
        self.model_config = parse_mapping("model_config", self.model_config)
        self.mixture = parse_mapping("mixture", self.mixture)
        if self.tokenizer is None:
            self.tokenizer = self.init_from or "bpe"
        if self.max_steps is None and self.epochs is None:
            self.epochs = 1.0
        check_ranges(self)
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
    def continuing_command(self) -> str:
        """The command that goes on from the newest checkpoint, in words."""
        is_repeatable = self.resume in ("auto", "intact") and not self.overwrite
        return "the same command" if is_repeatable else "the same command without --resume and --overwrite"

    @property
    def has_source_epochs(self) -> bool:
        """Whether all sources have `epochs`, which then decide how many sequences a run of one epoch reads."""
        return all(source.epochs is not None for source in self.sources.values())

    @property
    def treats_composition_apart(self) -> bool:
        """Whether the weights that compose heads follow a schedule of their own."""
        return self.composition_learning_rate is not None or self.freeze_parent_steps > 0

    @property
    def without_effect(self) -> dict[str, str]:
        """The options that this run does not read, whatever their values, and what would make them matter."""
        needs = {
            "muon_momentum": (self.optimizer == "muon", "optimizer: muon"),
            "shuffle_buffer": (self.streaming, "streaming"),
            "vocab_size": (self.tokenizer == "bpe", "tokenizer: bpe"),
            "text_column": (self._reads_texts, "texts of your own"),
            "decay_share": (self.schedule == "wsd", "schedule: wsd"),
            "min_learning_rate_ratio": (self.schedule != "wsd" or self.decay_share > 0, "a rate that falls"),
            "max_bad_updates": (self.on_bad_update != "stop", "on_bad_update: skip or rollback"),
        }
        return {name: need for name, (is_met, need) in needs.items() if not is_met}

    @property
    def _reads_texts(self) -> bool:
        """Whether some data is neither the built-in corpus nor tokens that exist already."""
        named = [*(source.dataset for source in self.sources.values()), self.validation_dataset or "builtin"]
        return any(name != "builtin" and not is_indexed(name) for name in named)

    def of_sweep(self, name: str, value: float) -> "PretrainArguments":
        """The arguments of one run of the sweep, in which the argument `name` is `value`, with a folder below `output`.

        Raises:
            UserError: the value is out of range, or contradicts another.
        """
        output = str(Path(self.output) / f"{name}={value:g}")
        changes: dict[str, Any] = {name: value, "output": output, "sweep": None, "sweep_workers": 1}
        try:
            return replace(self, **changes)
        except UserError as error:
            raise UserError(f"sweep={self.sweep}: {error}") from error

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
        if not self.resume:
            raise UserError("resume is empty; give auto, intact, never or the folder of a checkpoint")
        if self.price_per_gpu_hour is not None and not self.dry_run:
            raise UserError(f"price_per_gpu_hour={self.price_per_gpu_hour} is for dry_run; give both")
        if self.cuda_graphs and not self.compile:
            raise UserError("cuda_graphs are of compiled models; give compile, too")
        if self.context_processes > 1:
            self._check_context()
        self._check_sources()
        self._check_carried_memory()
        self._check_streaming()
        self._check_positions()
        self._check_conversations()
        self._check_objective()
        if self.max_steps is not None and self.warmup_steps is not None and self.warmup_steps >= self.max_steps:
            raise UserError(
                f"warmup_steps={self.warmup_steps} must be below max_steps={self.max_steps}; give fewer, or 0 for none"
            )
        self._check_sweep()

    def _check_objective(self) -> None:
        """Refuses options that need next-token prediction if another objective is chosen."""
        if self.objective == "causal_lm":
            return
        for option in ("carry_memory", "chat_column", "z_loss", "length_warmup_steps", "dry_run"):
            if getattr(self, option):
                raise UserError(f"{option} is for objective=causal_lm; leave it out with objective={self.objective}")

    def _check_context(self) -> None:
        """Refuses processes that share sequences with what reads whole ones, or was not tried with them."""
        if self.objective != "causal_lm":
            raise UserError(f"context_processes is for objective=causal_lm; leave it out with {self.objective}")
        for option in ("carry_memory", "cuda_graphs"):
            if getattr(self, option):
                raise UserError(f"{option} needs whole sequences in each process; leave it or context_processes out")

    def _check_sweep(self) -> None:
        """Refuses a sweep that is malformed, has a run that is refused, or could lose what earlier ones have made."""
        if self.sweep is None:
            if self.sweep_workers > 1:
                raise UserError(f"sweep_workers={self.sweep_workers} is for a sweep; give sweep, or leave it out")
            return
        sweep = Sweep.parse(self.sweep)
        for value in sweep.values:
            run = self.of_sweep(sweep.name, value)
            if sweep.name in run.without_effect:
                need = run.without_effect[sweep.name]
                raise UserError(f"sweep={self.sweep}: all runs would be the same; {sweep.name} needs {need}")
        if self.overwrite or self.resume not in ("auto", "intact"):
            raise UserError("a sweep goes on where it was interrupted; leave out overwrite and resume")

    def _check_sources(self) -> None:
        """Refuses datasets, mixtures and splits that are empty or exclude each other."""
        if not self.dataset:
            raise UserError("dataset is empty; name a file, a folder or a Hub dataset, or leave it out")
        if self.mixture is not None and self.dataset != "builtin":
            raise UserError(f"dataset={self.dataset} and mixture exclude each other; name it in the mixture")
        sources = self.sources
        if not sources:
            raise UserError("the mixture is empty; name a source, or leave it out")
        if self.validation_split is not None and self.validation_dataset is None and self.dataset == "builtin":
            raise UserError(
                f"validation_split={self.validation_split} is a split of dataset or of validation_dataset; name one of "
                "them, or leave it out"
            )
        if len({source.weight is None for source in sources.values()}) > 1:
            raise UserError("some sources of the mixture have weights and others epochs; choose one for all")

    def _check_carried_memory(self) -> None:
        """Refuses carry_memory with what reads texts in pieces, moves positions, or runs layers twice."""
        if not self.carry_memory:
            return
        for option in ("mixture", "streaming", "skip_sequences", "chat_column", "length_warmup_steps"):
            if getattr(self, option):
                raise UserError(f"carry_memory reads one text from its start to its end; leave out {option}")
        if indexed := [name for name in (self.dataset, self.validation_dataset) if name and is_indexed(name)]:
            raise UserError(f"carry_memory reads text, not tokens that exist already ({indexed[0]}); give the text")
        if self.packing != "concatenate":
            raise UserError(f"carry_memory reads a stream without gaps; leave out packing={self.packing}")
        if self.mask_documents:
            raise UserError(
                "carry_memory lets each document of a stream see those before it, and mask_documents hides them; "
                "give mask_documents: false (--no_mask_documents)"
            )
        if self.gradient_checkpointing:
            raise UserError(
                "gradient_checkpointing runs the layers twice, and carry_memory would put each segment into the memory "
                "twice; leave one of them out"
            )
        if self.cuda_graphs:
            raise UserError(
                "cuda_graphs write every segment's hidden states to the same place, and carry_memory keeps them for "
                "the next segment; leave one of them out"
            )
        if self.position_sampling:
            raise UserError("carry_memory lets positions go on from update to update; leave out position_sampling")

    def _check_streaming(self) -> None:
        """Refuses streaming with what needs to know the whole dataset."""
        if not self.streaming:
            return
        for option in ("mixture", "skip_sequences"):
            if getattr(self, option):
                raise UserError(f"streaming reads one dataset from its start; leave out {option} or streaming")
        if self.packing != "concatenate" or self.max_steps is None:
            raise UserError("a stream has no known end: give max_steps, and packing: concatenate")
        if self.validation_dataset is not None and is_indexed(self.validation_dataset):
            raise UserError(
                f"streaming validates on documents, and validation_dataset={self.validation_dataset} holds tokens; "
                "give documents"
            )
        if self.dataset == "builtin":
            raise UserError("streaming reads files or a data set of the Hub; name one, or leave out streaming")

    def _check_conversations(self) -> None:
        """Refuses to train a tokenizer on what cannot be read twice, and a template without conversations."""
        if self.tokenizer == "bpe" and (self.streaming or self.chat_column):
            raise UserError(
                "streaming and chat_column need a tokenizer that exists; set tokenizer to a folder or a Hub name"
            )
        indexed = [source.dataset for source in self.sources.values() if is_indexed(source.dataset)]
        if self.chat_column and indexed:
            raise UserError(f"{indexed[0]} holds tokens, and chat_column={self.chat_column} is of texts; leave it out")
        if self.chat_column and self.text_column != "text":
            raise UserError(
                f"chat_column={self.chat_column} and text_column={self.text_column} exclude each other; give one"
            )
        if self.chat_template and not self.chat_column:
            raise UserError(f"chat_template={self.chat_template} needs conversations; name their chat_column")

    def _check_positions(self) -> None:
        """Refuses packing=anchor and position_sampling with options that use positions in another way."""
        options = ["packing"] if self.packing == "anchor" else []
        options += ["position_sampling"] if self.position_sampling else []
        if self.length_warmup_steps and options:
            raise UserError(f"length_warmup_steps counts positions anew; leave out it or {', '.join(options)}")
        if self.packing == "anchor" and not self.mask_documents:
            raise UserError("packing=anchor keeps documents apart; leave out mask_documents: false")
        if self.packing == "anchor" and self.sequence_length < 3:
            raise UserError(
                f"sequence_length={self.sequence_length} must be 3 or more with packing=anchor: a sequence holds an "
                "anchor and at least two tokens, the second of which is predicted from the first"
            )
        if self.shortest_length is not None and not self.length_warmup_steps:
            raise UserError(f"shortest_length={self.shortest_length} is for length_warmup_steps; give it, too")
        limit, length = self.position_limit, self.sequence_length
        if limit is not None and self.position_sampling is None:
            raise UserError(f"position_limit={limit} is for sampled positions; give position_sampling, too")
        if limit is not None and limit < length:
            raise UserError(f"position_limit={limit} is below sequence_length={length}, whose tokens need as many")
        if self.position_sampling == "subset" and (limit is None or limit <= length):
            raise UserError(
                f"position_sampling=subset chooses sequence_length={length} of position_limit={limit} positions; give "
                "a greater position_limit"
            )
