"""Writes the measurements of a run to `metrics.jsonl`, TensorBoard, other trackers and the terminal."""

import json
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

from accelerate import Accelerator
from accelerate.tracking import LOGGER_TYPE_TO_CLASS
from tqdm import tqdm

from ...common.atomic_file import without_nan, write_whole
from ...common.errors import UserError, first_line
from ...common.metric_records import MetricRecord, read_metrics

# The name of the project in trackers.
PROJECT = "dynattn"
# Splits that the terminal does not show, because their records have hundreds of fields.
UNSHOWN = ("composition",)


class MetricsLog:
    """Appends records to `metrics.jsonl`, TensorBoard and perhaps other trackers; only the main process writes.

    Opening it drops the lines after `step`, so that a resumed run has no line twice.
    """

    def __init__(self, path: Path, accelerator: Accelerator, step: int, trackers: Sequence[str] = ()) -> None:
        self.path, self.accelerator = path, accelerator
        if accelerator.is_main_process:
            _keep_until(path, step)
        try:
            accelerator.init_trackers("tensorboard", init_kwargs={"tensorboard": {"purge_step": step + 1}})
        except BaseException:  # such as a full disk, or a signal
            accelerator.trackers.clear()  # `end_training` would fail to end a tracker that has not started
            raise
        for name in trackers:
            start_tracker(accelerator, name, run_name=path.parent.resolve().name)

    def rewind(self, step: int) -> None:
        """Drops the lines after update `step`, to which the run has gone back."""
        if self.accelerator.is_main_process:
            _keep_until(self.path, step)

    def write(self, record: MetricRecord) -> None:
        """Stores one record: its `step`, its `split` and what was measured."""
        if self.accelerator.is_main_process:
            with self.path.open("a") as file:
                file.write(json.dumps(without_nan(record)) + "\n")
            if record["split"] not in UNSHOWN:
                tqdm.write(format_record(record))
        split, step = record["split"], record["step"]
        values = {f"{split}/{name}": value for name, value in record.items() if name not in ("split", "step")}
        self.accelerator.log(values, step=step)


def check_trackers(names: Sequence[str]) -> None:
    """Raises UserError if the package of a tracker is missing: before anything of an earlier run is replaced."""
    for name in names:
        if find_spec(name) is None:
            raise UserError(f"trackers: {name} is not installed; `pip install {name}`, or leave it out")


def start_tracker(accelerator: Accelerator, name: str, run_name: str) -> None:
    """Adds a tracker to the accelerator and starts it.

    Raises:
        UserError: it cannot be started, for example because its package is missing or the user is not logged in.
    """
    tracker = LOGGER_TYPE_TO_CLASS[name](PROJECT, name=run_name)
    try:
        tracker.start()
    except Exception as error:  # each package has errors of its own
        raise UserError(
            f"trackers: {name} does not start: {first_line(error)}; `pip install {name}` and log in, or leave it out"
        ) from error
    accelerator.trackers.append(tracker)


@contextmanager
def tensorboard_errors_told_once() -> Iterator[None]:
    """In the block, TensorBoard's thread prints no tracebacks, because its next call raises the same error."""
    usual = threading.excepthook

    def tell(failure: threading.ExceptHookArgs) -> None:
        if type(failure.thread).__module__.partition(".")[0] != "tensorboard":
            usual(failure)

    threading.excepthook = tell
    try:
        yield
    finally:
        threading.excepthook = usual


def format_record(record: MetricRecord) -> str:
    """One line for the terminal, without what was not measured."""
    parts = [f"step {record['step']}", record["split"]]
    for name, value in record.items():
        if name not in ("step", "split") and value is not None:
            parts.append(f"{name} {value:.4g}" if isinstance(value, float) else f"{name} {value}")
    return " · ".join(parts)


def _keep_until(path: Path, step: int) -> None:
    """Drops the records after update `step`, and lines that are not complete."""
    kept = [record for record in read_metrics(path) if record["step"] <= step]
    write_whole(path, "".join(json.dumps(record) + "\n" for record in kept))
