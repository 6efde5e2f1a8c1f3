"""Blocks of code in Markdown, and the commands in them."""

import re
import shlex
from collections.abc import Iterator


def fenced_blocks(text: str, language: str) -> list[str]:
    """The blocks of a language."""
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.MULTILINE | re.DOTALL)


def commands_of(text: str) -> Iterator[list[str]]:
    """The words of every `dynattn` command in the blocks of bash, without comments and what follows a pipe or `&&`."""
    for block in fenced_blocks(text, "bash"):
        for line in block.replace("\\\n", " ").splitlines():
            words = shlex.split(line, comments=True)
            ends = [index for index, word in enumerate(words) if word in ("|", "&", "&&", ">", ";")]
            words = words[: min(ends, default=len(words))]
            if words[:1] == ["dynattn"]:
                yield words[1:]
