"""Token streams that several runs share: each text is tokenized once with each tokenizer."""

import hashlib
import json
import os
import shutil
from pathlib import Path

from datasets import Dataset

from ...common.atomic_file import partial_path, put_in_place, write_json
from ...common.errors import UserError
from ...common.folder_lock import FolderLock
from ..outputs import checksums
from .text_encoder import TextEncoder
from .token_stream import STREAM
from .tokenization import write_stream

FILES = "files.json"


def write_cached(
    dataset: Dataset, encoder: TextEncoder, folder: Path, *, cache: Path | None, workers: int, identity: dict[str, str]
) -> None:
    """Calls `write_stream` for `folder`; with a cache, for an entry of the cache, to whose files `folder` then links.

    An entry is named after a hash of `identity`, which says what it is made from. An unfinished entry is continued, and
    one that another process is writing is waited for.

    Raises:
        UserError: the entry is damaged, or was made from something else.
    """
    if cache is None:
        write_stream(dataset, encoder, folder, workers, identity)
        return
    key = hashlib.blake2b(json.dumps(identity, sort_keys=True).encode(), digest_size=16)
    entry = cache / key.hexdigest()
    if not entry.exists():
        _make(entry, dataset, encoder, workers, identity)
    _check(entry, identity)
    folder.mkdir(parents=True)
    for file in entry.iterdir():
        if file.name != FILES:
            link_or_copy(file, folder / file.name)


def link_or_copy(source: Path, target: Path) -> None:
    """Makes `target` a hard link to `source`, or a copy of it where the file system cannot link them."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)


def _make(entry: Path, dataset: Dataset, encoder: TextEncoder, workers: int, identity: dict[str, str]) -> None:
    """Writes an entry beside its place and moves it there when it is complete, or waits until another process has."""
    partial = partial_path(entry)
    lock = FolderLock(partial.with_suffix(".lock"))
    lock.wait()
    try:
        if entry.exists():
            return
        write_stream(dataset, encoder, partial, workers, identity)
        # An earlier process may have died here, and left its checksums.
        made = [file for file in partial.iterdir() if FILES not in file.name]
        write_json(partial / FILES, checksums.measure_files(partial, made))
        put_in_place(partial, entry)
    finally:
        lock.release()


def _check(entry: Path, identity: dict[str, str]) -> None:
    """Refuses an entry whose files are damaged, or that does not have this `identity`."""
    try:
        stored = json.loads((entry / STREAM).read_text())
        damage = checksums.find_damage(entry, json.loads((entry / FILES).read_text()))
    except (OSError, ValueError, AttributeError):
        stored, damage = {}, "its description is missing or cannot be read"
    differing = {name: value for name, value in identity.items() if stored.get(name) != value}
    others = [f"{name} {stored.get(name)} instead of {value}" for name, value in differing.items()]
    if damage := damage or ", ".join(others):
        raise UserError(f"the cached tokens in {entry} cannot be used: {damage}; delete that folder to make them anew")
