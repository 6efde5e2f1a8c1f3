"""The job: checks the checkpoint, writes a temporary folder, verifies it, moves it into place, and pushes it."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from dynattn.remote_code import write_code

from ..common.atomic_file import write_json
from ..common.atomic_folder import claim_destination, staged_folder
from ..common.checkpoint_files import copy_files, file_sizes, read_config, without_code
from ..common.folder_names import resolve_destination, resolve_folder
from .arguments import PublishArguments
from .card import make_card
from .checkpoint import Checkpoint, read_checkpoint
from .hub import check_token_and_network, push
from .verify import PublishedCheck, answers_with_package, verify_folder


@dataclass(frozen=True)
class Publication:
    """A finished publication; `check` is None if it was not verified, and `url` if it was not pushed."""

    folder: Path
    checkpoint: Checkpoint
    sizes: dict[str, int]  # bytes of each file
    check: PublishedCheck | None
    url: str | None
    left_out: list[str]  # files of the checkpoint that do not belong into a published folder

    def report(self, repo: str | None) -> Iterator[str]:
        """The lines to print: checkpoint, check, files, and where they were pushed, or for a dry run would be."""
        yield f"checkpoint  {self.checkpoint.model_class.__name__}, {self.checkpoint.elements.total():,} parameters"
        if self.check is not None:
            yield f"verified    without the package: {', '.join(self.check.compared)}, saved and loaded again"
            yield f"            largest difference {self.check.max_difference:.1e}"
        yield f"written     {self.folder}"
        for name, size in self.sizes.items():
            yield f"{size:>14,}  {name}"
        if self.url is not None:
            yield f"pushed      {self.url}"
        elif repo is not None:
            total = sum(self.sizes.values())
            yield f"dry run     would upload these {len(self.sizes)} files, {total:,} bytes, to {repo}"

    def warnings(self) -> Iterator[str]:
        """What a user should know about the published folder."""
        if self.checkpoint.tokenizer is None:
            yield "the checkpoint has no tokenizer; users must bring their own"
        if self.check is None:
            yield "the folder was not verified"
        elif self.checkpoint.sentence_class is not None and "embeddings" not in self.check.compared:
            yield "what Sentence Transformers makes of the folder was not verified; pip install sentence-transformers"
        if self.left_out:
            yield f"left out {', '.join(self.left_out)}"


def publish(arguments: PublishArguments) -> Publication:
    """Makes a self-contained folder from a checkpoint, verifies it, and pushes it if a repository is named.

    Raises:
        UserError: the checkpoint cannot be published, the destination cannot be written, the folder does not work on
            its own, or the push fails. Unless it was the push, the destination is as it was before.
    """
    beside = f"{resolve_folder(arguments.checkpoint)}-hub"
    destination = resolve_destination(beside if arguments.output is None else arguments.output)
    checkpoint = read_checkpoint(arguments.checkpoint)
    check_free = claim_destination(destination, checkpoint.folder, arguments.overwrite)
    repo = None if arguments.dry_run else arguments.repo
    if repo is not None:
        check_token_and_network()
    expected = answers_with_package(checkpoint) if arguments.verify else None
    with staged_folder(destination, check_free) as staging:
        write_folder(staging, checkpoint, arguments)
        check = verify_folder(staging, checkpoint, expected) if expected is not None else None
    url = None
    if repo is not None:
        options = {name: getattr(arguments, name) for name in ("private", "revision", "commit_message")}
        url = push(destination, repo, **options)
    written = {path.name for path in destination.iterdir()}
    left_out = sorted(path.name for path in checkpoint.folder.iterdir() if path.name not in written)
    return Publication(destination, checkpoint, file_sizes(destination), check, url, left_out)


def write_folder(folder: Path, checkpoint: Checkpoint, arguments: PublishArguments) -> None:
    """Writes the published form of a checkpoint into the empty `folder`.

    Raises:
        UserError: the model card or the scores are not what the Hub accepts.
    """
    copy_files(checkpoint.files_to_copy, checkpoint.folder, folder)
    write_code(checkpoint.config, folder)
    config = {**without_code(read_config(checkpoint.folder)), "auto_map": checkpoint.config.auto_map}
    config.pop("_name_or_path", None)  # where old versions of Transformers read it, perhaps a path on some machine
    write_json(folder / "config.json", config, sort_keys=True)
    (folder / "README.md").write_text(make_card(checkpoint, arguments), encoding="utf-8")
