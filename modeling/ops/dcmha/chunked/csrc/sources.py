"""The C files of this folder, each as one text that a compiler can read from its standard input.

Their local includes are expanded. `#line` directives make the compiler's messages name the C file and its line.
"""

import re
from pathlib import Path

INCLUDE = re.compile(r'#include "(.+)"')
# Code that travels with a checkpoint has no C files, so these constants travel in place of this module.
FLAT_CONSTANTS = ("COMPOSE", "DECODE", "PASSES")


def read_source(name: str) -> str:
    """Returns the text of the C file `name`, with the text of each file that it includes in place of the directive."""
    return _read(name, set())


def _read(name: str, included: set[str]) -> str:
    """As `read_source`, but leaves out the files in `included`, to which it adds each file that it reads."""
    included.add(name)
    text = Path(__file__).with_name(name).read_text(encoding="utf-8")
    lines = [f'#line 1 "{name}"']
    for number, line in enumerate(text.splitlines(), start=1):
        include = INCLUDE.fullmatch(line)
        if include is None:
            lines.append(line)
        elif include[1] not in included:
            lines.append(_read(include[1], included) + f'#line {number + 1} "{name}"')
        else:
            lines.append("")
    return "\n".join(lines) + "\n"


COMPOSE = read_source("compose.c")
DECODE = read_source("decode.c")
PASSES = read_source("passes.c")
