"""The Triton kernels compiled for GPUs that need not be there: every configuration fits, without spilling registers.

`python tests/modeling/test_triton_compile.py 90` prints what each kernel takes on that compute capability.
"""

import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

pytest.importorskip("triton")

# Bytes of shared memory that a program may have.
SHARED_MEMORY = {80: 163 * 1024, 90: 227 * 1024}
# Bytes that a thread may spill: a few values outside of the loops.
SPILLED, SPILLED_IN_DECODING = 4, 16


class Configuration(NamedTuple):
    """What the kernels for several queries are compiled for."""

    heads: int = 16
    dtype: str = "bf16"
    # Packed rows (rank 2 and a gate are 5) before and after the softmax, of queries and of keys.
    rows: tuple[int, int, int, int] = (5, 5, 5, 5)
    has_static: bool = False
    is_additive: bool = False
    has_documents: bool = False


class Decoding(NamedTuple):
    """What the kernels for one query are compiled for."""

    heads: int = 32
    kv_heads: int = 32
    width: int = 128
    dtype: str = "bf16"
    rank: int = 2
    groups: int = 1
    has_static: bool = False
    is_short: bool = False


CONFIGURATIONS: dict[str, Configuration | Decoding] = {
    "all terms, 16 heads": Configuration(),
    "all terms, 32 heads": Configuration(32),
    "all terms, 64 heads": Configuration(64),
    "all terms, 12 heads, float16": Configuration(12, "fp16"),
    "all terms, float32": Configuration(dtype="fp32"),
    "rank 1": Configuration(rows=(3, 3, 3, 3)),
    "rank 4": Configuration(32, rows=(9, 9, 9, 9)),
    "rank 4, float32": Configuration(dtype="fp32", rows=(9, 9, 9, 9)),
    "low rank alone": Configuration(rows=(4, 4, 4, 4)),
    "gates alone": Configuration(rows=(1, 1, 1, 1)),
    "queries alone": Configuration(rows=(5, 0, 5, 0)),
    "keys alone": Configuration(rows=(0, 5, 0, 5)),
    "pre alone": Configuration(rows=(5, 5, 0, 0)),
    "post alone": Configuration(rows=(0, 0, 5, 5)),
    "nothing": Configuration(rows=(0, 0, 0, 0)),
    "static": Configuration(has_static=True),
    "static, float32": Configuration(dtype="fp32", has_static=True),
    "static alone": Configuration(rows=(0, 0, 0, 0), has_static=True),
    "static, rank 4": Configuration(rows=(9, 9, 9, 9), has_static=True),
    "additive mask": Configuration(is_additive=True),
    "documents": Configuration(has_documents=True),
    "decoding, 32 heads": Decoding(),
    "decoding, width 80, float16": Decoding(width=80, dtype="fp16"),
    "decoding, 64 heads on 8, groups, static": Decoding(64, 8, groups=2, has_static=True),
    "decoding, 16 heads, float32": Decoding(16, 16, 64, "fp32"),
    "decoding, 12 heads, rank 1": Decoding(12, 12, 64, rank=1),
    "decoding, 64 heads, rank 4": Decoding(64, 64, rank=4),
    "decoding, 128 heads on 8": Decoding(128, 8),
    "decoding, one block": Decoding(is_short=True),
}
# Arguments that Triton compiles in: those that are absent, and numbers that are one.
KNOWN = {"none": None, "one": 1}
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
    decodes = isinstance(CONFIGURATIONS[configuration], Decoding)
    assert decodes or takes[configuration].keys() == OWN.keys() | {"dcmha_merge"}
    for kernel in takes[configuration].values():
        assert kernel["shared"] <= SHARED_MEMORY[capability]
        assert kernel["spilled"] <= (SPILLED_IN_DECODING if decodes else SPILLED)


def compile_all(configuration: Configuration | Decoding, capability: int) -> dict[str, Any]:
    """Compiles with the specialisations that Triton would choose for aligned tensors."""
    if isinstance(configuration, Decoding):
        return compile_decoding(configuration, capability)
    from dynattn.modeling.ops.dcmha_triton_arguments import Factors, Sizes, Statics, Visibility
    from dynattn.modeling.ops.dcmha_triton_workspace import MERGED, tiles_for

    heads, dtype, rows, *has = configuration
    has_static, is_additive, has_documents = has
    scores = "fp32" if dtype == "fp32" else "fp16"
    statics = (f"*{scores}", f"*{dtype}", f"*{dtype}") if has_static else ("none",) * 3
    strides = ("i32", "i32", "one")
    masks = ("*u8", strides, "*fp32" if is_additive else "none", strides)
    common = (
        Factors(*(f"*{dtype}" if count else "none" for count in rows)),
        Sizes("i32", "i32", "i32", "i32"),
        Visibility("i32", "i32", "i32", "i32", "one", *masks, "*i32" if has_documents else "none", "i32", "i32"),
        Statics(*statics),
    )
    compiled = {}
    for name, own in OWN.items():
        block_t, block_s, warps = tiles_for(rows, reads_more=has_static or is_additive)[name]
        kinds = (*("*" + {"scores": scores, "map": dtype}.get(kind, kind) for kind in own), *common)
        constants = {"heads": heads, "rows": rows, "block_t": block_t, "block_s": block_s}
        # Lengths of rows are multiples of 16; what is visible starts and ends anywhere.
        compiled[name] = compile_kernel(name, kinds, constants, capability, {len(own) + 2}, num_warps=warps)
    block_t, warps = MERGED
    kinds = ("*fp32", "*fp32", "i32", "i32", "i32")
    compiled["dcmha_merge"] = compile_kernel(
        "dcmha_merge", kinds, {"block_t": block_t}, capability, {2}, num_warps=warps
    )
    return compiled


