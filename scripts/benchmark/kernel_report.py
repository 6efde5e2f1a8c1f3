"""The GPU resources of the Triton kernels, compiled without a GPU: registers, shared memory, spills, instructions.

    python -m dynattn.scripts.benchmark.kernel_report FOLDER
    python -m dynattn.scripts.benchmark.kernel_report --capability 90 --configurations "all terms, 16 heads"

The first writes `record.json` and `table.md` into a folder. The second prints what each kernel of a configuration takes
on one compute capability, a line of JSON for each configuration.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from triton.backends.nvidia.compiler import get_ptxas

from ..common.environment import source_commit, versions
from ..common.markdown import table
from .kernel_compilation import SHARED_MEMORY, Compiled, compile_axpy, compile_configuration
from .kernel_configurations import CONFIGURATIONS
from .report.record import write_report
from .sass import disassemble, parse

MODULE = "dynattn.scripts.benchmark.kernel_report"
# The compute capabilities of a report.
CAPABILITIES = (80, 90)
COLUMNS = {"registers": "registers", "shared": "shared memory, bytes", "spilled": "spilled, bytes"}
COLUMNS |= {"instructions": "instructions", "outside": "outside of the loop"}
COLUMNS |= {"maps": "bytes of maps", "cached": "bytes of matrices and terms"}
HEADING = f"""`python -m {MODULE} model_cards/records/triton-compiled`

Compiled ahead of time, not run: commit {{commit}}, triton {{triton}}, torch {{torch}}.

Of a thread: registers (255 at most), bytes that it spills, and, where a kernel loops over heads or turns,
instructions for each (head, query, key) in that loop and outside of it. Of a program: shared memory. On paper, for the
kernels on the tensor cores: bytes for each (head, query, key) of maps, and of matrices and terms, which many programs
read and the second-level cache serves.
"""
# The name of a kernel that tests the counting of instructions.
AXPY = "axpy"
PATTERNS = {"registers": r"Used (\d+) registers", "spilled": r"(\d+) bytes spill stores"}


def main(argv: Sequence[str] | None = None) -> None:
    """Writes the whole report, or prints a part of it."""
    parser = argparse.ArgumentParser(prog=f"python -m {MODULE}", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("folder", nargs="?", type=Path, help="where to write record.json and table.md")
    parser.add_argument(
        "--capability",
        type=int,
        choices=list(SHARED_MEMORY),
        help="print what kernels take on this compute capability, as in 90",
    )
    parser.add_argument(
        "--configurations",
        nargs="*",
        default=[],
        choices=[*CONFIGURATIONS, AXPY],
        metavar="NAME",
        help="print these alone; by default all of them",
    )
    options = parser.parse_args(argv)
    if options.capability is not None:
        print_kernels(options.capability, options.configurations or list(CONFIGURATIONS))
    elif options.folder is not None:
        record = report()
        write_report(record, as_markdown(record), options.folder)
    else:
        parser.error("give a folder, or --capability")


def print_kernels(capability: int, names: Sequence[str]) -> None:
    """Prints what the kernels of these configurations take, a line of JSON for each configuration."""
    for name in names:
        kernels = compile_axpy(capability) if name == AXPY else compile_configuration(CONFIGURATIONS[name], capability)
        taken = {kernel: resources(compiled, capability) for kernel, compiled in kernels.items()}
        print(json.dumps([name, taken]), flush=True)


def report() -> dict[str, Any]:
    """Compiles all configurations for all capabilities; returns what each kernel takes, by capability."""
    with ThreadPoolExecutor() as pool:
        taken = dict(zip(CAPABILITIES, pool.map(compile_elsewhere, CAPABILITIES), strict=True))
    return {
        "commit": source_commit(),
        "versions": versions("triton"),
        "capabilities": {f"sm_{capability}": kernels for capability, kernels in taken.items()},
    }


def compile_elsewhere(capability: int, *names: str) -> dict[str, Any]:
    """Returns what `print_kernels` prints in a process of its own, since one that interprets kernels cannot compile."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", MODULE, "--capability", str(capability), "--configurations", *names]
    result = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    return dict(map(json.loads, result.stdout.splitlines()))


def as_markdown(record: dict[str, Any]) -> str:
    """Returns the tables of a record."""
    parts = [HEADING.format(commit=record["commit"], **record["versions"])]
    for capability, configurations in record["capabilities"].items():
        rows = [
            [configuration, f"`{kernel}`", *(str(taken.get(column, "")) for column in COLUMNS)]
            for configuration, kernels in configurations.items()
            for kernel, taken in kernels.items()
        ]
        parts.append(f"\n**{capability}**\n\n{table(['configuration', 'kernel', *COLUMNS.values()], rows)}")
    return "\n".join(parts) + "\n"


def resources(compiled: Compiled, capability: int) -> dict[str, Any]:
    """Returns shared memory, registers of a thread, bytes that it spills, instructions of a loop, and traffic."""
    taken = {"shared": compiled.kernel.metadata.shared, **_assembler_report(compiled.kernel.asm["ptx"], capability)}
    traffic = {} if compiled.traffic is None else compiled.traffic._asdict()
    return taken | (_instructions(compiled) if compiled.entries else {}) | traffic


def _instructions(compiled: Compiled) -> dict[str, Any]:
    """A thread's instructions for an entry: in loops, also by class, and outside of them, over all turns."""
    program = parse(disassemble(compiled.kernel.asm["cubin"]))
    by_class = {kind: round(count / compiled.entries, 2) for kind, count in sorted(program.counts.items())}
    return {
        "instructions": round(sum(program.counts.values()) / compiled.entries, 1),
        "by_class": by_class,
        "outside": round(program.straight / (compiled.entries * compiled.turns), 1),
    }


def _assembler_report(ptx: str, capability: int) -> dict[str, int]:
    """The registers of a thread and the bytes that it spills, as the assembler reports them."""
    # Triton has an assembler for some architectures that reads newer PTX than the one for others.
    assembler = get_ptxas(capability).path
    with tempfile.TemporaryDirectory() as folder:
        source, cubin = Path(folder, "kernel.ptx"), Path(folder, "kernel.cubin")
        source.write_text(ptx)
        command = [assembler, "-v", f"-arch=sm_{capability}{'a' if capability >= 90 else ''}", str(source)]
        told = subprocess.run([*command, "-o", str(cubin)], capture_output=True, text=True, check=True).stderr
    found = {name: re.search(pattern, told) for name, pattern in PATTERNS.items()}
    return {name: int(match[1]) for name, match in found.items() if match}


if __name__ == "__main__":
    main()
