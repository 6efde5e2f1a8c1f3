"""Finding the folder of a checkpoint that a user names: a path, or a name on the Hub that is downloaded."""

from collections.abc import Collection
from contextlib import suppress
from pathlib import Path

from huggingface_hub import HfApi, snapshot_download
from huggingface_hub.errors import HTTPError, LocalEntryNotFoundError, OfflineModeIsEnabled

from ...common.checkpoint_files import COMPANION_PATTERNS, TOKENIZER_PATTERNS
from ...common.errors import UserError
from ...common.folder_names import absence, check_revision, may_be_on_the_hub, resolve_folder
from ...common.weight_files import FORMATS


def locate(source: str, revision: str | None = None) -> Path:
    """Returns the folder of a checkpoint, after downloading what a conversion needs if `source` is a name on the Hub.

    Raises:
        UserError: it is neither, or the Hub cannot be reached or does not have it.
    """
    check_revision(revision)
    folder = resolve_folder(source)
    if folder.exists():
        if revision is not None:
            raise UserError(
                f"revision {revision} only matters for a name on the Hub, and {source} is a folder; leave it out"
            )
        return folder
    if not may_be_on_the_hub(source):
        raise UserError(f"{source} does not exist; give the folder of a checkpoint, or its name on the Hub")
    try:
        return Path(snapshot_download(source, revision=revision, allow_patterns=_patterns(source, revision))).resolve()
    except (HTTPError, LocalEntryNotFoundError, OfflineModeIsEnabled, OSError) as error:
        where = source if revision is None else f"{source} at {revision}"
        raise absence(where, error) from error


def _patterns(source: str, revision: str | None) -> list[str]:
    """Weights in one format, and what else a conversion reads or copies."""
    files: list[str] = []
    with suppress(HTTPError, OfflineModeIsEnabled):  # an earlier download may be at hand, of either format
        files = [file.rfilename for file in HfApi().model_info(source, revision=revision).siblings or []]
    return ["config.json", *weight_patterns(files), *TOKENIZER_PATTERNS, *COMPANION_PATTERNS]


def weight_patterns(files: Collection[str]) -> list[str]:
    """Patterns of the weights in a repository with `files` that `find_weight_files` reads; of all if they are unknown.

    Repositories may hold the same weights again: in another format, in sub-folders, or for another program, as
    `consolidated.safetensors` of Mistral.
    """
    for stem, suffix in FORMATS:
        if {f"{stem}{suffix}", f"{stem}{suffix}.index.json"} & {*files}:
            return [f"{stem}*{suffix}", f"{stem}*{suffix}.index.json"]
        if any("/" not in name and name.endswith(suffix) for name in files):
            return [f"*{suffix}"]
    return [f"*{suffix}{index}" for _, suffix in FORMATS for index in ("", ".index.json")]
