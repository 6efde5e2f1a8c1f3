"""The Triton kernels compiled for GPUs that need not be there: every configuration fits, without spilling registers.

`python tests/modeling/ops/dcmha/test_triton_compile.py 90` prints what each kernel takes on that compute
capability; names of `CONFIGURATIONS` after it choose some of them.
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

triton = pytest.importorskip("triton")
tl = pytest.importorskip("triton.language")
GPUTarget = pytest.importorskip("triton.backends.compiler").GPUTarget

RECORD = Path(__file__).parents[4] / "model_cards" / "records" / "triton-compiled" / "record.json"
# Bytes of shared memory that a program may have.
SHARED_MEMORY = {80: 163 * 1024, 90: 227 * 1024}
# Bytes that a thread may spill: a few values outside of the loops.
SPILLED, SPILLED_IN_DECODING = 4, 16
# With matrices it is some values of every turn, by the number of heads.
SPILLED_BY_MATRICES = {16: 192, 32: 512}
# Instructions of threads for a (head, query, key), with ten percent to spare.
INSTRUCTIONS = {
    "all terms, 16 heads": {
        "dcmha_statistics": 32,
        "dcmha_probs": 42,
        "dcmha_backward_post": 110,
        "dcmha_backward_pre": 97,
    },
    "matrices, 16 heads": {
        "dcmha_matrix_statistics": 24,
        "dcmha_matrix_probs": 28,
        "dcmha_matrix_backward_post": 51,
        "dcmha_matrix_backward_pre": 48,
    },
}


class Configuration(NamedTuple):
    """What the kernels for several queries are compiled for."""

    heads: int = 16
    dtype: str = "bf16"
    # Packed rows (rank 2 and a gate are 5) before and after the softmax, of queries and of keys.
    rows: tuple[int, int, int, int] = (5, 5, 5, 5)
    has_static: bool = False
    is_additive: bool = False
    has_documents: bool = False
    is_band: bool = False


class ByMatrices(NamedTuple):
    """What the kernels that hold all heads are compiled for."""

    heads: int = 16
    dtype: str = "bf16"
    sides: tuple[bool, bool, bool, bool] = (True,) * 4
    has_mask: bool = False
    has_static: bool = False
    is_band: bool = False
    dtype_of_rows: str = "bf16"

    @property
    def padded(self) -> int:
        return 16 if self.heads <= 16 else 32


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


class InBands(NamedTuple):
    """What the matrix products of windows are compiled for."""

    width: int = 64
    dtype: str = "bf16"
    share: int = 1
    is_added: bool = False
    window: int = 256


class Compiled(NamedTuple):
    """A kernel and, if its loop is over heads or turns, what a program of it works on."""

    kernel: Any
    entries: float = 0  # of a thread in each turn of the loop
    turns: int = 1


AnyConfiguration = Configuration | ByMatrices | InBands | Decoding
CONFIGURATIONS: dict[str, AnyConfiguration] = {
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
    "window": Configuration(is_band=True),
    "matrices, 16 heads": ByMatrices(),
    "matrices, 32 heads": ByMatrices(32),
    "matrices, 12 heads, float16": ByMatrices(12, "fp16", dtype_of_rows="fp16"),
    "matrices, rows in float32": ByMatrices(dtype_of_rows="fp32"),
    "matrices, 24 heads, masks": ByMatrices(24, has_mask=True),
    "matrices, static": ByMatrices(has_static=True),
    "matrices, 32 heads, static": ByMatrices(32, has_static=True),
    "matrices, window": ByMatrices(is_band=True),
    "matrices, 32 heads, window": ByMatrices(32, is_band=True),
    "matrices, queries alone": ByMatrices(sides=(True, False, True, False)),
    "matrices, keys alone": ByMatrices(sides=(False, True, False, True)),
    "matrices, pre alone": ByMatrices(32, sides=(True, True, False, False)),
    "matrices, post alone": ByMatrices(32, sides=(False, False, True, True)),
    "band": InBands(),
    "band, width 80, float16, several chunks": InBands(80, "fp16", is_added=True),
    "band, width 128, shared keys": InBands(128, share=4),
    "band, float32": InBands(dtype="fp32"),
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
    "dcmha_backward_post": ("scores", "map", "scores", "map", "map", "fp32", "fp32", "fp32", "fp32"),
    "dcmha_backward_pre": ("scores", "map", "map", "fp32", "fp32", "fp32", "fp32"),
}
OWN_OF_MATRICES = {
    "dcmha_matrix_statistics": ("fp16", "fp32"),
    "dcmha_matrix_probs": ("fp16", "map", "fp32"),
    "dcmha_matrix_backward_post": ("fp16", "map", "map", "fp32", "partial", "rows", "fp32"),
    "dcmha_matrix_backward_pre": ("fp16", "map", "map", "fp32", "partial", "rows", "fp32"),
}
ROWS = 5


@pytest.fixture(scope="module", params=sorted(SHARED_MEMORY))
def compiled(request: pytest.FixtureRequest) -> tuple[int, dict[str, Any]]:
    """A compute capability and, by configuration and kernel, what was compiled for it."""
    return request.param, compile_elsewhere(request.param)


def compile_elsewhere(capability: int, *names: str) -> dict[str, Any]:
    """What this module prints: where this process interprets kernels, it cannot compile them."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, __file__, str(capability), *names]
    result = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    return dict(map(json.loads, result.stdout.splitlines()))


