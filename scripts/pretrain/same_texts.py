"""Checks that the runs of a sweep or a study read the same texts, by the fingerprints that each run stores."""

from collections.abc import Iterable
from pathlib import Path

from ..common.atomic_file import read_json
from ..common.errors import UserError
from .arguments import PretrainArguments
from .data.preparation import SOURCE_FILE, Fingerprints, fingerprints
from .outputs.run_folder import RunFolder


def check_same_texts(planned: Iterable[PretrainArguments]) -> None:
    """Refuses to continue a study if the content of its texts has changed since its runs began.

    Args:
        planned: all runs of the sweep or study, which name the same texts; those that have not begun are passed over.

    Raises:
        UserError: a run has read other texts than there are now.
    """
    # One entry for each value of `streaming`: streams are told apart by their first documents, other data by all.
    now: dict[bool, Fingerprints] = {}
    for arguments in planned:
        file = RunFolder(Path(arguments.output)).data / SOURCE_FILE
        if not file.exists():
            continue
        read = read_json(file, f"remove {arguments.output} to repeat the run")  # earlier versions stored less
        if arguments.streaming not in now:
            now[arguments.streaming] = fingerprints(arguments)
        if changed := [name for name, found in now[arguments.streaming].items() if read.get(name, found) != found]:
            raise UserError(
                f"{arguments.output} has read other {' and '.join(changed).replace('_', ' ')} than there are now; give "
                "those texts, or another --output"
            )
