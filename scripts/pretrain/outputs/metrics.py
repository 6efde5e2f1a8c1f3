"""The run's measurements: one JSON object a line, TensorBoard, and the terminal."""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from accelerate import Accelerator
from tqdm import tqdm

from ...common.atomic_file import write_whole

Record = dict[str, Any]


class MetricsLog:
    """Appends records to `metrics.jsonl` and TensorBoard; only the main process writes.

    Opening it drops the lines after `step`, so that a resumed run has no line twice.
    """

    def __init__(self, path: Path, accelerator: Accelerator, step: int) -> None:
        self.path, self.accelerator = path, accelerator
        if accelerator.is_main_process:
            _keep_until(path, step)
        try:
            accelerator.init_trackers("tensorboard", init_kwargs={"tensorboard": {"purge_step": step + 1}})
        except OSError:
            accelerator.trackers.clear()  # one that has not started cannot be ended
            raise

    def write(self, record: Record) -> None:
        """Stores one record: its `step`, its `split` and what was measured."""
        if self.accelerator.is_main_process:
            with self.path.open("a") as file:
                file.write(json.dumps(record) + "\n")
            tqdm.write(format_record(record))
        split, step = record["split"], record["step"]
        values = {f"{split}/{name}": value for name, value in record.items() if name not in ("split", "step")}
        self.accelerator.log(values, step=step)


@contextmanager
def tensorboard_errors_told_once() -> Iterator[None]:
    """Silences TensorBoard's thread, which prints a traceback of the error that it hands to the next call as well."""
    usual = threading.excepthook

    def tell(failure: threading.ExceptHookArgs) -> None:
        if type(failure.thread).__module__.partition(".")[0] != "tensorboard":
            usual(failure)

    threading.excepthook = tell
    try:
        yield
    finally:
        threading.excepthook = usual


def read_metrics(path: Path, split: str | None = None) -> list[Record]:
    """Reads the records of one split, or all; a last line that was cut off is left out."""
    records = []
    for line in path.read_text().splitlines() if path.exists() else []:
        try:
            record = json.loads(line)
        except json.JSONDecodeError:
            continue
        if split is None or record["split"] == split:
            records.append(record)
    return records


def format_record(record: Record) -> str:
    """One line for the terminal."""
    parts = [f"step {record['step']}", record["split"]]
    for name, value in record.items():
        if name not in ("step", "split"):
            parts.append(f"{name} {value:.4g}" if isinstance(value, float) else f"{name} {value}")
    return " · ".join(parts)


def _keep_until(path: Path, step: int) -> None:
    """Drops the records after `step`, and a last line that was cut off."""
    kept = [record for record in read_metrics(path) if record["step"] <= step]
    write_whole(path, "".join(json.dumps(record) + "\n" for record in kept))
