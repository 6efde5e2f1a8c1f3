"""The kernels that the Triton path launches, compiled for absent GPUs from the arguments of the launches.

`python tests/modeling/ops/dcmha/test_triton_launch.py sm_90 bfloat16 0 3` does so for some cases of `test_triton`.
"""

import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest

triton = pytest.importorskip("triton")

TENSOR_CORES = {f"dcmha_matrix_{name}" for name in ("statistics", "probs", "backward_post", "backward_pre")}
TENSOR_CORES |= {"dcmha_matrices", "dcmha_merge"}
BACKWARD = {"dcmha_matrix_backward_post", "dcmha_matrix_backward_pre", "dcmha_window_keys"}
WINDOW = {f"dcmha_window_{name}" for name in ("maps", "queries", "keys")}
HEAD_BY_HEAD = {f"dcmha_{name}" for name in ("statistics", "probs", "backward_post", "backward_pre", "merge")}
DECODING = {f"dcmha_decode_{name}" for name in ("scores", "outputs", "sum")}


class Warming(NamedTuple):
    """A kernel that is compiled instead of launched, and adds its name to `names`."""

    name: str
    kernel: Any
    names: set[str]

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., Any]:  # type: ignore[override]
        self.names.add(self.name)
        return partial(self.kernel.warmup, grid=grid)


def target_of(architecture: str) -> Any:
    """Triton's target for `sm_90`, `gfx942` and the like."""
    is_amd = architecture.startswith("gfx")
    kind, name, threads_of_a_warp = ("hip", architecture, 64) if is_amd else ("cuda", int(architecture[3:]), 32)
    return triton.backends.compiler.GPUTarget(kind, name, threads_of_a_warp)


def compile_elsewhere(architecture: str, dtype: str, *cases: int) -> list[set[str]]:
    """Returns the names of the kernels that were compiled for each case."""
    return [set(names) for names in run_elsewhere(architecture, dtype, *cases)]


