"""The training loop: updates, and the metrics, validations and checkpoints between them."""

import logging
import math
import time
from collections.abc import Iterator
from dataclasses import asdict
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import gather_object, send_to_device, set_seed
from torch import Tensor
from torch.utils.data import DataLoader
from tqdm import tqdm

from ..common.errors import StoppedError
from ..common.workers import own_messages
from . import guard
from .arguments import PretrainArguments
from .data.batch_order import ProcessBatches
from .data.objectives import Examples
from .engines.interface import Engine
from .fingerprint import sharing_of
from .guard import Batch, DivergedError, RollbackError
from .losses import divide_added_losses, loss_options, share_of_loss
from .optimizer import build_optimizer
from .outputs import checkpoint
from .outputs.checkpoint import TrainingProgress
from .outputs.checkpoint_writer import CheckpointWriter
from .outputs.composition_health import measure_health
from .outputs.metrics import MetricsLog
from .outputs.run_folder import RunFolder
from .outputs.throughput import Throughput
from .plan import Plan
from .processes import on_all, on_main
from .schedule import group_schedules, prepare_update
from .stopping import StopSignals, ignore_signals
from .validation import Validation, validate
from .weight_average import WeightAverage

logger = logging.getLogger(__name__)


class Trainer:
    """Trains from the update that `progress` has reached to the end of the schedule.

    The loss of an update is the mean over all target tokens of all its forward passes on all processes, so that
    gradient accumulation, processes and batch size only matter through their product.

    Args:
        resume_from: the checkpoint to go on from; None starts anew.

    Attributes:
        model, optimizer: as `engine` has prepared them.
        module: the model without the wrapper that an engine may have put around it.
        progress: how far the run has come.
        average: the moving average of the weights; None if it is not kept.
        stop_requested: whether some process had been asked to stop by the last update; it is the same on all processes.
    """

    def __init__(
        self,
        engine: Engine,
        arguments: PretrainArguments,
        run: RunFolder,
        plan: Plan,
        resume_from: Path | None,
        signals: StopSignals,
    ) -> None:
        """Places model and optimizer on the devices, and restores their state when resuming."""
        self.engine, self.arguments, self.run, self.plan, self.signals = engine, arguments, run, plan, signals
        self.accelerator = engine.accelerator
        divide_added_losses(plan.model, arguments.gradient_accumulation_steps * self.accelerator.num_processes)
        self.throughput = Throughput.of(plan.model, self.accelerator)
        self.model, self.optimizer = engine.prepare(
            plan.model, lambda model: build_optimizer(model, arguments), compiled=arguments.compile
        )
        self.module = self.accelerator.unwrap_model(self.model)
        set_seed(arguments.seed, device_specific=True)
        self.progress = TrainingProgress()
        self.average: WeightAverage | None = None
        if arguments.ema_decay is not None:
            self.average = WeightAverage(self.module, arguments.ema_decay)
        if resume_from is not None:
            self.progress = checkpoint.load(engine, resume_from, self.model, self.optimizer, plan.memory, self.average)
            self.throughput.restore(self.progress.throughput)
            on_main(run.path, lambda: run.leave_later_checkpoints(self.progress.step))
        self.metrics = MetricsLog(run.metrics, self.accelerator, self.progress.step, arguments.trackers)
        self.checkpoints = CheckpointWriter(
            self.accelerator, run.checkpoints, arguments.keep_checkpoints, arguments.save_in_background
        )
        self.stop_requested = False
        self._schedules = group_schedules(plan.schedule, arguments)

    def train(self) -> Validation:
        """Makes all remaining updates and returns the last validation.

        Raises:
            DivergedError: the validation loss is not finite, or there were too many bad updates.
            UserError: a rollback found no checkpoint, or a file could not be written.
            StoppedError: a process was asked to stop; the last update has been saved.
        """
        self.signals.continuing = self.arguments.continuing_command  # until now, an earlier run may be in the folder
        self.signals.react(after_update=True)
        batches: Iterator[Batch] = iter(self._loader())
        # Whether the run was stopped, and saved, between an update and the validation that follows it.
        is_behind = 0 < self.progress.step != self.progress.validated
        validation = self._validate() if is_behind and self._due(self.arguments.eval_every) else None
        begun, hidden = self.progress.step, None if self.accelerator.is_main_process else True
        with tqdm(initial=begun, total=self.plan.schedule.max_steps, unit="step", disable=hidden) as bar:
            while self.progress.step < self.plan.schedule.max_steps:
                try:
                    loss, norm = self._timed_update(batches)
                except RollbackError:
                    batches = self._roll_back(bar)
                    continue
                self._show(bar, loss)
                if self._due(self.arguments.log_every):
                    self._log_training(norm)
                if self._due(self.arguments.eval_every) and not self.stop_requested:
                    validation = self._validate()
                if self._due(self.arguments.save_every) or self.stop_requested:
                    self._save()
                if self.stop_requested:
                    self._stop()
        self.checkpoints.finish()
        validation = validation or self.measure_validation()
        self.signals.react(after_update=False)
        return validation

    def _timed_update(self, batches: Iterator[Batch]) -> tuple[float, float]:
        """Makes the next update and counts it; returns its loss and gradient norm, as `_update`."""
        started = time.perf_counter()
        taken = islice(batches, self.arguments.gradient_accumulation_steps)
        with own_messages():
            micro_batches = [self.plan.lengths.cut(batch, self.progress.step) for batch in taken]
        loss, norm = self._update(micro_batches)
        seconds = time.perf_counter() - started
        tokens = self.plan.order.global_batch * self.plan.train_sequences.length
        self.throughput.add(micro_batches if self.engine.groups.is_first else [], tokens, seconds)
        self.progress.add(loss, tokens, seconds)
        return loss, norm

    def _update(self, batches: list[Batch]) -> tuple[float, float]:
        """One update; returns its loss in nats per token, or nan if it was not made, and its gradient norm.

        There is nothing to learn from batches without targets, for example of the first turns of long conversations.
        """
        shares = self._accumulate(batches)
        # How many processes were asked to stop, and how many have written a checkpoint.
        facts = shares.new_tensor([self.signals.is_asked, self.checkpoints.is_written])
        sums = self.accelerator.reduce(torch.cat([shares, facts]), reduction="sum")
        prepare_update(self.optimizer, self._schedules, self.progress.step)
        clipped = self.engine.clip(self.model, self.arguments.max_grad_norm)
        # One transfer for all five numbers, because each transfer waits for the device.
        loss, targets, stops, writers, norm = torch.cat([sums, clipped.to(sums)[None]]).tolist()
        if writers == self.accelerator.num_processes:
            self.checkpoints.finish()
        fault = guard.find_fault(loss, norm, self.progress.recent_losses, self.arguments.spike_threshold)
        if targets == 0:
            loss = math.nan  # leaves this update out of all means
        elif fault is None:
            self.optimizer.step()
            if self.average is not None:
                self.average.update(self.module, self.progress.step)
            guard.remember(self.progress.recent_losses, loss)
        else:
            self._handle(fault, batches)
            loss = math.nan
        self.optimizer.zero_grad()
        self.stop_requested = stops > 0
        return loss, norm

    def _accumulate(self, batches: list[Batch]) -> Tensor:
        """All forward and backward passes over `batches` of `[B, T]`.

        Returns:
            This process's share of the loss and of the targets, `[2]`.
        """
        device = self.accelerator.device
        batches = [self.engine.groups.part(batch) for batch in batches]
        counts = [self.plan.objective.count(batch) for batch in batches]
        targets = self.accelerator.reduce(torch.tensor(sum(counts), device=device), reduction="sum")
        options = {
            "num_items_in_batch": targets.clamp(min=1),
            **loss_options(self.module, self.arguments.z_loss),
        }
        memory = self.plan.memory
        memory.begin_update(self.progress.data_step)
        self.engine.begin_update(self.model)
        total = torch.zeros((), device=device)
        for index, batch in enumerate(batches):
            with self.engine.accumulating(self.model, is_last=index == len(batches) - 1):
                placed = send_to_device(batch, device, non_blocking=True)
                loss = memory.loss(self.model, {**placed, **options}, index)
                loss = share_of_loss(self.module, loss, counts[index], options["num_items_in_batch"])
                self.engine.backward(loss)
            total += loss.detach()
        return torch.stack([total, total.new_tensor(sum(counts))])

    def _handle(self, fault: str, batches: list[Batch]) -> None:
        """Finds the cause of a bad update, which is not made, and keeps its batch. Training goes on unless this raises.

        Raises:
            DivergedError: the run should stop.
            RollbackError: it should go back to its newest checkpoint.
        """
        self.checkpoints.finish()
        progress, choice, most = self.progress, self.arguments.on_bad_update, self.arguments.max_bad_updates
        layer = guard.find_layer(
            self.module, lambda batch: self._forward(self.engine.groups.part(batch)), batches, self.engine.gradient
        )
        self.engine.end_scoring(self.model)
        documents = self.plan.documents(progress.data_step, self.engine.groups, self.arguments.batch_size)
        facts = {"step": progress.step + 1, "reason": fault, "layer": layer, "documents": documents}
        kept = self.run.incidents / guard.incident_name(progress)
        on_all(self.run.path, lambda: guard.keep_batch(kept, facts, batches, self.accelerator.process_index))
        progress.bad_updates += 1
        if choice == "stop" or progress.bad_updates > most:
            other = "give on_bad_update: skip or rollback" if choice == "stop" else f"raise max_bad_updates={most}"
            raise DivergedError(
                f"{guard.describe(facts, kept)}; training stopped; {self._last_checkpoint()}; lower learning_rate or "
                f"max_grad_norm, or lengthen warmup_steps, in a new run, or {other}"
            )
        logger.warning("%s; %s", guard.describe(facts, kept), choice)
        if choice == "rollback":
            raise RollbackError
        self.plan.memory.forget()  # it may hold hidden states that are not finite

    def _roll_back(self, bar: tqdm) -> Iterator[Batch]:
        """Goes back to the newest checkpoint, and returns the batches that follow those of the bad update.

        Raises:
            DivergedError: there is no checkpoint.
        """
        before, memory = self.progress, self.plan.memory
        self.optimizer.zero_grad()
        saved = checkpoint.list_checkpoints(self.run.checkpoints)
        if not saved:
            raise DivergedError(
                f"update {before.step + 1} is bad, and no checkpoint was saved to roll back to; start anew with a "
                "smaller save_every, or give on_bad_update: skip"
            )
        self.progress = checkpoint.load(self.engine, saved[-1], self.model, self.optimizer, memory, self.average)
        self.progress.skipped = before.data_step + 1 - self.progress.step
        self.progress.bad_updates = before.bad_updates
        self.throughput.restore(self.progress.throughput)
        memory.forget()  # the next batch does not follow the text in it
        self.metrics.rewind(self.progress.step)
        bar.update(self.progress.step - before.step)
        return iter(self._loader())

    def _last_checkpoint(self) -> str:
        """The newest checkpoint, which was saved before a fault, in words."""
        saved = checkpoint.list_checkpoints(self.run.checkpoints)
        return f"the last good checkpoint is {saved[-1]}" if saved else "no checkpoint had been saved"

    def _forward(self, batch: dict[str, Any]) -> Tensor:
        """The loss `[]` of the model's arguments, such as a batch of `[B, T]`, without carried memory."""
        arguments = {**send_to_device(batch, self.accelerator.device), **loss_options(self.module), "use_cache": False}
        return self.model(**arguments).loss

    def _log_training(self, norm: float) -> None:
        """Writes a line of training metrics: mean loss since the last one, learning rates, gradient norm and speed."""
        progress = self.progress
        self.metrics.write(
            {
                "step": progress.step,
                "split": "train",
                "loss": progress.loss_sum / progress.loss_count if progress.loss_count else None,
                **self._learning_rates(),
                "grad_norm": norm,
                "tokens": progress.tokens,
                **self.plan.order.passes_for_metrics(progress.data_step),
                **self.throughput.report(),
                "seconds": progress.seconds,
            }
        )
        progress.loss_sum, progress.loss_count = 0.0, 0

    def _learning_rates(self) -> dict[str, float]:
        """The learning rates of the last update: one, or two if the composition has a schedule of its own."""
        names = {False: "learning_rate", True: "composition_learning_rate"}
        return {names[composes]: schedule(self.progress.step - 1) for composes, schedule in self._schedules.items()}

    def _validate(self) -> Validation:
        """Scores the held-out text and writes the result to the metrics."""
        validation = self.measure_validation()
        if not math.isfinite(validation.loss):
            raise DivergedError(
                f"the validation loss after update {self.progress.step} is {validation.loss}, so training stopped; "
                f"{self._last_checkpoint()}; lower learning_rate in a new run"
            )
        record = {"step": self.progress.step, "split": "validation", "tokens": self.progress.tokens}
        record |= asdict(validation)
        if self.average is not None:
            with self.average.in_place(self.module):
                record["average_loss"] = self.measure_validation().loss
        self.metrics.write(record)
        self._log_health()
        self.progress.validated = self.progress.step
        return validation

    def _log_health(self) -> None:
        """Writes `measure_health` of the first held-out sequence to the metrics, if the model composes heads."""
        self.module.eval()  # dropout would change what is measured, and the random numbers of the updates after it
        health = measure_health(self.module, self._forward, self._held_out()[0, 0])
        self.engine.end_scoring(self.module)
        self.module.train()
        if health:
            self.metrics.write({"step": self.progress.step, "split": "composition", **health})

    def measure_validation(self) -> Validation:
        """Scores the held-out text with an empty memory."""
        memory = self.plan.memory.empty_copy()
        return validate(self.engine, self.model, self._held_out(), self.arguments.batch_size, memory)

    def _held_out(self) -> Examples:
        """The held-out text as examples for validation."""
        return Examples(self.plan.validation_sequences, self.plan.objective.for_validation())

    def _save(self) -> None:
        """Writes a checkpoint, or begins to write it in the background."""
        self.progress.throughput = self.throughput.counts()
        state = {
            "progress": asdict(self.progress),
            "fingerprint": self.plan.fingerprint,
            "sharing": sharing_of(self.arguments, self.engine),
        }
        tensors = self.engine.training_tensors(self.model, self.optimizer, self.average)
        self.checkpoints.write(self.progress.step, state, tensors, self.plan.memory)

    def _stop(self) -> None:
        """Ends the run after an update that has been saved; all processes raise the number of the same signal."""
        self.checkpoints.finish()
        number, how = max(gather_object([self.signals.requested])), self.arguments.continuing_command
        raise StoppedError(number, f"update {self.progress.step} is finished and saved, and {how} continues from there")

    def _due(self, every: int) -> bool:
        """Whether it is time for something that happens every `every` updates and after the last one."""
        return self.progress.step % every == 0 or self.progress.step == self.plan.schedule.max_steps

    def _loader(self) -> DataLoader[Batch]:
        """The batches `[B, T]` of this process in all remaining updates."""
        steps = range(self.progress.data_step, self.plan.schedule.max_steps + self.progress.skipped)
        groups = self.engine.groups
        return DataLoader(
            Examples(self.plan.train_sequences, self.plan.objective, self.plan.positions),
            batch_sampler=ProcessBatches(
                self.plan.order, steps, self.arguments.batch_size, groups.index, groups.number
            ),
            num_workers=self.arguments.dataloader_workers,
            pin_memory=self.accelerator.device.type == "cuda",
            worker_init_fn=ignore_signals,
            # Without its own generator the loader would draw from torch's global one, and so change the state that
            # checkpoints store.
            generator=torch.Generator(),
        )

    def _show(self, bar: tqdm, loss: float) -> None:
        tokens_per_second = self.progress.tokens / self.progress.seconds
        rates = "/".join(f"{rate:.2e}" for rate in self._learning_rates().values())
        bar.set_postfix_str(f"loss {loss:.3f}, lr {rates}, {tokens_per_second:,.0f} tokens/s", refresh=False)
        bar.update()
