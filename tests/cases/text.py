"""Blocks of code in Markdown, and the commands in them."""

import re
import shlex
from collections.abc import Iterator
from contextlib import suppress

# Blocks of settings and modules that name their file in the first line are written there; Python runs as well.
BLOCK = re.compile(r"(?:^<!-- not run: (.+?) -->\n+)?^```(bash|python|yaml)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
FILE_NAME = re.compile(r"# (\w+\.(?:py|yaml))$", re.MULTILINE)
INSTALL = re.compile(r"^pip install .*$", re.MULTILINE)


def blocks_of(text: str) -> Iterator[tuple[str, str]]:
    """Language and content of each block of a guide that runs."""
    for reason, language, content in BLOCK.findall(text):
        if not reason:
            yield language, INSTALL.sub("", content)


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
