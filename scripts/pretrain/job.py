"""A whole run, from arguments to a saved model."""

import dataclasses
import json
import logging
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TypeVar

from accelerate import Accelerator
from accelerate.state import AcceleratorState
from accelerate.utils import InitProcessGroupKwargs, ProjectConfiguration, broadcast_object_list, set_seed
from torch import accelerator as torch_accelerator
from transformers import GenerationConfig, PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from ..common.environment import hardware, versions
from ..common.errors import UserError
from ..common.segment_memory import NoMemory, StreamMemory
from .arguments import PretrainArguments
from .card import write_card
from .data import tokenizer
from .data.batch_order import TrainingOrder
from .data.packing import Sequences
from .data.preparation import Source, open_sequences, prepare
from .model import build_config, build_model, count_parameters
from .optimizer import build_optimizer
from .outputs import checkpoint
from .outputs.checkpoint import Fingerprint, Progress
from .outputs.metrics import MetricsLog
from .outputs.run_folder import RunFolder, remove
from .outputs.throughput import Speedometer
from .results import Result, measured
from .schedule import CosineSchedule
from .trainer import Trainer
from .validation import Validation

Value = TypeVar("Value")

# Settings that decide the loss curve: a run resumes only with the ones that it began with.
FIXED = (
    "sequence_length",
    "mask_documents",
    "carry_memory",
    "composition_learning_rate",
    "weight_decay",
    "adam_beta1",
    "adam_beta2",
    "adam_epsilon",
    "max_grad_norm",
    "mixed_precision",
    "seed",
)
# Parts of a configuration that say nothing about the architecture.
VOLATILE = ("transformers_version", "architectures", "dtype", "_name_or_path", "use_cache")


@dataclass
class Plan:
    """Everything that a run needs, checked before anything in the output folder changes."""

    source: Source
    tokenizer: PreTrainedTokenizerBase
    model: PreTrainedModel
    train_sequences: Sequences
    validation_sequences: Sequences
    order: TrainingOrder
    memory: NoMemory
    schedule: CosineSchedule
    fingerprint: Fingerprint


def pretrain(arguments: PretrainArguments) -> Result:
    """Trains, or resumes, and saves the final model with its tokenizer, card and `result.json`.

    Call it from one process, or from every process of a `torchrun`.

    Raises:
        UserError: a foreseeable mistake in the arguments, the data or the output folder, or a loss that is not finite.
    """
    accelerator = build_accelerator(arguments)
    try:
        return run_job(accelerator, arguments)
    finally:
        # A process that exits while its model still holds the process group can hang.
        accelerator.free_memory()
        accelerator.end_training()


def run_job(accelerator: Accelerator, arguments: PretrainArguments) -> Result:
    """`pretrain` on an accelerator that the caller releases."""
    started = time.perf_counter()
    run = RunFolder(Path(arguments.output))
    resume_from = on_main(accelerator, lambda: run.start_point(arguments.resume, arguments.overwrite))
    try:
        plan = build_plan(accelerator, arguments, run)
        if resume_from is not None:
            checkpoint.check_same_run(resume_from, plan.fingerprint)
    except UserError:
        accelerator.wait_for_everyone()
        if accelerator.is_main_process:
            run.discard_prepared()
        raise
    on_main(accelerator, lambda: run.begin(dataclasses.asdict(arguments), resume_from))
    accelerator.print(describe(plan, resume_from))
    trainer = build_trainer(accelerator, arguments, run, plan, resume_from)
    validation = trainer.train()
    result = on_main(accelerator, lambda: summarize(trainer, plan, validation, time.perf_counter() - started))
    save_final(trainer, plan, result)
    return result


