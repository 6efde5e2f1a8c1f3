"""Counts the machine instructions (SASS) of a compiled GPU kernel, by loop and by class."""

import re
import subprocess
import tempfile
from collections import defaultdict
from pathlib import Path
from typing import NamedTuple

# Instructions by their name up to the first dot. All others are arithmetic on integers and addresses, and control flow.
CLASSES = {
    "float": {"FADD", "FFMA", "FMUL", "FMNMX", "FSEL", "FSET", "FSETP", "HFMA2", "HMUL2"},
    "exponential": {"MUFU"},
    "conversion": {"F2F", "F2FP", "F2I", "HADD2", "I2F", "I2FP", "PRMT"},
    "memory": {"LDG", "STG"},
    "shared": {"BAR", "LDS", "LDSM", "STS", "STSM"},
    "shuffle": {"SHFL"},
    # A uniform instruction is executed once for a warp, but takes an issue slot like one of each thread.
    "uniform": {"UIADD3", "UIMAD", "ULDC", "ULEA", "ULOP3", "UMOV", "USHF", "R2UR", "S2UR"},
}
OTHER = "integer"
LABEL = re.compile(r"^(\.L_x_\d+):")
INSTRUCTION = re.compile(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z]\w*)(\S*)\s*(.*?);")
TARGET = re.compile(r"\.L_x_\d+")
# A loop that counts down ends when a register is zero.
COUNTER = re.compile(r"\bRZ, (U?R\d+)")
STEP = re.compile(r"-(0x[0-9a-f]+)")


class Instruction(NamedTuple):
    """One line of assembly."""

    name: str  # without modifiers
    operands: str


class Program(NamedTuple):
    """A kernel's instructions in order, and those of its innermost loops, from a label to the branch back to it."""

    instructions: list[Instruction]
    loops: list[list[Instruction]]

    @property
    def counts(self) -> dict[str, float]:
        """Instructions of one turn of every loop in the source, by class."""
        counts: defaultdict[str, float] = defaultdict(float)
        for loop in self.loops:
            share = 1 / unrolling_of(loop)
            for name, _ in loop:
                counts[class_of(name)] += share
        return counts

    @property
    def straight(self) -> int:
        """The number of instructions outside of loops, including the remainder turns of unrolled loops."""
        return len(self.instructions) - sum(map(len, self.loops))


def unrolling_of(loop: list[Instruction]) -> int:
    """The unrolling factor: by how much a loop's counter goes down in a turn, or 1 if it has no such counter."""
    tests = (COUNTER.search(operands) for name, operands in loop if name.endswith("ISETP"))
    counters = {match[1] for match in tests if match}
    for name, operands in loop:
        if name in {"IADD3", "UIADD3", "VIADD"} and operands.split(",")[0] in counters:
            step = STEP.search(operands)
            if step is not None:
                return int(step[1], 16)
    return 1


def class_of(name: str) -> str:
    """Returns the key of `CLASSES` that an instruction belongs to, or `OTHER`."""
    return next((kind for kind, names in CLASSES.items() if name in names), OTHER)


def disassemble(cubin: bytes) -> str:
    """Returns the assembly that `nvdisasm`, which comes with Triton, prints."""
    import triton

    tool = Path(triton.__file__).parent / "backends/nvidia/bin/nvdisasm"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        Path(file.name).write_bytes(cubin)
        return subprocess.run([str(tool), "-c", file.name], capture_output=True, text=True, check=True).stdout


def parse(assembly: str) -> Program:
    """Returns a kernel's instructions and its innermost loops."""
    instructions: list[Instruction] = []
    labels: dict[str, int] = {}
    spans: list[tuple[int, int]] = []
    for line in map(str.strip, assembly.splitlines()):
        if label := LABEL.match(line):
            labels[label[1]] = len(instructions)
        elif found := INSTRUCTION.search(line):
            instructions.append(Instruction(found[1], found[3]))
            target = TARGET.search(found[3]) if found[1] == "BRA" else None
            # Kernels end in a branch to itself.
            if target and target[0] in labels and labels[target[0]] < len(instructions) - 1:
                spans.append((labels[target[0]], len(instructions)))
    return Program(instructions, [instructions[slice(*span)] for span in spans if _is_innermost(span, spans)])


def _is_innermost(span: tuple[int, int], spans: list[tuple[int, int]]) -> bool:
    return not any(span != other and span[0] <= other[0] and other[1] <= span[1] for other in spans)
