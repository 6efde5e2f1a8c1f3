"""The C files: they compile without warnings in every configuration, and errors name the file and the line."""

import os
import subprocess
from pathlib import Path

import pytest

from dynattn.modeling.ops import c_compiler, native_library
from dynattn.modeling.ops.dcmha.chunked.csrc import sources

pytestmark = pytest.mark.skipif(c_compiler.find_compiler() is None, reason="there is no C compiler")
FOLDER = Path(sources.__file__).parent
# gcc notes that vectors of 16 elements are passed in memory where there is no AVX-512. Functions here are inlined.
WARNINGS = ("-Wall", "-Wextra", "-Werror", "-Wno-psabi")
MACROS = {
    "compose.c": ("LANES", "HEADS", "GROUPS", "QUERY_RANK", "QUERY_GATE", "KEY_RANK", "KEY_GATE"),
    "passes.c": ("LANES",),
    "decode.c": (
        "LANES",
        "WIDTH_LANES",
        "HEADS",
        "KV_HEADS",
        "GROUPS",
        "WIDTH",
        "ELEMENT_BYTES",
        "IS_FLOAT16",
        "TERMS",
    ),
}
CONFIGURATIONS = [
    ("compose.c", (16, 16, 2, 2, 1, 2, 1)),
    ("compose.c", (8, 6, 3, 0, 1, 3, 0)),
    ("compose.c", (4, 1, 1, 0, 0, 0, 1)),
    ("passes.c", (16,)),
    ("passes.c", (4,)),
    ("decode.c", (16, 16, 32, 8, 1, 128, 2, 1, 0)),
    ("decode.c", (2, 4, 6, 1, 3, 33, 4, 0, 0)),
    ("decode.c", (1, 1, 1, 1, 1, 2, 2, 0, 0)),
    ("decode.c", (16, 16, 32, 8, 1, 128, 2, 1, 5)),
    ("decode.c", (2, 4, 6, 1, 3, 33, 4, 0, 4)),
    ("decode.c", (4, 4, 4, 4, 1, 8, 4, 0, 1)),
]


def messages_of(file: str, values: tuple[int, ...], *options: str) -> str:
    """What the compiler says about a file."""
    macros = [f"-D{name}={value}" for name, value in zip(MACROS[file], values, strict=True)]
    command = [*(c_compiler.find_compiler() or ()), *c_compiler.FLAGS, *macros, *options]
    command += ["-O1", "-x", "c", "-c", "-", "-o", os.devnull]  # enough optimization for warnings about data flow
    source = sources.read_source(file)
    return subprocess.run(command, input=source, capture_output=True, text=True, check=False).stderr


@pytest.mark.parametrize(("file", "values"), CONFIGURATIONS, ids=str)
def test_there_are_no_warnings(file: str, values: tuple[int, ...]) -> None:
    assert messages_of(file, values, *WARNINGS) == ""


@pytest.mark.parametrize(
    ("file", "line"), [("vectors.h", "typedef FLOATS(LANES) vec;"), ("compose.c", "typedef float key_tile")]
)
def test_an_error_names_the_file_and_the_line(file: str, line: str) -> None:
    broken = sources.COMPOSE.replace(line, line.replace("typedef", "typdef"))
    number = (FOLDER / file).read_text().partition(line)[0].count("\n") + 1
    macros = tuple(zip(MACROS["compose.c"], CONFIGURATIONS[0][1], strict=True))
    with pytest.raises(OSError, match=rf"{file}:{number}:\d+: error"):
        native_library.load_library.__wrapped__(broken, macros)


def test_sources_are_complete_and_hold_each_file_once() -> None:
    for text in (sources.COMPOSE, sources.DECODE, sources.PASSES):
        assert '#include "' not in text
        assert text.count("#ifndef DYNATTN_VECTORS_H") == 1
