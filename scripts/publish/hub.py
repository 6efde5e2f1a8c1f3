"""Pushes a finished folder to the Hugging Face Hub, and explains in one line why that failed."""

from collections.abc import Iterable
from fnmatch import fnmatchcase
from pathlib import Path

from huggingface_hub import HfApi, constants, get_token
from huggingface_hub.errors import HfHubHTTPError, HTTPError

from ..common.checkpoint_files import ADAPTER, TOKENIZER_PATTERNS, matching_files
from ..common.errors import UserError, last_line

# Files of an earlier push that Transformers would prefer to those of this one, or mix with them.
STALE = [
    *("*.safetensors", "*.safetensors.index.json", "*.py", "pytorch_model*.bin*"),
    *("generation_config.json", "preprocessor_config.json", ADAPTER),
]
ADVICE = {
    401: "log in with `hf auth login`, or set HF_TOKEN to a token with write permission",
    403: "use a token with write permission for that namespace",
    404: "check the name of the repository, and that your token may see it",
}


def check_token_and_network() -> None:
    """Raises UserError if a push is bound to fail: there is no token, or the Hub's client is set to offline."""
    if constants.HF_HUB_OFFLINE:
        raise UserError("HF_HUB_OFFLINE is set, so nothing can be pushed; unset it, or leave out --repo")
    if get_token() is None:
        raise UserError(f"there is no token for the Hub; {ADVICE[401]}")


def push(
    folder: Path,
    repo: str,
    *,
    private: bool = False,
    revision: str | None = None,
    commit_message: str | None = None,
) -> str:
    """Creates the repository if it does not exist and uploads `folder` in one commit; returns the commit's address.

    Weights, code, indexes, adapters and settings of generation and preprocessing of an earlier push that `folder` does
    not have are deleted by the same commit. Where `folder` has a tokenizer, so are files of an earlier one, whose chat
    template would be taken for the new one's. What else the repository holds in sub-folders stays.

    Raises:
        UserError: the Hub cannot be reached, or refuses the push; `folder` stays as it is.
    """
    api = HfApi()
    try:
        # None instead of False, so that a repository that exists keeps its visibility.
        full_name = api.create_repo(repo, private=private or None, exist_ok=True).repo_id
        if revision is not None:
            api.create_branch(full_name, branch=revision, exist_ok=True)
        stale = replaced_files(api.list_repo_files(full_name, revision=revision), folder)
        commit = api.upload_folder(
            repo_id=full_name,
            folder_path=folder,
            revision=revision,
            commit_message=commit_message or "Publish with dynattn",
            delete_patterns=stale,
        )
    except (OSError, ValueError, RuntimeError, HTTPError) as error:
        raise UserError(
            f"cannot push to {repo} at {api.endpoint}: {_reason(error)}. The folder {folder} is complete; "
            "push it later with the same command and --overwrite"
        ) from error
    return commit.commit_url


def replaced_files(names: Iterable[str], folder: Path) -> list[str]:
    """Those of `names`, files of an earlier push, that are deleted where `folder` lacks them.

    In the Hub's client `*` matches slashes, too, so that patterns would also delete programs and models of others in
    sub-folders.
    """
    patterns = [*STALE, *(TOKENIZER_PATTERNS if matching_files(folder, TOKENIZER_PATTERNS) else ())]
    levels = [(pattern, pattern.count("/")) for pattern in patterns]
    return [name for name in names if any(fnmatchcase(name, one) and name.count("/") == n for one, n in levels)]


def _reason(error: Exception) -> str:
    """Why the Hub's client failed, in one line, and what the user can do about it."""
    if not isinstance(error, HfHubHTTPError):
        return last_line(str(error.__cause__ or error))
    status, said = error.response.status_code, error.server_message or "no reason given"
    return f"{status} ({last_line(said)}); {ADVICE.get(status, 'try again later')}"