def run_elsewhere(architecture: str, dtype: str, *cases: int | str) -> list[Any]:
    """Returns what this module prints in a process of its own, since one that interprets kernels cannot compile."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, __file__, architecture, dtype, *map(str, cases)]
    result = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    return list(map(json.loads, result.stdout.splitlines()))


def test_steps_launch_what_compiles_and_lengths_compile_few_variants() -> None:
    """A training step, one in float32's way and a decoding step; then prompts and caches of any length.

    The training step is the one of the fewest elements with these kernels, as they compile soonest.
    """
    *launched, variants, of_decoding = run_elsewhere("sm_90", "bfloat16", 8, 3, 9, "variants")
    assert list(map(set, launched)) == [TENSOR_CORES | WINDOW, HEAD_BY_HEAD, DECODING]
    # Chunks of rows, and windows with padding before the first key or without.
    assert set(variants) == (TENSOR_CORES | WINDOW) - BACKWARD
    assert max(variants.values()) <= 1 + 2
    # One block of keys in a split or several, one split or several.
    assert set(of_decoding) == DECODING
    assert max(of_decoding.values()) <= 4


@pytest.mark.slow
@pytest.mark.parametrize("architecture", ["sm_80", "sm_90"])
def test_what_calls_with_tables_by_distance_launch_compiles(architecture: str) -> None:
    sums = {"dcmha_distance_sums"}
    launched = run_elsewhere(architecture, "bfloat16", "tables")
    assert list(map(set, launched)) == [TENSOR_CORES | sums, HEAD_BY_HEAD | WINDOW | sums, DECODING]


@pytest.mark.slow
def test_the_same_compiles_for_gpus_of_amd() -> None:
    assert compile_elsewhere("gfx942", "bfloat16", 1, 3, 9) == [TENSOR_CORES | WINDOW, HEAD_BY_HEAD, DECODING]


@pytest.mark.slow
@pytest.mark.parametrize("architecture", ["sm_80", "sm_90"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_what_is_launched_in_all_large_cases_compiles(architecture: str, dtype: str) -> None:
    launched = compile_elsewhere(architecture, dtype)
    assert {frozenset(names) for names in launched} == (
        {frozenset(kernels) for kernels in (HEAD_BY_HEAD, HEAD_BY_HEAD | WINDOW, DECODING)}
        if dtype == "float32"
        else {frozenset(kernels) for kernels in (HEAD_BY_HEAD, TENSOR_CORES, TENSOR_CORES | WINDOW, DECODING)}
    )


def print_variants(dtype: str) -> None:
    """Prints how often each kernel would be compiled for prompts of many lengths, then the same for decoding."""
    import torch
    from cases.composed_op import in_dtype
    from test_triton import Case, random_inputs

    from dynattn.modeling.ops.dcmha.triton.attention import dcmha_triton

    names: list[str] = []

    def note(kernel: Any, key: Any, *_: Any) -> None:
        names.append(kernel.__name__)
        kernel.device_caches[0][0][key] = kernel

    triton.runtime.jit.JITFunction._do_compile = note
    lengths = 15, 16, 17, 33, 64, 127, 128, 129, 200, 256, 500
    prompts = [(queries, queries + before, 32) for queries in lengths for before in (0, 1, 15, 16, 100)]
    for shapes in (prompts, [(1, keys, None) for keys in (*range(1, 40), *lengths, 1000, 4096, 5000)]):
        for queries, keys, window in shapes:
            case = Case(queries, keys, heads=(16, 16), window=window, width=16, rank=1)
            tensors, keywords = in_dtype(getattr(torch, dtype), *random_inputs(case))
            with torch.no_grad():
                dcmha_triton(*tensors[:3], **keywords)
        print(json.dumps(Counter(names)))
        names.clear()


def run_with_tables(case: Any, dtype: Any, *, compose_bias: bool) -> None:
    """Runs a case with a bias and a gain, which have gradients in a case with several queries."""
    import torch
    from cases.composed_op import in_dtype
    from test_triton import random_inputs, run

    from dynattn.modeling.ops.dcmha.triton.attention import dcmha_triton
    from dynattn.modeling.ops.distance_tables import DistanceTables

    tensors, keywords = in_dtype(dtype, *random_inputs(case))
    tables = [torch.randn(case.keys, case.heads[0], requires_grad=True) for _ in range(2)]
    keywords["tables"] = DistanceTables(*tables, None, compose_bias)
    if case.queries > 1:
        run(dcmha_triton, [*tensors, *tables], keywords)
    else:
        with torch.no_grad():
            dcmha_triton(*tensors[:3], **keywords)


def main(architecture: str, dtype: str, *chosen: str) -> None:
    """Prints what each chosen case of `test_triton` launches and then `variants`, or what calls with `tables` do."""
    import torch
    from cases.composed_op import in_dtype
    from test_triton import LARGE, LARGE_DECODING, random_inputs, run

    from dynattn.modeling.ops.dcmha.triton import decode, workspace
    from dynattn.modeling.ops.dcmha.triton.attention import dcmha_triton
    from dynattn.scripts.benchmark.precompilation import AbsentDriver

    names: set[str] = set()
    kernels = {
        name: Warming(name, kernel, names) for name, kernel in workspace.load_kernels(torch.device("cuda")).items()
    }
    for module in (workspace, decode):
        module.load_kernels = lambda device: kernels
    triton.runtime.driver.set_active(AbsentDriver(target_of(architecture)))
    cases = [*LARGE, *LARGE_DECODING]
    if chosen == ("tables",):
        for case, compose_bias in ((LARGE[0], False), (LARGE[1], True), (LARGE_DECODING[0], False)):
            run_with_tables(case, getattr(torch, dtype), compose_bias=compose_bias)
            print(json.dumps(sorted(names)), flush=True)
            names.clear()
        return
    for index in map(int, filter(str.isdigit, chosen)) if chosen else range(len(cases)):
        tensors, keywords = in_dtype(getattr(torch, dtype), *random_inputs(cases[index]))
        if cases[index].queries > 1:
            run(dcmha_triton, tensors, keywords)
        else:
            with torch.no_grad():
                dcmha_triton(*tensors[:3], **keywords)
        print(json.dumps(sorted(names)), flush=True)
        names.clear()
    if "variants" in chosen:
        print_variants(dtype)


if __name__ == "__main__":
    sys.path.append(str(Path(__file__).parents[3]))  # which has `cases`
    main(*sys.argv[1:])