def test_the_instructions_of_a_known_loop_are_counted() -> None:
    taken = compile_elsewhere(90, "axpy")["axpy"]["axpy"]
    assert taken["by_class"]["float"] == 1  # a multiplication and an addition in one
    assert taken["by_class"]["memory"] == 3 / 4  # four entries to a load or a store
    assert sum(taken["by_class"].values()) == pytest.approx(taken["instructions"], abs=0.1)
    assert 1.75 < taken["instructions"] < 4


@pytest.mark.slow
def test_the_main_configurations_have_few_instructions(compiled: tuple[int, Any]) -> None:
    capability, takes = compiled
    if capability == 90:
        for configuration, limits in INSTRUCTIONS.items():
            for name, limit in limits.items():
                taken = takes[configuration][name]
                assert taken["instructions"] + taken["outside"] <= limit


@pytest.mark.slow
@pytest.mark.parametrize("configuration", CONFIGURATIONS)
def test_kernels_fit_and_do_not_spill(configuration: str, compiled: tuple[int, Any]) -> None:
    capability, takes = compiled
    kind = CONFIGURATIONS[configuration]
    if isinstance(kind, Configuration):
        assert takes[configuration].keys() == OWN.keys() | {"dcmha_merge"}
    limit = SPILLED_IN_DECODING if isinstance(kind, Decoding) else SPILLED
    if isinstance(kind, ByMatrices):
        limit = SPILLED_BY_MATRICES[kind.padded]
    for kernel in takes[configuration].values():
        assert kernel["shared"] <= SHARED_MEMORY[capability]
        assert kernel["spilled"] <= limit


def test_every_configuration_is_in_the_record() -> None:
    recorded = json.loads(RECORD.read_text())["capabilities"]
    assert {name: list(kernels) for name, kernels in recorded.items()} == {
        f"sm_{capability}": list(CONFIGURATIONS) for capability in SHARED_MEMORY
    }


@pytest.mark.slow
def test_the_record_says_what_these_kernels_take(compiled: tuple[int, Any]) -> None:
    capability, takes = compiled
    record = json.loads(RECORD.read_text())
    if record["versions"]["triton"] != triton.__version__:
        pytest.skip(f"the record is of Triton {record['versions']['triton']}, not {triton.__version__}")
    assert takes == record["capabilities"][f"sm_{capability}"]


@triton.jit
def axpy(x, y, factor, stride, rows: tl.constexpr, block: tl.constexpr):  # type: ignore[no-untyped-def,name-defined]
    """A kernel with a loop whose instructions are known."""
    for row in range(rows):
        places = row * stride + tl.arange(0, block)
        tl.store(y + places, tl.load(x + places) * factor + tl.load(y + places))


def compile_axpy(capability: int) -> dict[str, Compiled]:
    source = triton.compiler.ASTSource(
        axpy,
        {"x": "*fp32", "y": "*fp32", "factor": "fp32", "stride": "i32", "rows": "constexpr", "block": "constexpr"},
        {(4,): 1024, (5,): 512},
        {(index,): [["tt.divisibility", 16]] for index in (0, 1, 3)},
    )
    kernel = triton.compile(source, target=GPUTarget("cuda", capability, 32), options={"num_warps": 4})
    return {"axpy": Compiled(kernel, entries=4, turns=1024)}


