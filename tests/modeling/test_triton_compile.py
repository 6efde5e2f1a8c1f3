"""The Triton kernels compiled for GPUs that need not be there: every configuration fits, without spilling registers.

`python tests/modeling/test_triton_compile.py 90` prints what each kernel takes on that compute capability.
"""

import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton")

# Bytes of shared memory that a program may have.
SHARED_MEMORY = {80: 163 * 1024, 90: 227 * 1024}
# Bytes that a thread may spill: one value outside of the loops.
SPILLED = 4
# Heads, dtype, and packed rows (rank 2 and a gate are 5) before and after the softmax of queries and of keys.
CONFIGURATIONS: dict[str, tuple[int, str, tuple[int, int, int, int]]] = {
    "all terms, 16 heads": (16, "bf16", (5, 5, 5, 5)),
    "all terms, 32 heads": (32, "bf16", (5, 5, 5, 5)),
    "all terms, 64 heads": (64, "bf16", (5, 5, 5, 5)),
    "all terms, 12 heads, float16": (12, "fp16", (5, 5, 5, 5)),
    "all terms, 16 heads, float32": (16, "fp32", (5, 5, 5, 5)),
    "rank 1": (16, "bf16", (3, 3, 3, 3)),
    "rank 4": (32, "bf16", (9, 9, 9, 9)),
    "rank 4, float32": (16, "fp32", (9, 9, 9, 9)),
    "low rank alone": (16, "bf16", (4, 4, 4, 4)),
    "gates alone": (16, "bf16", (1, 1, 1, 1)),
    "queries alone": (16, "bf16", (5, 0, 5, 0)),
    "keys alone": (16, "bf16", (0, 5, 0, 5)),
    "pre alone": (16, "bf16", (5, 5, 0, 0)),
    "post alone": (16, "bf16", (0, 0, 5, 5)),
    "nothing": (16, "bf16", (0, 0, 0, 0)),
}
# Tensors that a kernel takes before the arguments of all: scores, other maps, float32.
OWN = {
    "dcmha_statistics": ("scores", "fp32"),
    "dcmha_probs": ("scores", "map", "fp32"),
    "dcmha_backward_post": ("scores", "map", "map", "fp32", "fp32", "fp32", "fp32"),
    "dcmha_backward_pre": ("scores", "map", "map", "fp32", "fp32", "fp32", "fp32"),
}


@pytest.fixture(scope="module", params=sorted(SHARED_MEMORY))
def compiled(request: pytest.FixtureRequest) -> tuple[int, dict[str, dict[str, dict[str, int]]]]:
    """A compute capability and, by configuration and kernel, what was compiled for it.

    Another process compiles: where this one interprets kernels, it cannot.
    """
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, __file__, str(request.param)]
    result = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    return request.param, dict(map(json.loads, result.stdout.splitlines()))


@pytest.mark.slow
@pytest.mark.parametrize("configuration", CONFIGURATIONS)
def test_kernels_fit_and_do_not_spill(configuration: str, compiled: tuple[int, Any]) -> None:
    capability, takes = compiled
    assert takes[configuration].keys() == OWN.keys()
    for kernel in takes[configuration].values():
        assert kernel["shared"] <= SHARED_MEMORY[capability]
        assert kernel["spilled"] <= SPILLED


def compile_kernel(name: str, heads: int, dtype: str, rows: tuple[int, ...], capability: int) -> Any:
    """Compiles with the specialisations that Triton would choose for aligned tensors and a mask."""
    import triton
    from triton.backends.compiler import GPUTarget

    from dynattn.modeling.ops.dcmha_triton_kernels import KERNELS
    from dynattn.modeling.ops.dcmha_triton_workspace import Factors, Sizes, Visibility, tiles_for

    block_t, block_s, warps = tiles_for(rows)[name]
    own = [{"scores": "fp32" if dtype == "fp32" else "fp16", "map": dtype}.get(kind, kind) for kind in OWN[name]]
    common = (
        Factors(*(f"*{dtype}" if count else "constexpr" for count in rows)),
        Sizes("i32", "i32", "i32", "i32"),
        Visibility("i32", "i32", "i32", "i32", "*u8", ("i32", "i32", "i32")),
    )
    constants = {"heads": heads, "rows": rows, "block_t": block_t, "block_s": block_s}
    kinds = [*(f"*{kind}" for kind in own), *common, *("constexpr" for _ in constants)]
    aligned = [(index,) for index in range(len(own))]
    aligned += [(len(own), index) for index, count in enumerate(rows) if count]
    aligned += [(len(own) + 1, index) for index in range(len(Sizes._fields))]
    absent = {(len(own), index): None for index, count in enumerate(rows) if not count}
    source = triton.compiler.ASTSource(
        KERNELS[name],
        dict(zip(KERNELS[name].arg_names, kinds, strict=True)),
        {**{(len(own) + 3 + index,): value for index, value in enumerate(constants.values())}, **absent},
        {path: [["tt.divisibility", 16]] for path in aligned},
    )
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options={"num_warps": warps})


def takes_of(kernel: Any, capability: int) -> dict[str, int]:
    """Bytes of shared memory, registers of a thread, and bytes that it spills, from the assembler's report."""
    import triton

    assembler = Path(triton.__file__).parent / "backends/nvidia/bin/ptxas"
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, "kernel.ptx")
        source.write_text(kernel.asm["ptx"])
        command = [str(assembler), "-v", f"-arch=sm_{capability}{'a' if capability >= 90 else ''}", str(source)]
        report = subprocess.run(
            [*command, "-o", str(Path(folder, "kernel.cubin"))], capture_output=True, text=True, check=True
        ).stderr
    patterns = {"registers": r"Used (\d+) registers", "spilled": r"(\d+) bytes spill stores"}
    found = {name: re.search(pattern, report) for name, pattern in patterns.items()}
    return {"shared": kernel.metadata.shared, **{name: int(match[1]) for name, match in found.items() if match}}


def main(capability: int) -> None:
    for configuration, (heads, dtype, rows) in CONFIGURATIONS.items():
        kernels = {name: compile_kernel(name, heads, dtype, rows, capability) for name in OWN}
        print(json.dumps([configuration, {name: takes_of(kernel, capability) for name, kernel in kernels.items()}]))


if __name__ == "__main__":
    main(int(sys.argv[1]))
