"""Builds and checks all parts of a run before anything in the output folder changes."""

import dataclasses
from pathlib import Path

from accelerate.utils import set_seed
from transformers import PreTrainedModel

from ..common.errors import UserError
from .arguments import PretrainArguments
from .carried_memory import CarriedMemory, StreamMemory
from .data.batch_order import MIXTURE_BLOCK, MixtureOrder, TrainingOrder, share_of
from .data.length_warmup import LengthWarmup
from .data.objectives import make_objective
from .data.opening import open_data
from .data.position_sampling import PositionSampler
from .data.preparation import Source
from .data.tokenizer import load_tokenizer
from .engines.interface import Engine
from .engines.sequence_groups import SequenceGroups
from .fingerprint import Fingerprint, build_fingerprint, describe_changes, sharing_of
from .model import build_model, count_parameters
from .model_config import build_config
from .outputs.checkpoint import read_state
from .outputs.run_folder import RunFolder
from .schedule import build_schedule


class Plan:
    """Data, model and schedule of a run, and the fingerprint that shows whether a checkpoint is of the same run.

    Attributes:
        order: which of `train_sequences` each update reads.
        memory: the hidden states that a run carries from each sequence to the next; empty if it carries none.
        lengths: the length of the sequences of each update, which may grow at first.
        positions: draws positions at random; None if tokens have their own.
    """

    def __init__(
        self, engine: Engine, arguments: PretrainArguments, run: RunFolder, source: Source, resume_from: Path | None
    ) -> None:
        """Opens the data that `prepare` made from `source`, and builds model and schedule; it writes nothing.

        Raises:
            UserError: data, model and arguments do not fit each other.
        """
        accelerator, accumulation = engine.accelerator, arguments.gradient_accumulation_steps
        global_batch = arguments.batch_size * accumulation * engine.groups.number
        self.source, self.tokenizer = source, load_tokenizer(run.current(run.tokenizer))
        self.objective = make_objective(arguments, self.tokenizer)
        train, self.validation_sequences, self.order = open_data(run, arguments, self.tokenizer, global_batch)
        self.train_sequences = train
        set_seed(arguments.seed)
        config = build_config(arguments, self.tokenizer)
        on_meta = engine.takes_weights_of_first and not accelerator.is_main_process
        self.model = build_model(arguments, config, on_meta=on_meta)
        if resume_from is not None:
            resume_order(self.order, read_state(resume_from)["fingerprint"], len(train))
        self.memory = CarriedMemory()
        if arguments.carry_memory:
            self.memory = StreamMemory(config, accumulation, segments=len(train) // global_batch)
        self.schedule = build_schedule(arguments, self.order.pass_length, global_batch)
        check_passes(self.order, arguments, self.schedule.max_steps)
        self.lengths, self.positions = LengthWarmup.of(arguments), PositionSampler.of(arguments, config)
        engine.groups.divide(self.model, self.lengths.lengths)
        self.fingerprint = build_fingerprint(arguments, config, source, self.schedule, self.order)

    def documents(self, step: int, groups: SequenceGroups, batch_size: int) -> list[str]:
        """The documents that this process reads in update `step` of the data."""
        mine = share_of(self.order[step], groups.index, groups.number, batch_size)
        return [name for index in mine.ravel().tolist() for name in self.train_sequences.documents(index)]


def resume_order(order: TrainingOrder, stored: Fingerprint, sequences: int) -> None:
    """Gives the order of a run that resumes the length of a pass and the blocks with which the run began.

    Checkpoints of earlier versions lack these numbers. Their runs read all `sequences` once, whatever the `epochs`.
    """
    order.pass_length = stored.get("pass_length", sequences)
    if isinstance(order, MixtureOrder):
        order.divide(stored.get("mixture_block", MIXTURE_BLOCK))


def check_passes(order: TrainingOrder, arguments: PretrainArguments, max_steps: int) -> None:
    """Refuses a run that would read a source more often than its `max_epochs`.

    The last update of a run whose length is given in epochs is filled with sequences beyond them, so it is not counted.
    Nor is a thousandth, to which the places of the sources in a block are rounded.

    Raises:
        UserError: the run would read a source more often.
    """
    sources = arguments.sources
    single = next(iter(sources.values()))  # a single source is not called by its name in `passes`
    for name, passes in order.passes(max_steps if arguments.max_steps else max_steps - 1).items():
        source = sources.get(name, single)
        if source.max_epochs is not None and passes > 1.001 * source.max_epochs:
            raise UserError(
                f"the run would read {name} {passes:.2f} times, and its max_epochs is {source.max_epochs}; lower "
                "epochs, max_steps or its weight, or give more data"
            )


def describe(plan: Plan, engine: Engine, arguments: PretrainArguments, resume_from: Path | None) -> str:
    """A summary of the run that is about to begin, for the terminal."""
    train, validation = plan.train_sequences, plan.validation_sequences
    parameters, passes = count_parameters(plan.model), plan.order.passes(plan.schedule.max_steps)
    return "\n".join(
        [
            f"data: {plan.source.name}",
            f"training: {train.describe()}",
            f"validation: {validation.describe()}",
            *(f"{name} is read {count:.2f} times" for name, count in passes.items()),
            f"model: {plan.model.config.model_type}, {parameters.total:,} parameters, {parameters.non_embedding:,} of "
            f"them not embeddings",
            f"schedule: {plan.schedule.max_steps:,} updates of {plan.order.global_batch} sequences",
            engine.describe(),
            *_without_effect(arguments, plan.model),
            f"resuming from {resume_from}{describe_changes(resume_from, sharing_of(arguments, engine))}"
            if resume_from
            else "starting from update 0",
        ]
    )


def _without_effect(arguments: PretrainArguments, model: PreTrainedModel) -> list[str]:
    """A line for each option that was given and that the run does not read.

    A vocabulary of the size that the model has is not named: a recipe may ask for it beside a tokenizer that exists.
    """
    usual = {field.name: field.default for field in dataclasses.fields(arguments)}
    return [
        f"{name}={value} has no effect: it needs {need}"
        for name, need in arguments.without_effect.items()
        if (value := getattr(arguments, name)) not in (usual[name], getattr(model.config, name, None))
    ]
