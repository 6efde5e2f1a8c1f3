"""The files of an evaluation, which are put in place of those of an earlier one all at once."""

import json
import shutil
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

from lm_eval.utils import handle_non_serializable

from ..common.atomic_file import put_in_place, write_json, write_whole
from ..common.atomic_folder import check_nothing_else
from ..common.disk_errors import disk_errors_explained
from ..common.errors import UserError
from ..common.folder_lock import FolderLock
from ..common.folder_names import make_folder, resolve_folder
from .arguments import EvaluateArguments
from .lm_eval_files import FOLDER, write_lm_eval_files
from .quoted import quoted_source
from .result_table import format_table
from .results import Results

RESULTS, TABLE, SAMPLES, PLOT = "results.json", "results.md", "samples.jsonl", "long.png"
LOCK = ".lock"


def check_output(folder: str | Path, overwrite: bool) -> None:
    """Raises UserError if results cannot be written into `folder`, or would replace others without `overwrite`.

    A folder `lm-eval` is only replaced if all that is in it are results and samples of lm-eval.
    """
    resolve_folder(str(folder))  # refuses names that no folder can have
    folder = Path(folder)
    taken = [name for name in (RESULTS, TABLE, SAMPLES, PLOT, FOLDER) if (folder / name).exists()]
    if taken and not overwrite:
        raise UserError(f"{folder / taken[0]} exists; choose another --output or pass --overwrite")
    check_nothing_else(folder / FOLDER, ("*/results_*.json", "*/samples_*.jsonl"))
    make_folder(folder)
    try:
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        raise UserError(f"cannot write into {folder}: {error.strerror}") from error


def write_results(results: Results, folder: str | Path, *, overwrite: bool = False) -> Path:
    """Writes results.json, results.md and, if samples were logged, samples.jsonl.

    The same results are also written as lm-eval writes them, into the folder lm-eval.

    Returns:
        The path of results.json.

    Raises:
        UserError: as `check_output`.
    """
    folder = Path(folder)
    content = asdict(replace(results, samples=[], raw=[]))  # which would be copied, and are written apart
    del content["samples"], content["raw"]
    if results.quoted:
        content["quoted_source"] = quoted_source()
    write_files(folder, content, format_table(results), partial(_write_details, results, content), overwrite=overwrite)
    return folder / RESULTS


def _write_details(results: Results, content: Mapping[str, Any], folder: Path) -> None:
    """Writes the samples, if they were logged, and lm-eval's own files; `content` is that of results.json."""
    lines = [json.dumps(sample, default=handle_non_serializable, ensure_ascii=False) for sample in results.samples]
    if lines:
        write_whole(folder / SAMPLES, "\n".join(lines) + "\n")
    write_lm_eval_files(results.raw, folder, content)


def report(
    arguments: EvaluateArguments,
    results: Mapping[str, Any],
    table: str,
    write_details: Callable[[Path], None] = lambda _: None,
) -> None:
    """Prints the table of an evaluation without lm-eval, and writes its files if there is an `--output`."""
    print(table)
    if arguments.output is not None:
        write_files(Path(arguments.output), results, table, write_details, overwrite=arguments.overwrite)


def write_files(
    folder: Path,
    results: Mapping[str, Any],
    table: str,
    write_details: Callable[[Path], None] = lambda _: None,
    *,
    overwrite: bool,
) -> None:
    """Writes the files of an evaluation of any kind in place of those of an earlier one: all of them or none.

    They are complete before the first is put in its place, and `results.json` is there only beside the others.

    Raises:
        UserError: as `check_output`, which is called again, because evaluating takes long enough for others to write;
            or a file cannot be written.
    """
    check_output(folder, overwrite)
    lock = FolderLock(folder / LOCK)
    with disk_errors_explained(folder):
        lock.wait()  # for another evaluation that ends at the same time
    with lock, disk_errors_explained(folder), tempfile.TemporaryDirectory(dir=folder, prefix=".partial-") as temporary:
        check_output(folder, overwrite)  # again, for what that one has written
        staging = Path(temporary)
        write_details(staging)
        write_whole(staging / TABLE, table + "\n")
        write_json(staging / RESULTS, results, ensure_ascii=False, allow_nan=False)
        for name in (RESULTS, TABLE, SAMPLES, PLOT):
            (folder / name).unlink(missing_ok=True)
        shutil.rmtree(folder / FOLDER, ignore_errors=True)
        for name in (FOLDER, PLOT, SAMPLES, TABLE, RESULTS):
            if (staging / name).exists():
                put_in_place(staging / name, folder / name)
