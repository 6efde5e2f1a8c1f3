"""The job: loads the checkpoint, writes its graphs into a staging folder, proves them, and renames the folder."""

import logging
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from pathlib import Path

import torch
from transformers import PreTrainedModel
from transformers.utils import logging as transformers_logging

from ..common.atomic_folder import claim_destination, staged_folder
from ..common.checkpoint_files import TOKENIZER_PATTERNS, copy_files, file_sizes, forget_places, matching_files
from ..common.checkpoint_loading import check_vocabulary, load_tokenizer
from ..common.disk_errors import answer_of_the_disk
from ..common.errors import UserError, first_line
from ..common.folder_names import resolve_destination, resolve_folder
from .arguments import ExportArguments
from .checkpoint import load_checkpoint
from .formats import FORMATS, Format
from .graphs import export_graphs
from .proof import make_prompt, prove


def export_checkpoint(arguments: ExportArguments) -> list[str]:
    """Exports one checkpoint and returns what was done, line by line; if it fails, the destination stays as it was.

    Raises:
        UserError: the checkpoint cannot be exported, the destination cannot be written, a package is missing, or the
            graphs do not generate the same tokens.
    """
    source, destination = resolve_folder(arguments.source), resolve_destination(arguments.destination)
    target = FORMATS[arguments.format]
    check_free = claim_destination(destination, source, arguments.overwrite)
    with quiet(), staged_folder(destination, check_free) as staging:
        target.make_exporter()  # reports missing packages before any work is done
        model = load_checkpoint(source)
        if matching_files(source, TOKENIZER_PATTERNS):
            check_vocabulary(model, load_tokenizer(str(source)))
        prompt, mask = make_prompt(model.config, arguments.tokens, arguments.seed)
        write_graphs(staging, model, target)
        outcome = prove(staging, target, model, prompt, mask, arguments.tokens)
        copy_files(matching_files(source, TOKENIZER_PATTERNS), source, staging)
        sizes = [f"{size:>14,}  {name}" for name, size in file_sizes(staging).items()]
    read = f"{type(model).__name__}, {model.num_parameters():,} parameters"
    return [f"read        {read}", *sizes, f"verified    {outcome}", f"written     {destination}"]


def write_graphs(folder: Path, model: PreTrainedModel, target: Format) -> None:
    """Writes both graphs, their description and the configurations into `folder`.

    Raises:
        UserError: the exporter cannot translate the model.
    """
    try:
        with torch.no_grad():
            export_graphs(model, target).save_pretrained(folder)
        forget_places(folder / "config.json", folder / "config.json")
    except (UserError, OSError):
        raise
    except Exception as error:  # exporters raise errors of many types
        if reason := answer_of_the_disk(error):
            raise UserError(f"cannot write into {folder}: {reason}; is the disk full?") from error
        cause: BaseException = error  # exporters wrap it in advice about themselves
        while cause.__cause__ is not None:
            cause = cause.__cause__
        raise UserError(f"the exporter fails on this model: {type(cause).__name__}: {first_line(cause)}") from error


@contextmanager
def quiet() -> Iterator[None]:
    """In the block, what exporters print goes to standard error, without their warnings and progress bars."""
    disabled, shows_progress = logging.root.manager.disable, transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()
    logging.disable(logging.WARNING)
    try:
        with redirect_stdout(sys.stderr), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(disabled)
        if shows_progress:
            transformers_logging.enable_progress_bar()
