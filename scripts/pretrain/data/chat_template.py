"""The chat template of a run on conversations: a file of the user's, the tokenizer's own, or that of this package."""

import hashlib
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from ...common.errors import UserError, first_line

SHIPPED = Path(__file__).parents[1] / "recipes" / "chat.jinja"


def give_chat_template(tokenizer: PreTrainedTokenizerBase, file: str | None) -> str:
    """Gives a tokenizer the template in `file`. Without a file it keeps its own, or gets that of this package.

    Returns:
        A digest of the template that it was given; empty if it keeps its own.

    Raises:
        UserError: the file cannot be read.
    """
    if file is None and tokenizer.chat_template:
        return ""
    try:
        template = Path(file or SHIPPED).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise UserError(
            f"cannot read the chat template {file!r}: {first_line(error)}; give a file with a template in Jinja"
        ) from error
    tokenizer.chat_template = template
    return digest_of(template)


def digest_of(template: str) -> str:
    """A digest that is equal for equal templates only."""
    return hashlib.blake2b(template.encode(), digest_size=16).hexdigest()
