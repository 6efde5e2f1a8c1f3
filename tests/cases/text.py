"""Blocks of code in Markdown, and the commands in them."""

import re
import shlex
from collections.abc import Iterator
from contextlib import suppress


def fenced_blocks(text: str, language: str) -> list[str]:
    """The blocks of a language."""
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.MULTILINE | re.DOTALL)


def commands_of(text: str) -> Iterator[list[str]]:
    """The words of every `dynattn` command in the blocks of bash, without comments and what follows a pipe or `&&`."""
    for block in fenced_blocks(text, "bash"):
        for line in _whole_lines(block.replace("\\\n", " ")):
            words = shlex.split(line, comments=True)
            ends = [index for index, word in enumerate(words) if word in ("|", "&", "&&", ">", ";")]
            words = words[: min(ends, default=len(words))]
            if words[:1] == ["dynattn"]:
                yield words[1:]


def _whole_lines(block: str) -> Iterator[str]:
    """The lines of a shell's program, where a quotation may hold line breaks."""
    waiting = ""
    for line in block.splitlines():
        waiting += line + "\n"
        with suppress(ValueError):  # a quotation is open
            shlex.split(waiting, comments=True)
            yield waiting
            waiting = ""