def compile_all(configuration: AnyConfiguration, capability: int) -> dict[str, Compiled]:
    """Compiles with the specialisations that Triton would choose for aligned tensors."""
    if isinstance(configuration, Decoding):
        return compile_decoding(configuration, capability)
    if isinstance(configuration, ByMatrices):
        return compile_by_matrices(configuration, capability)
    if isinstance(configuration, InBands):
        return compile_in_bands(configuration, capability)
    from dynattn.modeling.ops.dcmha.triton.arguments import Factors, Sizes, Statics
    from dynattn.modeling.ops.dcmha.triton.tuning import MERGED, tiles_for

    heads, dtype, rows, *has = configuration
    has_static, is_additive, has_documents, is_band = has
    scores = "fp32" if dtype == "fp32" else "fp16"
    statics = (f"*{scores}", f"*{dtype}", f"*{dtype}") if has_static else ("none",) * 3
    strides = ("i32", "i32", "one")
    masks = ("*u8", *strides, "*fp32" if is_additive else "none", *strides)
    common = (
        Factors(*("*fp32" if count else "none" for count in rows)),
        Sizes("i32", "i32", "i32", "i32"),
        visibility(masks, "*i32" if has_documents else "none", is_band=is_band),
        Statics(*statics),
    )
    compiled = {}
    for name, own in OWN.items():
        block_t, block_s, warps = tiles_for(rows, wide_static=has_static and dtype == "fp32")[name]
        kinds = (*("*" + {"scores": scores, "map": dtype}.get(kind, kind) for kind in own), *common)
        constants = {"heads": heads, "rows": rows, "block_t": block_t, "block_s": block_s}
        # Lengths of rows are multiples of 16; what is visible starts and ends anywhere.
        kernel = compile_kernel(name, kinds, constants, capability, {len(own) + 2}, num_warps=warps)
        compiled[name] = Compiled(kernel, block_t * block_s / (32 * warps), heads)
    block_t, warps = MERGED
    kinds = ("*fp32", "*fp32", "i32", "i32", "i32")
    merge = compile_kernel("dcmha_merge", kinds, {"block_t": block_t}, capability, {2}, num_warps=warps)
    return compiled | {"dcmha_merge": Compiled(merge)}


def visibility(masks: tuple[str, ...], first_keys: str, *, is_band: bool) -> Any:
    from dynattn.modeling.ops.dcmha.triton.arguments import Visibility

    band = "i32" if is_band else "none"
    return Visibility(*("i32",) * 4, band, "i32", "i32", band, "one", *masks, first_keys, "i32")


def compile_by_matrices(configuration: ByMatrices, capability: int) -> dict[str, Compiled]:
    from dynattn.modeling.ops.dcmha.triton.arguments import Matrices, RowGradients, Sizes, StageRows
    from dynattn.modeling.ops.dcmha.triton.tuning import MATRICES, TURNS, matrix_tiles_for

    heads, dtype, sides, has_mask, has_static, is_band, dtype_of_rows = configuration
    padded, static = configuration.padded, "*fp32" if has_static else "none"
    strides = ("i32", "i32", "one")
    masks = ("*u8", *strides, "*fp32", *strides) if has_mask else ("none", *strides, "none", *strides)
    matrices = Matrices(*("*fp16" if side else "none" for side in sides))
    common = (
        matrices,
        Sizes("i32", "i32", "i32", "i32"),
        visibility(masks, "*i32" if has_mask else "none", is_band=is_band),
    )
    constants = {"heads": heads, "padded": padded, "turns": TURNS, "count": ROWS}
    partial = "bf16" if dtype == "bf16" else "fp32"
    compiled = {}
    for name, own in OWN_OF_MATRICES.items():
        block_t, block_s, warps, stages = matrix_tiles_for(padded)[name]
        of_query, of_key = sides[2:] if name.endswith("post") else sides[:2]
        given = {
            "partial": RowGradients(f"*{partial}" if of_query else "none", "*fp32" if of_key else "none", static),
            "rows": StageRows(*(f"*{dtype_of_rows}" if side else "none" for side in (of_query, of_key))),
            "map": f"*{dtype}",
        }
        kinds = (*(given.get(one, f"*{one}") for one in own), *common)
        tile = constants | {"block_t": block_t, "block_s": block_s}
        tile |= {"loads_ahead": stages > 1, "query_rows": ROWS if of_query else 0, "key_rows": ROWS if of_key else 0}
        kernel = compile_kernel(name, kinds, tile, capability, {len(own) + 2}, num_warps=warps, num_stages=stages)
        compiled[name] = Compiled(kernel, padded * block_t * block_s / (32 * warps), TURNS)
    block, warps = MATRICES
    name, kinds = "dcmha_matrices", ("*fp16", f"*{dtype_of_rows}", "*fp32", "i32")
    tile = constants | {"block": block}
    return compiled | {name: Compiled(compile_kernel(name, kinds, tile, capability, set(), num_warps=warps))}


