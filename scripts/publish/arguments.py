"""The options of `dynattn publish`."""

from dataclasses import dataclass, field

from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import validate_repo_id

from ..common.arguments import option
from ..common.errors import UserError
from ..common.folder_names import check_revision


@dataclass
class PublishArguments:
    """Arguments of one publication; a YAML file holds the same names.

    Raises:
        UserError: the Hub cannot have a repository or branch of that name, or an option has no effect without `repo`.
    """

    checkpoint: str = field(metadata={"help": "checkpoint folder; may be given without the option's name"})
    output: str | None = option(None, "folder to write; by default beside the checkpoint, with '-hub' appended")
    overwrite: bool = option(False, "replace the output folder if it holds a checkpoint")
    verify: bool = option(True, "load the folder in a process without this package, and compare its outputs")
    license: str | None = option(None, "license of the weights for the model card, such as apache-2.0")
    evaluation: str | None = option(
        None, "folder or results.json of dynattn evaluate, whose scores go into the model card's metadata"
    )
    repo: str | None = option(None, "repository on the Hub to push to, such as NAME/MODEL")
    dry_run: bool = option(False, "write and verify the folder, but leave the Hub alone")
    private: bool = option(False, "make the repository private if it does not exist yet")
    revision: str | None = option(None, "branch to push to (default: main), created if needed")
    commit_message: str | None = option(None, "message of the commit on the Hub")

    def __post_init__(self) -> None:
        check_revision(self.revision)
        if self.repo is not None:
            try:
                validate_repo_id(self.repo)
            except HFValidationError as error:
                raise UserError(
                    f"repo {self.repo!r} is no name for a repository, such as NAME/MODEL: {error}"
                ) from error
            return
        unused = [name for name in ("private", "revision", "commit_message") if getattr(self, name)]
        if unused:
            raise UserError(f"{', '.join(unused)} only matter for a push; give --repo NAME/MODEL, or leave them out")
