"""The C code of the linear-memory op: as exact as the reference op in float32, whatever compiles it and runs it."""

import ctypes
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from cases.composed_op import CASES, DYNAMIC, Case, in_dtype, random_inputs, run
from torch import Tensor

from dynattn.modeling.ops import c_compiler, native_library
from dynattn.modeling.ops.dcmha.chunked import native_problem, passes, passes_native
from dynattn.modeling.ops.dcmha.chunked.composers import choice as composer_choice

from .test_chunked import documents

pytestmark = pytest.mark.skipif(c_compiler.find_compiler() is None, reason="there is no C compiler")

MORE = [
    Case(130, 130, heads=(16, 16), terms=DYNAMIC),
    Case(77, 200, heads=(6, 2), rank=3, window=50),
    Case(61, 61, heads=(5, 5), terms=frozenset({"query_gate"})),
    Case(257, 257, heads=(8, 8), groups=4, mask="padding"),
]


@pytest.fixture(params=["of the processor", "in plain C"])
def pairs(request: pytest.FixtureRequest, libraries: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Products of pairs of bfloat16 elements: those of this processor, if it has any, and the same in plain C."""
    if request.param == "in plain C":
        multiply_pairs(True, monkeypatch)


def multiply_pairs(value: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether plain C multiplies pairs: that of the least processor, which compiles soonest, and by itself does not."""
    load = passes_native.load_passes
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "DEFAULT")
    if value:
        monkeypatch.setattr(passes_native, "load_passes", lambda: load(PAIRS=1))


def assert_as_exact_as_the_reference(case: Case, **more: Tensor) -> None:
    tensors, keywords = random_inputs(case)
    keywords |= more
    expected = run(tensors, keywords, "eager")
    low = in_dtype(torch.float32, tensors, keywords)
    for ours, reference, true in zip(run(*low, "chunked"), run(*low, "eager"), expected, strict=True):
        error, noise = ((result - true).abs().max() for result in (ours, reference))
        assert error <= 4 * noise + 1e-6 * true.abs().max()


@pytest.mark.parametrize("threads", [1, 3], indirect=True)
@pytest.mark.parametrize("case", [case for case in CASES + MORE if case.queries > 1], ids=str)
def test_float32_is_as_exact_as_the_reference_is(case: Case, threads: None) -> None:
    assert_as_exact_as_the_reference(case)


@pytest.mark.parametrize("width", [8, 5, 1, 20])
@pytest.mark.parametrize(
    "case",
    [
        Case(130, 130, heads=(16, 16), terms=DYNAMIC),
        Case(77, 200, heads=(6, 2), rank=3, window=50, mask="padding"),
        Case(61, 61, heads=(4, 4), terms=frozenset({"static"}), mask="pairs"),
        Case(257, 255, heads=(8, 8), groups=4, stages=("post",)),
        Case(73, 73, stages=()),
    ],
    ids=str,
)
def test_bfloat16_is_as_exact_as_the_reference_is(case: Case, width: int, pairs: None) -> None:
    tensors, keywords = random_inputs(case)
    tensors[:3] = [torch.randn(*tensor.shape[:3], width, dtype=torch.float64) for tensor in tensors[:3]]
    low = in_dtype(torch.bfloat16, tensors, keywords)
    expected = run(*in_dtype(torch.float64, *low), "eager")
    for ours, reference, true in zip(run(*low, "chunked"), run(*low, "eager"), expected, strict=True):
        error, noise = ((result - true).norm() for result in (ours, reference))
        assert ours.dtype == torch.bfloat16
        assert error <= noise + torch.finfo(torch.bfloat16).eps * true.norm()