def compile_in_bands(configuration: InBands, capability: int) -> dict[str, Compiled]:
    from dynattn.modeling.ops.dcmha.triton.arguments import Sizes
    from dynattn.modeling.ops.dcmha.triton.tuning import BAND_TILE, BAND_TILE_OF_FLOAT32, block_of

    width, dtype, share, is_added, window = configuration
    block_t, block_s, warps = BAND_TILE_OF_FLOAT32 if dtype == "fp32" else BAND_TILE
    step = block_of(window)
    constants = {"heads": 16, "share": share, "width": width, "step": step, "reach": window + step}
    constants |= {"is_added": is_added, "block_t": block_t, "block_s": block_s}
    sizes, strides = Sizes("i32", "i32", "i32", "i32"), ("i32",) * 3
    where = visibility(("none", *strides, "none", *strides), "none", is_band=True)
    kinds = {
        "dcmha_band_maps": (*(f"*{dtype}",) * 2, "*fp32" if dtype == "fp32" else "*fp16"),
        "dcmha_band_queries": (f"*{dtype}",) * 3,
        "dcmha_band_keys": (*(f"*{dtype}",) * 2, "*fp32" if is_added else f"*{dtype}"),
    }
    return {
        name: Compiled(
            compile_kernel(
                name, (*own, strides, strides, sizes, where, "fp32"), constants, capability, {6}, num_warps=warps
            )
        )
        for name, own in kinds.items()
    }


def compile_decoding(configuration: Decoding, capability: int) -> dict[str, Compiled]:
    from dynattn.modeling.ops.dcmha.triton.decode import (
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
        name: Compiled(compile_kernel(name, kinds[name], constants, capability, unaligned[name], **options))
        for name in kinds
    }


def compile_kernel(
    name: str, kinds: tuple[Any, ...], constants: dict[str, Any], capability: int, unaligned: set[int], **options: int
) -> Any:
    """Compiles for these kinds of arguments, of which all but the `unaligned` ones are divisible by 16."""
    import torch

    from dynattn.modeling.ops.dcmha.triton.kernels.registry import load_kernels

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


def takes_of(compiled: Compiled, capability: int) -> dict[str, Any]:
    """Bytes of shared memory, registers of a thread, bytes that it spills, and instructions if entries are known."""
    taken = {"shared": compiled.kernel.metadata.shared, **report_of(compiled.kernel.asm["ptx"], capability)}
    return taken | (instructions_of(compiled) if compiled.entries else {})


def instructions_of(compiled: Compiled) -> dict[str, Any]:
    """What a thread does for an entry, in loops by class; and outside of them, over all turns."""
    from sass import disassemble, parse

    program = parse(disassemble(compiled.kernel.asm["cubin"]))
    by_class = {kind: round(count / compiled.entries, 2) for kind, count in sorted(program.counts.items())}
    return {
        "instructions": round(sum(program.counts.values()) / compiled.entries, 1),
        "by_class": by_class,
        "outside": round(program.straight / (compiled.entries * compiled.turns), 1),
    }


def report_of(ptx: str, capability: int) -> dict[str, int]:
    """The registers of a thread and the bytes that it spills, as the assembler says."""
    assembler = Path(triton.__file__).parent / "backends/nvidia/bin/ptxas"
    with tempfile.TemporaryDirectory() as folder:
        source, cubin = Path(folder, "kernel.ptx"), Path(folder, "kernel.cubin")
        source.write_text(ptx)
        command = [str(assembler), "-v", f"-arch=sm_{capability}{'a' if capability >= 90 else ''}", str(source)]
        report = subprocess.run([*command, "-o", str(cubin)], capture_output=True, text=True, check=True).stderr
    patterns = {"registers": r"Used (\d+) registers", "spilled": r"(\d+) bytes spill stores"}
    found = {name: re.search(pattern, report) for name, pattern in patterns.items()}
    return {name: int(match[1]) for name, match in found.items() if match}


def main(capability: int, *names: str) -> None:
    for name in names or CONFIGURATIONS:
        kernels = compile_axpy(capability) if name == "axpy" else compile_all(CONFIGURATIONS[name], capability)
        takes = {kernel: takes_of(compiled, capability) for kernel, compiled in kernels.items()}
        print(json.dumps([name, takes]), flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]), *sys.argv[2:])