def build_accelerator(arguments: PretrainArguments) -> Accelerator:
    """Accelerate's front end: CPU processes (gloo) where there is no accelerator, TensorBoard in the output folder."""
    # The state is shared in a process; a second run there may want another precision.
    AcceleratorState._reset_state()
    # It warns at each checkpoint that tied weights are stored once.
    logging.getLogger("accelerate.utils.other").setLevel(logging.ERROR)
    return Accelerator(
        cpu=not torch_accelerator.is_available(),
        mixed_precision=arguments.mixed_precision,
        log_with="tensorboard",
        project_config=ProjectConfiguration(project_dir=arguments.output, logging_dir=arguments.output),
        # The other processes wait while the first one tokenizes.
        kwargs_handlers=[InitProcessGroupKwargs(timeout=timedelta(hours=12))],
    )


def on_main(accelerator: Accelerator, work: Callable[[], Value]) -> Value:
    """Runs `work` on the main process once all have arrived; its value or its `UserError` reaches every process."""
    accelerator.wait_for_everyone()
    outcome: list[tuple[Value | None, UserError | None]] = [(None, None)]
    if accelerator.is_main_process:
        try:
            outcome = [(work(), None)]
        except UserError as error:
            outcome = [(None, error)]
    broadcast_object_list(outcome)
    value, mistake = outcome[0]
    if mistake is not None:
        raise mistake
    return value  # type: ignore[return-value]