@pytest.mark.parametrize("bias", [-1e300, torch.finfo(torch.float32).min])
def test_elements_of_float64_masks_below_the_range_of_float32_hide_nothing(bias: float) -> None:
    """Where all keys have the same bias, all of them are seen."""
    tensors, keywords = in_dtype(torch.float32, *random_inputs(Case(5, 9)))
    keywords |= {"attention_mask": torch.full((1, 1, 5, 9), bias, dtype=torch.float64), "is_causal": False}
    expected, output = (run(tensors, keywords, name)[0] for name in ("eager", "chunked"))
    assert expected.abs().min() > 0
    torch.testing.assert_close(output, expected, atol=1e-5, rtol=1e-5)


def test_only_bfloat16_is_multiplied_in_pairs(monkeypatch: pytest.MonkeyPatch, libraries: None) -> None:
    tensors, keywords = random_inputs(Case(130, 130))
    calls = [in_dtype(dtype, tensors, keywords) for dtype in native_problem.TYPES]
    results = []
    for value in (False, True):
        with monkeypatch.context() as patch:
            multiply_pairs(value, patch)
            results.append([run(*call, "chunked")[0] for call in calls])
    same = [torch.equal(*pair) for pair in zip(*results, strict=True)]
    assert same == [dtype != torch.bfloat16 for dtype in native_problem.TYPES]


