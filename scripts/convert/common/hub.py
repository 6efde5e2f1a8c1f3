"""Finding the folder of a checkpoint that a user names: a path, or a name on the Hub that is downloaded."""

from pathlib import Path

from huggingface_hub import HfApi, snapshot_download
from huggingface_hub.errors import HTTPError, LocalEntryNotFoundError, OfflineModeIsEnabled

from ...common.checkpoint_files import COMPANION_PATTERNS, TOKENIZER_PATTERNS
from ...common.errors import UserError, first_line
from ...common.folder_names import check_revision, may_be_on_the_hub, resolve_folder

WEIGHT_PATTERNS = ("*.safetensors", "*.safetensors.index.json")
PICKLES = ("*.bin", "*.bin.index.json")


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
        raise UserError(
            f"{where} is no folder here, and the Hub did not give it: {first_line(error)}; check the name and the "
            "network, or give the folder of a checkpoint"
        ) from error


def _patterns(source: str, revision: str | None) -> list[str]:
    """Weights in one format, safetensors where there are any, and what else a conversion reads or copies."""
    weights: tuple[str, ...] = (*WEIGHT_PATTERNS, *PICKLES)
    try:
        files = [file.rfilename for file in HfApi().model_info(source, revision=revision).siblings or []]
        weights = WEIGHT_PATTERNS if any(name.endswith(".safetensors") for name in files) else PICKLES
    except (HTTPError, OfflineModeIsEnabled):
        pass  # an earlier download may be at hand, of either format
    return ["config.json", *weights, *TOKENIZER_PATTERNS, *COMPANION_PATTERNS]
