"""A whole run, from arguments to a saved model.

`pretrain` locks the output folder and installs handlers for signals. `run_job` shows the order of a run:

1. `RunFolder.start_point` chooses the checkpoint to resume from, and refuses to lose what the folder holds;
2. `make_plan` prepares the data, leaving the files of an earlier run in place, and builds and checks everything that
   may turn out to be impossible;
3. `RunFolder.begin` removes the earlier run, or continues it, and moves the prepared data into place;
4. `Trainer.train` makes the updates;
5. `summarize` and `save_final` leave result, model and card.

Every process runs all of it; `on_main` marks the steps that only the first process takes.
"""

import dataclasses
import logging
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path

from accelerate import Accelerator
from accelerate.state import AcceleratorState
from accelerate.utils import InitProcessGroupKwargs, ProjectConfiguration
from torch import Tensor
from torch import accelerator as torch_accelerator

from ..common.atomic_file import partial_path, put_in_place, write_json
from ..common.compiler import check_compiler
from ..common.disk_errors import disk_errors_explained
from ..common.environment import source_commit
from ..common.errors import UserError
from ..common.folder_lock import FolderLock
from .arguments import PretrainArguments
from .card import write_card
from .data.preparation import prepare
from .data.tokenizer import LARGEST_VOCABULARY, save_tokenizer
from .engines.choice import build_engine, forget_launcher, launched_engine
from .engines.interface import Engine
from .fingerprint import check_same_run
from .model import check_attention, choose_attention, reset_generation
from .model_config import plan_config
from .outputs.metrics import check_trackers, tensorboard_errors_told_once
from .outputs.run_folder import RunFolder, remove
from .outputs.training_state import hide_warning_of_one_process
from .plan import Plan, describe
from .processes import on_all, on_main
from .results import Result, summarize
from .stopping import StopSignals
from .trainer import Trainer


def pretrain(arguments: PretrainArguments) -> Result:
    """Trains, or resumes, and saves the final model with its tokenizer, card and `result.json`.

    Call it from one process, or from every process of a `torchrun`.

    Raises:
        UserError: a foreseeable mistake in the arguments, the data or the output folder, a disk that cannot be written,
            or too many bad updates (such as a loss that is not finite).
        StoppedError: the process got SIGINT, SIGTERM or SIGHUP, or `max_seconds` are over; the current update is
            finished and saved.
    """
    run = RunFolder(Path(arguments.output))
    launched = launched_engine(os.environ)
    accelerator = build_accelerator(arguments)
    engine = build_engine(arguments, accelerator, launched)
    with disk_errors_explained(run.path), tensorboard_errors_told_once():
        try:
            signals = StopSignals(accelerator.is_main_process, arguments.max_seconds)
            with signals, occupied(run, arguments.token_cache):
                return run_job(engine, arguments, run, signals)
        finally:
            # A process that exits while its model still holds the process group can hang.
            accelerator.free_memory()
            accelerator.end_training()


def run_job(engine: Engine, arguments: PretrainArguments, run: RunFolder, signals: StopSignals) -> Result:
    """The steps of `pretrain`, in a folder that is locked and with an engine that the caller releases."""
    started, accelerator = time.perf_counter(), engine.accelerator
    if accelerator.is_main_process:
        source_commit()  # the result names it, and the checkout may have changed by then
    resume_from = on_main(run.path, lambda: run.start_point(arguments))
    plan = make_plan(engine, arguments, run, resume_from)
    on_main(run.path, lambda: run.begin(dataclasses.asdict(arguments), resume_from))
    accelerator.print(describe(plan, engine, arguments, resume_from))
    accelerator.print(choose_attention(plan.model, arguments, accelerator.device))
    trainer = Trainer(engine, arguments, run, plan, resume_from, signals)
    try:
        with plan.order.feeding(accelerator.is_main_process):
            validation = trainer.train()
    finally:
        trainer.checkpoints.close()
    result = on_main(run.path, lambda: summarize(trainer, validation, time.perf_counter() - started))
    save_final(trainer, result)
    return result


@contextmanager
def occupied(run: RunFolder, token_cache: str | None) -> Iterator[None]:
    """Keeps other runs out of the folder during the block, and removes files that a failure left unfinished."""
    lock = FolderLock(run.lock)

    def occupy() -> None:
        run.check_ours(token_cache)
        lock.take()
        run.remove_leftovers()

    try:
        on_main(run.path, occupy)
        yield
    finally:
        if lock.is_held:
            with suppress(OSError):  # the disk may be what failed; the next run removes the rest
                run.remove_leftovers()
            lock.release()