# One thread works on the items one by one, two threads on two or three at a time, four on all five.
@pytest.mark.parametrize("threads", [1, 2, 4])
@pytest.mark.parametrize(
    "case",
    [
        Case(130, 130, heads=(4, 2), groups=2, mask="padding", batch=5),
        Case(130, 130, window=50, mask="pairs of heads", batch=5),
        Case(130, 130, terms=frozenset({"static"}), mask="bias", batch=5),
        Case(130, 130, terms=DYNAMIC, mask="bias of keys", batch=5),
        Case(130, 130, batch=5),
        Case(130, 130, tables=("bias", "gain"), compose_bias=True, batch=5),
        Case(130, 130, tables=("bias", "gain"), offset=10, batch=5),
    ],
    ids=str,
)
def test_any_number_of_items_are_worked_on_at_a_time(case: Case, threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(passes_native, "usable_threads", lambda: threads)
    first_keys = {} if case.mask else {"first_keys": documents(5, 130)[0]}
    assert_as_exact_as_the_reference(case, **first_keys)


@pytest.mark.parametrize("queries", [36, 12])
@pytest.mark.parametrize(
    "case",
    [Case(130, 130), Case(130, 130, tables=("bias", "gain")), Case(130, 257, window=70, mask="padding")],
    ids=str,
)
def test_the_output_does_not_depend_on_the_length_of_chunks(
    case: Case, queries: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensors, keywords = in_dtype(torch.float32, *random_inputs(case))
    expected = run(tensors, keywords, "chunked")
    monkeypatch.setattr(passes_native, "CHUNK_QUERIES", (queries,))
    results = run(tensors, keywords, "chunked")
    assert torch.equal(results[0], expected[0])
    for ours, other in zip(results, expected, strict=True):
        torch.testing.assert_close(ours, other, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("turn", [lambda x: x.t().contiguous().t(), lambda x: x.repeat_interleave(2, 1)[:, ::2]])
def test_first_keys_may_have_any_strides(turn: Any) -> None:
    first_keys = documents(5, 130)[0]
    turned = turn(first_keys)
    assert turned.stride() != first_keys.stride()
    assert_as_exact_as_the_reference(Case(130, 130, batch=5), first_keys=turned)


@pytest.mark.parametrize("rank", [1, 2])
def test_stages_that_do_not_fit_on_a_stack_are_composed_without_c_code(
    rank: int, monkeypatch: pytest.MonkeyPatch, libraries: None
) -> None:
    shape = native_problem.StageShape(4, 1, 2 * rank + 1, 2 * rank + 1)
    monkeypatch.setattr(native_problem, "LARGEST_STACK", native_problem.StageShape(4, 1, 3, 3).stack)
    fits = shape.stack <= native_problem.LARGEST_STACK
    assert fits == (native_problem.load_stage(shape) is not None) == (rank == 1)
    assert_as_exact_as_the_reference(Case(66, 66, rank=rank, terms=DYNAMIC, batch=1))


def test_heads_that_do_not_fit_on_a_stack_are_left_to_pytorch(monkeypatch: pytest.MonkeyPatch, libraries: None) -> None:
    case, attend = Case(33, 33, batch=1), passes_native.attend_in_c
    width = random_inputs(case)[0][0].shape[-1]
    calls: list[bool] = []

    def count(*arguments: Any) -> Tensor:
        calls.append(True)
        return attend(*arguments)

    monkeypatch.setattr(passes, "attend_in_c", count)
    assert_as_exact_as_the_reference(case)
    assert calls
    calls.clear()
    monkeypatch.setattr(passes_native, "LARGEST_STACK", 4 * width - 1)
    assert_as_exact_as_the_reference(case)
    assert not calls


@pytest.mark.parametrize("capability", ["AVX2", "DEFAULT"])
@pytest.mark.parametrize("case", [Case(130, 130, heads=(16, 16)), Case(77, 200, mask="padding")], ids=str)
def test_lesser_processors_get_the_same(
    case: Case, capability: str, monkeypatch: pytest.MonkeyPatch, libraries: None
) -> None:
    if capability == "AVX2" and "avx2" not in Path("/proc/cpuinfo").read_text():
        pytest.skip("this processor cannot run AVX2")
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    assert c_compiler.lanes() == {"AVX2": 8, "DEFAULT": 4}[capability]
    assert_as_exact_as_the_reference(case)


@pytest.mark.parametrize("position", [0, 64, 129])
def test_a_nan_stays_in_its_row(position: int) -> None:
    tensors, keywords = in_dtype(torch.float32, *random_inputs(Case(130, 130)))
    clean = run(tensors, keywords, "chunked")[0]
    with torch.no_grad():
        tensors[0][0, 1, position] = torch.nan
    output = run(tensors, keywords, "chunked")[0]
    assert output[0, position].isnan().all()
    others = torch.ones(2, 130, dtype=torch.bool)
    others[0, position] = False
    assert torch.equal(output[others], clean[others])


def test_infinite_and_huge_scores_are_those_of_the_reference() -> None:
    tensors, keywords = in_dtype(torch.float32, *random_inputs(Case(70, 70, stages=())))
    with torch.no_grad():
        tensors[0][0, 0, 3] = 1e30
        tensors[0][0, 1, 5, 0] = torch.inf
    ours, reference = (run(tensors, keywords, name)[0] for name in ("chunked", "eager"))
    torch.testing.assert_close(ours, reference, equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "case",
    [
        Case(200, 200, tables=("bias", "gain")),
        Case(200, 200, terms=DYNAMIC),
        Case(130, 257, heads=(6, 2), mask="bias of keys", batch=3),
    ],
    ids=str,
)
def test_results_do_not_depend_on_the_number_of_threads(case: Case, dtype: torch.dtype, threads: None) -> None:
    tensors, keywords = in_dtype(dtype, *random_inputs(case))
    results = []
    for count in (1, 2, 5):
        torch.set_num_threads(count)
        results.append(run(tensors, keywords, "chunked"))
    for other in results[1:]:
        assert all(torch.equal(*pair) for pair in zip(results[0], other, strict=True))


def test_several_threads_of_python_may_call_it_at_once(threads: None) -> None:
    tensors, keywords = in_dtype(torch.float32, *random_inputs(Case(200, 200)))
    expected = run(tensors, keywords, "chunked")
    torch.set_num_threads(2)
    with ThreadPoolExecutor(4) as pool:
        results = list(pool.map(lambda _: run(tensors, keywords, "chunked"), range(8)))
    for result in results:
        assert all(torch.equal(*pair) for pair in zip(result, expected, strict=True))


def test_there_is_one_openmp_runtime_and_a_fork_works_after_its_threads_have() -> None:
    """Threads of a second one would wait on processors that the first one's need.

    They do not survive a fork, and a call that waited for them would never return. Libraries that other tests use bring
    an OpenMP of their own, so this test starts a new process.
    """
    code = """
import os, torch
from pathlib import Path
from dynattn import Composition, dcmha_attention
from dynattn.modeling.ops.dcmha.chunked import native_problem
torch.set_num_threads(2)
heads = torch.ones(1, 4, 200, 8)
attend = lambda: dcmha_attention(heads, heads, heads, pre=Composition(query_gate=torch.ones(1, 200, 4)))
expected = attend()
assert native_problem.load_stage.cache_info().misses == 1
print(len({line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines() if "gomp" in line}))
child = os.fork()
if child == 0:
    os._exit(0 if torch.equal(attend(), expected) else 1)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120)
    runtimes, status = ended.stdout.splitlines()
    assert status == "0"
    if hasattr(ctypes.CDLL(None), "GOMP_parallel"):  # this PyTorch runs on gcc's OpenMP
        assert runtimes == "1"


def test_one_warning_and_no_compiler_give_the_same_answer(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, libraries: None
) -> None:
    tensors, keywords = in_dtype(torch.float32, *random_inputs(Case(70, 70)))
    monkeypatch.setattr(native_library, "find_compiler", lambda: None)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with pytest.warns(UserWarning, match="no C compiler: install gcc or clang, or set CC to one") as caught:
        results = [run(tensors, keywords, "chunked") for _ in range(2)]
    assert len([warning for warning in caught if "C compiler" in str(warning.message)]) == 1
    for ours, reference in zip(results[1], run(tensors, keywords, "eager"), strict=True):
        torch.testing.assert_close(ours, reference, atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("threads", [2], indirect=True)
@pytest.mark.parametrize("compiler", ["clang", "gcc"])
def test_every_compiler_gives_the_same_with_the_threads_of_pytorch(
    compiler: str, threads: None, monkeypatch: pytest.MonkeyPatch, libraries: None
) -> None:
    path, used = shutil.which(compiler), c_compiler.find_compiler()
    if path is None:
        pytest.skip(f"there is no {compiler}")
    # Under the name that other tests use it has compiled these already.
    monkeypatch.setenv("CC", used[0] if used is not None and Path(path).samefile(used[0]) else compiler)
    for queries in (130, 1):
        assert_as_exact_as_the_reference(Case(queries, 130, heads=(16, 16)))
    assert passes_native.load_passes() is not None
    assert not native_library._failures


@pytest.mark.parametrize(
    ("mode", "dtype", "served"),
    [
        ("auto", torch.float32, True),
        ("1", torch.bfloat16, True),
        ("auto", torch.float16, True),
        ("0", torch.float32, False),
        ("auto", torch.float64, False),
    ],
)
def test_what_c_code_serves_depends_on_dtype_and_mode(
    mode: str, dtype: torch.dtype, served: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []
    monkeypatch.setenv("DYNATTN_COMPILE", mode)
    attend = passes.attend_in_c
    monkeypatch.setattr(passes, "attend_in_c", lambda *arguments: calls.append(1) or attend(*arguments))
    run(*in_dtype(dtype, *random_inputs(Case(10, 10))), "chunked")
    assert bool(calls) == served


def test_who_composes_elsewhere_depends_on_work_and_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    def chosen(mode: str, elements: int = 1) -> object:
        monkeypatch.setenv("DYNATTN_COMPILE", mode)
        monkeypatch.setattr(composer_choice, "_composed", 0)
        return composer_choice.choose_composer(elements)

    many = 20_000_000_000
    assert chosen("auto") is chosen("0") is chosen("0", many) is composer_choice.STEPWISE
    assert chosen("1") is chosen("auto", many) is composer_choice.COMPILED
