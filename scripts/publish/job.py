"""The job: check, write into a temporary folder, prove it, move it into place, push."""

import json
import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from dynattn.remote_code import write_code

from ..errors import UserError
from .arguments import PublishArguments
from .card import make_card
from .checkpoint import Checkpoint, read_checkpoint
from .hub import check_token_and_network, push
from .verify import Verification, answers_with_package, verify_folder


@dataclass(frozen=True)
class Publication:
    """What was written, how it was verified (None: it was not), and where it was pushed to (None: nowhere)."""

    folder: Path
    checkpoint: Checkpoint
    sizes: dict[str, int]  # bytes of each file
    verification: Verification | None
    url: str | None
    left_out: list[str]  # files of the checkpoint that do not belong into a published folder


def publish(arguments: PublishArguments) -> Publication:
    """Makes a self-contained folder from a checkpoint, verifies it, and pushes it if a repository is named.

    Raises:
        UserError: the checkpoint, the destination or the Hub does not allow it. The destination is then as it was
            before, except when only the push failed.
    """
    destination = arguments.destination
    checkpoint = read_checkpoint(arguments.checkpoint)
    check_destination(destination, checkpoint.folder, arguments.overwrite)
    repo = None if arguments.dry_run else arguments.repo
    if repo is not None:
        check_token_and_network()
    expected = answers_with_package(checkpoint) if arguments.verify else None
    with staged_folder(destination) as staging:
        write_folder(staging, checkpoint, repo=arguments.repo, license_name=arguments.license)
        verification = verify_folder(staging, checkpoint, expected) if expected is not None else None
    url = None
    if repo is not None:
        options = {name: getattr(arguments, name) for name in ("private", "revision", "commit_message")}
        url = push(destination, repo, **options)
    sizes = {path.name: path.stat().st_size for path in sorted(destination.iterdir())}
    left_out = sorted(path.name for path in checkpoint.folder.iterdir() if path.name not in sizes)
    return Publication(destination, checkpoint, sizes, verification, url, left_out)


def write_folder(folder: Path, checkpoint: Checkpoint, *, repo: str | None, license_name: str | None) -> None:
    """Writes the published form of a checkpoint into the empty `folder`."""
    for name in checkpoint.files_to_copy:
        shutil.copyfile(checkpoint.folder / name, folder / name)
    write_code(checkpoint.config, folder)
    config = json.loads((checkpoint.folder / "config.json").read_text(encoding="utf-8"))
    config["auto_map"] = checkpoint.config.auto_map
    (folder / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    card = make_card(checkpoint, name=repo or checkpoint.folder.name, license_name=license_name)
    (folder / "README.md").write_text(card, encoding="utf-8")


def check_destination(destination: Path, source: Path, overwrite: bool) -> None:
    """Raises UserError where writing would lose something, or would mix the folder with the checkpoint."""
    if destination == source or destination.is_relative_to(source) or source.is_relative_to(destination):
        raise UserError(f"the output {destination} and the checkpoint {source} overlap; give another folder (--output)")
    if not destination.exists():
        return
    if not destination.is_dir():
        raise UserError(f"the output {destination} is a file; give a folder (--output)")
    if any(destination.iterdir()):
        if not overwrite:
            raise UserError(f"the output {destination} exists; give another folder (--output), or --overwrite")
        if not (destination / "config.json").is_file():
            raise UserError(
                f"the output {destination} holds no checkpoint, so it is not overwritten; remove it yourself"
            )


@contextmanager
def staged_folder(destination: Path) -> Iterator[Path]:
    """Yields a new folder beside `destination` that takes its place at the end, or vanishes if the block fails.

    Raises:
        UserError: the disk does not allow it.
    """
    staging, replaced = (destination.with_name(f".{destination.name}.{uuid.uuid4().hex[:8]}") for _ in range(2))
    try:
        destination.parent.mkdir(parents=True, exist_ok=True)
        staging.mkdir()
        yield staging
        if destination.exists():
            destination.replace(replaced)
        staging.replace(destination)
    except OSError as error:
        raise UserError(f"cannot write {destination}: {error.strerror or error}") from error
    finally:
        if replaced.exists() and not destination.exists():
            replaced.replace(destination)
        for leftover in (staging, replaced):
            shutil.rmtree(leftover, ignore_errors=True)