def build_accelerator(arguments: PretrainArguments) -> Accelerator:
    """An `Accelerator` that logs to TensorBoard in the output folder; without a GPU its processes run on the CPU."""
    forget_launcher(os.environ)
    # Accelerate keeps its state for the whole process, but a second run in it may have another precision.
    AcceleratorState._reset_state()
    # Accelerate warns at each checkpoint that tied weights are stored once.
    logging.getLogger("accelerate.utils.other").setLevel(logging.ERROR)
    hide_warning_of_one_process()
    return Accelerator(
        cpu=not torch_accelerator.is_available(),
        mixed_precision=arguments.mixed_precision,
        log_with="tensorboard",
        project_config=ProjectConfiguration(project_dir=arguments.output, logging_dir=arguments.output),
        # The other processes wait while the first one tokenizes.
        kwargs_handlers=[InitProcessGroupKwargs(timeout=timedelta(hours=12))],
    )


def make_plan(engine: Engine, arguments: PretrainArguments, run: RunFolder, resume_from: Path | None) -> Plan:
    """Prepares the data and plans the run; if one process refuses it, all do, and an earlier run stays as it is."""
    # Mistakes show before the data is prepared, which may take hours. Until then the vocabulary's size is not known.
    on_main(run.path, lambda: plan_config(arguments, {"vocab_size": LARGEST_VOCABULARY}))
    on_all(run.path, lambda: check_device(engine, arguments))
    on_main(run.path, lambda: check_trackers(arguments.trackers))
    source = on_main(run.path, lambda: prepare(arguments, run))
    plan = on_all(run.path, lambda: Plan(engine, arguments, run, source, resume_from))
    if resume_from is not None:
        on_main(run.path, lambda: check_same_run(resume_from, plan.fingerprint))
    return plan


def check_device(engine: Engine, arguments: PretrainArguments) -> None:
    """Raises UserError if the device of this process lacks what the arguments ask for, or would round positions."""
    device = engine.accelerator.device
    check_attention(arguments, device)
    if arguments.compile:
        check_compiler("compile", device)
    # Other engines than DDP give layers bfloat16 inputs.
    if arguments.position_sampling == "jitter" and arguments.mixed_precision == "bf16" and engine.name != "ddp":
        raise UserError(
            f"position_sampling=jitter has fractions, which engine={engine.name} rounds to bfloat16; take subset, "
            "engine=ddp, or mixed_precision=no"
        )


def save_final(trainer: Trainer, result: Result) -> None:
    """Saves model, tokenizer, generation settings and card under another name and renames them when all are there."""
    run, partial = trainer.run, partial_path(trainer.run.model)
    weights = trainer.engine.full_weights(trainer.model)
    if trainer.average is not None:
        with trainer.average.in_place(trainer.module):
            averages, averaged = trainer.engine.full_weights(trainer.model), result_of_average(trainer, result)
            on_main(run.path, lambda: save_model(trainer, partial_path(run.average), averages, averaged))

    def save() -> None:
        save_model(trainer, partial, weights, result)
        if trainer.average is not None:
            remove(run.average)
            put_in_place(partial_path(run.average), run.average)
        # An earlier model of this run is removed before the result is replaced, so that a model in the folder always
        # belongs to the result beside it.
        remove(run.model)
        stored = dataclasses.asdict(result) | {"arguments": dataclasses.asdict(trainer.arguments)}
        write_json(run.result, stored, default=str)
        put_in_place(partial, run.model)

    on_main(run.path, save)


def result_of_average(trainer: Trainer, result: Result) -> Result:
    """The result of the averaged weights, which the model holds now; `result` is that of the last weights."""
    scored = trainer.measure_validation()
    return dataclasses.replace(
        result,
        model=trainer.run.average,
        train_loss=None,
        validation_loss=scored.loss,
        perplexity=scored.perplexity,
        bits_per_byte=scored.bits_per_byte,
    )


def save_model(trainer: Trainer, folder: Path, weights: dict[str, Tensor], result: Result) -> None:
    """Writes a model with `weights`, its tokenizer, generation settings and card into a folder."""
    model, tokenizer = trainer.module, trainer.plan.tokenizer
    reset_generation(model)
    model.save_pretrained(folder, state_dict=weights)
    save_tokenizer(tokenizer, folder, model.config, trainer.arguments.sequence_length)
    composed = getattr(model.config, "composed_heads", None) is not None
    write_card(folder, trainer.arguments, result, model.config.model_type, composed_in_place=composed)