def build_plan(accelerator: Accelerator, arguments: PretrainArguments, run: RunFolder) -> Plan:
    """Prepares the data and builds the model; writes nothing but `run.prepared`."""
    source = on_main(accelerator, lambda: prepare(arguments, run))
    folder = run.prepared if run.prepared.exists() else run.path
    run_tokenizer = tokenizer.load_tokenizer(folder / run.tokenizer.name)
    passes = arguments.gradient_accumulation_steps
    global_batch = arguments.batch_size * passes * accelerator.num_processes
    train, validation = open_sequences(folder / run.data.name, arguments, run_tokenizer.pad_token_id, global_batch)
    set_seed(arguments.seed)
    config = build_config(arguments, run_tokenizer)
    model = build_model(arguments, config)
    schedule = build_schedule(arguments, len(train), global_batch)
    return Plan(
        source=source,
        tokenizer=run_tokenizer,
        model=model,
        train_sequences=train,
        validation_sequences=validation,
        order=TrainingOrder(len(train), global_batch, None if arguments.carry_memory else arguments.seed),
        memory=StreamMemory(config, passes, len(train) // global_batch) if arguments.carry_memory else NoMemory(),
        schedule=schedule,
        fingerprint=build_fingerprint(arguments, config, source, schedule, global_batch),
    )


def describe(plan: Plan, resume_from: Path | None) -> str:
    """What is about to happen, for the terminal."""
    train, validation = plan.train_sequences, plan.validation_sequences
    parameters = count_parameters(plan.model)
    return "\n".join(
        [
            f"data: {plan.source.name}",
            f"training: {len(train.stream.starts):,} documents, {len(train.stream.tokens):,} tokens, {len(train):,} "
            f"sequences of {train.length} (the last {train.unused_tokens} tokens fill none and are left out)",
            f"validation: {len(validation.stream.starts):,} documents, {len(validation.stream.tokens):,} tokens",
            f"model: {plan.model.config.model_type}, {parameters.total:,} parameters, {parameters.non_embedding:,} of "
            f"them not embeddings",
            f"schedule: {plan.schedule.max_steps:,} updates of {plan.order.global_batch} sequences",
            f"resuming from {resume_from}" if resume_from else "starting from update 0",
        ]
    )


def build_schedule(arguments: PretrainArguments, sequences: int, global_batch: int) -> CosineSchedule:
    """The schedule over `max_steps`, or over the updates that `epochs` passes over the sequences take."""
    max_steps = arguments.max_steps or math.ceil((arguments.epochs or 1.0) * sequences / global_batch)
    warmup_steps = max_steps // 50 if arguments.warmup_steps is None else arguments.warmup_steps
    if warmup_steps >= max_steps:
        raise UserError(f"warmup_steps={warmup_steps} must be below the {max_steps} updates of the run; lower it")
    frozen = arguments.freeze_parent_steps
    if frozen >= max_steps:
        raise UserError(f"freeze_parent_steps={frozen} must be below the {max_steps} updates of the run; lower it")
    return CosineSchedule(arguments.learning_rate, warmup_steps, max_steps, arguments.min_learning_rate_ratio, frozen)


def build_fingerprint(
    arguments: PretrainArguments, config: PreTrainedConfig, source: Source, schedule: CosineSchedule, global_batch: int
) -> Fingerprint:
    """What must not change between saving a checkpoint and resuming from it, in values that survive JSON."""
    architecture = {f"model.{name}": value for name, value in config.to_dict().items() if name not in VOLATILE}
    data = dataclasses.asdict(source)
    data.pop("name")
    settings = {name: getattr(arguments, name) for name in FIXED}
    fingerprint = {**architecture, **data, **settings, **dataclasses.asdict(schedule), "global_batch": global_batch}
    return json.loads(json.dumps(fingerprint))


def build_trainer(
    accelerator: Accelerator, arguments: PretrainArguments, run: RunFolder, plan: Plan, resume_from: Path | None
) -> Trainer:
    """Places model and optimizer on the devices and, when resuming, puts their saved state back."""
    model = plan.model.to(accelerator.device)
    speed = Speedometer.of(model, accelerator)
    if arguments.compile:
        model.compile()
    prepared_model, optimizer = accelerator.prepare(model, build_optimizer(model, arguments))
    set_seed(arguments.seed, device_specific=True)
    progress = Progress() if resume_from is None else checkpoint.load(accelerator, resume_from, plan.memory)
    return Trainer(
        accelerator=accelerator,
        arguments=arguments,
        model=prepared_model,
        optimizer=optimizer,
        schedule=plan.schedule,
        order=plan.order,
        train_sequences=plan.train_sequences,
        validation_sequences=plan.validation_sequences,
        memory=plan.memory,
        run=run,
        metrics=MetricsLog(run.metrics, accelerator, progress.step),
        fingerprint=plan.fingerprint,
        progress=progress,
        speed=speed,
    )


def summarize(trainer: Trainer, plan: Plan, validation: Validation, wall_seconds: float) -> Result:
    """The result of a run whose training has ended."""
    run, accelerator = trainer.run, trainer.accelerator
    return Result(
        output=run.path,
        model=run.model,
        dataset=plan.source.name,
        steps=trainer.progress.step,
        tokens=trainer.progress.tokens,
        train_seconds=trainer.progress.seconds,
        wall_seconds=wall_seconds,
        processes=accelerator.num_processes,
        hardware=hardware(accelerator.device, accelerator.num_processes),
        versions=versions(),
        **measured(run.metrics, validation, count_parameters(accelerator.unwrap_model(trainer.model))),
    )


def save_final(trainer: Trainer, plan: Plan, result: Result) -> None:
    """Saves model, tokenizer, generation settings and card under another name and renames them when all are there."""
    accelerator, run = trainer.accelerator, trainer.run
    partial = run.path / f".{run.model.name}.partial"
    weights = accelerator.get_state_dict(trainer.model)
    if accelerator.is_main_process:
        remove(partial)
        model = accelerator.unwrap_model(trainer.model)
        model.generation_config = GenerationConfig(
            bos_token_id=model.config.bos_token_id,
            eos_token_id=model.config.eos_token_id,
            pad_token_id=model.config.pad_token_id,
        )
        model.save_pretrained(partial, state_dict=weights)
        positions = getattr(model.config, "max_position_embeddings", None)
        plan.tokenizer.model_max_length = positions or trainer.arguments.sequence_length
        plan.tokenizer.save_pretrained(partial)
        write_card(partial, trainer.arguments, result, model.config.model_type)
        result.write(run.result, trainer.arguments)
        partial.rename(run.model)
    accelerator.wait_for_everyone()
