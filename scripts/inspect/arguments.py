"""The options of `dynattn inspect`."""

from dataclasses import dataclass, field
from pathlib import Path

from ..common.arguments import option
from ..common.errors import UserError

# Maps of more tokens than this cannot be read on a page, and the matrices of their pairs do not fit into memory.
MOST_TOKENS = 512


@dataclass
class InspectArguments:
    """Shows how a model with composed heads composes them on a text."""

    model: str = field(metadata={"help": "folder of a checkpoint, or its name on the Hub"})
    output: str = field(metadata={"help": "folder for page.html, measures.json and the pictures"})
    tokenizer: str | None = option(None, "folder or Hub name of the tokenizer; by default that of the model")
    text: str | None = option(None, "the text; by default, a page of the built-in corpus")
    file: str | None = option(None, "a file with the text")
    max_tokens: int = option(128, f"tokens of the text that are read, at most {MOST_TOKENS}")
    layer: int | None = option(None, "layer whose maps are drawn; by default the middle one")
    overwrite: bool = option(False, "replace an earlier inspection in the output folder")

    def __post_init__(self) -> None:
        if self.text is not None and self.file is not None:
            raise UserError("text and file exclude each other; give one")
        if self.text is not None:
            check_unicode(self.text)
        if not 2 <= self.max_tokens <= MOST_TOKENS:
            raise UserError(f"max_tokens={self.max_tokens} must be from 2 to {MOST_TOKENS}")
        if self.file is not None and not Path(self.file).is_file():
            raise UserError(f"file={self.file} does not exist; give a text file")


def check_unicode(text: str) -> None:
    """Raises UserError if a text has half of a surrogate pair, as Python reads bytes of a shell that are no UTF-8."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        half = f"\\u{ord(text[error.start]):04x}"
        raise UserError(
            f"text has {half} as character {error.start + 1}: half of a surrogate pair, or a byte that is no UTF-8; "
            "mend it, or give a UTF-8 file with --file"
        ) from error