def compile_decoding(configuration: Decoding, capability: int) -> dict[str, Any]:
    from dynattn.modeling.ops.dcmha_triton_decode import (
        STAGES,
        WARPS,
        CacheSizes,
        Hidden,
        Side,
        StageFactors,
        tile_sides,
    )

    heads, kv_heads, width, dtype, rank, groups, has_static, is_short = configuration
    sides, blocks = tile_sides(heads, kv_heads, width, itemsize=4 if dtype == "fp32" else 2)
    constants = {
        "heads": heads,
        "kv_heads": kv_heads,
        "width": width,
        "block_s": blocks[-1 if is_short else 0],
        **sides,
    }
    constants |= {"query_rank": rank, "key_rank": rank, "groups": groups}
    side = Side(*(f"*{dtype}",) * 3, "i32", "i32", "i32")
    stage = StageFactors(side, side, f"*{dtype}" if has_static else "none")
    where = Hidden("*u8", ("i32", "one"), "none", ("i32", "i32"), "none")
    # The last two are blocks of a split, and splits.
    sizes, strides = CacheSizes("i32", "i32", *("one" if is_short else "i32",) * 2), ("i32",) * 3
    tensors = (f"*{dtype}", f"*{dtype}", "*fp32", "*fp32")
    kinds = {
        "dcmha_decode_scores": (*tensors, stage, where, sizes, strides, strides, "fp32"),
        "dcmha_decode_outputs": ("*fp32", "*fp32", f"*{dtype}", "*fp32", stage, sizes, strides),
        "dcmha_decode_sum": ("*fp32", f"*{dtype}", "i32"),
    }
    # The number of keys is not divisible by 16, nor is that of splits.
    unaligned = {"dcmha_decode_scores": {6}, "dcmha_decode_outputs": {5}, "dcmha_decode_sum": {2}}
    options = {"num_warps": WARPS, "num_stages": STAGES}
    return {
        name: compile_kernel(name, kinds[name], constants, capability, unaligned[name], **options) for name in kinds
    }


def compile_kernel(
    name: str, kinds: tuple[Any, ...], constants: dict[str, Any], capability: int, unaligned: set[int], **options: int
) -> Any:
    """Compiles for these kinds of arguments, of which all but the `unaligned` ones are divisible by 16."""
    import torch
    import triton
    from triton.backends.compiler import GPUTarget

    from dynattn.modeling.ops.dcmha_triton_workspace import load_kernels

    kernel = load_kernels(torch.device("cuda"))[name]
    constants = {name: value for name, value in constants.items() if name in kernel.arg_names}
    named = dict(zip(kernel.arg_names, [*signature(kinds), *("constexpr" for _ in constants)], strict=True))
    values = {(kernel.arg_names.index(constant),): value for constant, value in constants.items()}
    values |= {path: KNOWN[kind] for path, kind in leaves(kinds) if kind in KNOWN}
    aligned = [path for path, kind in leaves(kinds) if kind[0] in "*i" and path[0] not in unaligned]
    source = triton.compiler.ASTSource(kernel, named, values, {path: [["tt.divisibility", 16]] for path in aligned})
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)


def signature(kinds: Any) -> Any:
    """Kinds as Triton names them."""
    if isinstance(kinds, str):
        return "constexpr" if kinds in KNOWN else kinds
    parts = map(signature, kinds)
    return type(kinds)(*parts) if hasattr(kinds, "_fields") else tuple(parts)


def leaves(kinds: tuple[Any, ...], path: tuple[int, ...] = ()) -> Iterator[tuple[tuple[int, ...], str]]:
    """Where each kind stands in nested tuples of them."""
    for index, kind in enumerate(kinds):
        if isinstance(kind, tuple):
            yield from leaves(kind, (*path, index))
        else:
            yield (*path, index), kind


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
    for name, configuration in CONFIGURATIONS.items():
        kernels = compile_all(configuration, capability)
        takes = {kernel: takes_of(compiled, capability) for kernel, compiled in kernels.items()}
        print(json.dumps([name, takes]), flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]))
