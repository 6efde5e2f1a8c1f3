"""A decoding step of the linear-memory op: as exact as the reference op in the same dtype, in C code and without."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from cases.composed_op import ALL, DYNAMIC, MASKS, random_composition
from cases.described import Described
from cases.largest_tensor import LargestTensor
from torch import Tensor
from torch._inductor.utils import run_and_get_code
from torch.nn import Parameter

from dynattn import dcmha_attention
from dynattn.modeling.ops import c_compiler, native_library
from dynattn.modeling.ops.dcmha.chunked import decode, decode_native

from .test_chunked import make

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
Inputs = tuple[list[Tensor], dict[str, Any]]
needs_compiler = pytest.mark.skipif(c_compiler.find_compiler() is None, reason="there is no C compiler")


@dataclass(frozen=True)
class Step(Described):
    """A decoding step of three items; `keys` of them are in a cache that has room for some more."""

    keys: int
    heads: tuple[int, int] = (4, 4)
    width: int = 8
    terms: frozenset[str] = ALL
    stages: tuple[str, ...] = ("pre", "post")
    rank: int = 2
    groups: int = 1
    window: int | None = None
    mask: str | None = None
    tables: tuple[str, ...] = ()  # of "position_bias" and "position_gain"
    compose_bias: bool = False
    offset: int | None = None


BOTH_TABLES = ("position_bias", "position_gain")
# C code is compiled anew for all heads, groups and widths in each dtype, which steps share unless they need others.
STEPS = [
    Step(1),
    Step(100),
    Step(63, heads=(32, 2), width=80, terms=DYNAMIC),
    Step(100, heads=(16, 16), groups=2, mask="padding"),
    Step(63, heads=(12, 4), groups=3, rank=1, mask="bias"),
    Step(100, heads=(6, 1), rank=4, window=9, mask="padding"),
    Step(63, terms=frozenset({"query_low_rank", "key_gate"}), stages=("post",)),
    Step(63, terms=frozenset({"key_low_rank", "query_gate"}), stages=("pre",), mask="pairs of heads"),
    Step(63, heads=(12, 4), terms=frozenset({"static"}), groups=3),
    Step(300, heads=(8, 4), stages=(), width=128),
    Step(131, heads=(32, 2), width=80, rank=3, mask="bias of keys"),
    Step(257, heads=(16, 16), width=5, mask="lowest"),
    Step(65, heads=(5, 5), width=33, window=65),
    Step(300, heads=(24, 2), width=200, window=150, groups=3),
    Step(2, heads=(7, 1), width=1, mask="unbatched"),
    Step(100, heads=(16, 16), groups=2, mask="padding", tables=("position_bias",)),
    Step(131, heads=(6, 1), window=90, tables=BOTH_TABLES, compose_bias=True),
    Step(300, heads=(8, 4), width=128, mask="bias of keys", tables=BOTH_TABLES, offset=170),
    Step(70, stages=(), tables=("position_gain",)),
    Step(1100, heads=(8, 4), width=128, terms=DYNAMIC, mask="pairs of heads"),
]


@pytest.fixture
def in_c(monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """The results that C code gives during the test."""
    results: list[Tensor] = []

    def recorded(*args: Any) -> Tensor | None:
        output = decode_native.decode_in_c(*args)
        results.extend([] if output is None else [output])
        return output

    monkeypatch.setattr(decode, "decode_in_c", recorded)
    return results


def step_inputs(step: Step, dtype: torch.dtype = torch.float32) -> Inputs:
    """Query, key and value, and the op's keywords; keys and their factors are slices of something longer."""
    heads, kv_heads = step.heads
    query = torch.randn(3, heads, 1, step.width).to(dtype)
    key, value = (torch.randn(3, kv_heads, step.keys + 5, step.width).to(dtype)[:, :, : step.keys] for _ in "kv")
    keywords: dict[str, Any] = {"sliding_window": step.window}
    for stage in step.stages:
        factors = random_composition(step.terms, 3, 1, step.keys + 5, heads, step.rank, groups=step.groups)
        changed = {}
        for name, factor in factors.tensors().items():
            factor = factor.detach().to(dtype)
            in_cache = factor.transpose(1, 2).contiguous().transpose(1, 2) if factor.ndim == 4 else factor
            changed[name] = in_cache[:, : step.keys] if name.startswith("key") else in_cache
        keywords[stage] = replace(factors, **changed)
    for name in step.tables:
        keywords[name] = torch.randn(step.keys + 3, heads).to(dtype)
    if step.tables:
        keywords |= {"compose_position_bias": step.compose_bias, "offset": step.offset}
    if step.mask is not None:
        mask = MASKS[step.mask](3, heads, 1, step.keys).detach()
        is_bool = mask.dtype == torch.bool
        keywords["attention_mask"] = mask if is_bool else mask.clamp(min=torch.finfo(dtype).min).to(dtype)
    return [query, key, value], keywords


def changed(inputs: Inputs, dtype: torch.dtype) -> Inputs:
    """The same inputs in a wider dtype."""
    tensors, keywords = inputs
    result = dict(keywords)
    for stage in keywords.keys() & {"pre", "post"}:
        result[stage] = keywords[stage].map(lambda factor: factor.to(dtype))
    for name in keywords.keys() & set(BOTH_TABLES):
        result[name] = keywords[name].to(dtype)
    mask = keywords.get("attention_mask")
    if mask is not None and mask.dtype != torch.bool:
        result["attention_mask"] = mask.to(dtype).masked_fill(mask == torch.finfo(mask.dtype).min, -torch.inf)
    return [tensor.to(dtype) for tensor in tensors], result


def attend(inputs: Inputs, implementation: str = "chunked") -> Tensor:
    tensors, keywords = inputs
    return dcmha_attention(*tensors, **keywords, implementation=implementation)


def assert_as_exact_as_the_reference(inputs: Inputs) -> None:
    expected = attend(changed(inputs, torch.float64), "eager")
    ours, reference = (attend(inputs, implementation) for implementation in ("chunked", "eager"))
    assert ours.dtype == reference.dtype and ours.shape == reference.shape
    error, noise = ((result - expected).abs().max() for result in (ours, reference))
    assert error <= 4 * noise + 1e-6 * expected.abs().max()


@pytest.mark.parametrize("mode", ["0", "auto"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("step", STEPS, ids=str)
def test_a_decoding_step_is_as_exact_as_the_reference_is(
    step: Step, dtype: torch.dtype, mode: str, monkeypatch: pytest.MonkeyPatch, in_c: list[Tensor]
) -> None:
    monkeypatch.setenv("DYNATTN_COMPILE", mode)
    assert_as_exact_as_the_reference(step_inputs(step, dtype))
    taken = mode == "auto" and c_compiler.find_compiler() is not None and (step.width > 1 or dtype == torch.float32)
    assert len(in_c) == taken


@needs_compiler
@pytest.mark.parametrize("threads", [3], indirect=True)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("step", STEPS[1:-1:3], ids=str)
@pytest.mark.usefixtures("threads")
def test_several_threads_are_as_exact(step: Step, dtype: torch.dtype, in_c: list[Tensor]) -> None:
    assert_as_exact_as_the_reference(step_inputs(step, dtype))
    assert len(in_c) == 1


@needs_compiler
@pytest.mark.usefixtures("threads")
def test_results_do_not_depend_on_the_number_of_threads(in_c: list[Tensor]) -> None:
    inputs = step_inputs(Step(1100, heads=(8, 4), mask="padding"))
    for count in (1, 2, 3):
        torch.set_num_threads(count)
        attend(inputs)
    assert torch.equal(in_c[0], in_c[1]) and torch.equal(in_c[0], in_c[2])


@needs_compiler
@pytest.mark.parametrize("capability", ["AVX2", "DEFAULT"])
@pytest.mark.parametrize(
    ("step", "dtypes"),
    [
        (Step(130, heads=(16, 16), width=80), (torch.float32, torch.float16)),
        (Step(77, heads=(12, 2), width=9, mask="padding"), (torch.float32, torch.bfloat16)),
    ],
    ids=str,
)
def test_lesser_processors_get_the_same(
    step: Step,
    dtypes: tuple[torch.dtype, ...],
    capability: str,
    monkeypatch: pytest.MonkeyPatch,
    in_c: list[Tensor],
    libraries: None,
) -> None:
    """Each step in the two lengths of elements; float16 and bfloat16 differ in how one element is read and rounded."""
    if capability == "AVX2" and "avx2" not in Path("/proc/cpuinfo").read_text():
        pytest.skip("this processor cannot run AVX2")
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    for dtype in dtypes:
        assert_as_exact_as_the_reference(step_inputs(step, dtype))
    assert len(in_c) == len(dtypes)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("hidden", [False, "lowest", -torch.inf])
def test_items_that_see_nothing_get_zeros(hidden: Any, dtype: torch.dtype) -> None:
    tensors, keywords = step_inputs(Step(300), dtype)
    mask = torch.ones(3, 1, 1, 300, dtype=torch.bool) if hidden is False else torch.zeros(3, 1, 1, 300, dtype=dtype)
    mask[1] = torch.finfo(dtype).min if hidden == "lowest" else hidden
    output = attend((tensors, {**keywords, "attention_mask": mask}))
    assert output[1].abs().max() == 0 and output[[0, 2]].abs().min() > 0


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_nan_stays_in_its_item(dtype: torch.dtype) -> None:
    tensors, keywords = step_inputs(Step(300), dtype)
    clean = attend((tensors, keywords))
    tensors[0][1, 2, 0, 3] = torch.nan
    output = attend((tensors, keywords))
    assert output[1].isnan().all()
    assert torch.equal(output[[0, 2]], clean[[0, 2]])


@pytest.mark.parametrize("dtype", DTYPES)
def test_hidden_keys_may_be_anything(dtype: torch.dtype) -> None:
    """Those of whole blocks and those beside others that are seen."""
    tensors, keywords = step_inputs(Step(300), dtype)
    mask = torch.ones(1, 1, 1, 300, dtype=torch.bool)
    mask[..., :70] = mask[..., 260:] = False
    clean = attend((tensors, {**keywords, "attention_mask": mask}))
    tensors[1].masked_fill_(~mask.view(300, 1), torch.nan)
    assert torch.equal(attend((tensors, {**keywords, "attention_mask": mask})), clean)


def test_infinite_and_huge_scores_are_those_of_the_reference() -> None:
    tensors, keywords = step_inputs(Step(70, stages=()))
    tensors[0][0] = 1e30
    tensors[1][1, 0, 30, 0] = torch.inf
    torch.testing.assert_close(
        attend((tensors, keywords)), attend((tensors, keywords), "eager"), equal_nan=True, atol=1e-5, rtol=1e-5
    )


@needs_compiler
@pytest.mark.parametrize("dtype", DTYPES)
def test_masks_of_other_dtypes_are_read_as_they_are(dtype: torch.dtype, in_c: list[Tensor]) -> None:
    tensors, keywords = step_inputs(Step(100, mask="lowest"), dtype)
    expected = attend((tensors, keywords))
    mask = keywords["attention_mask"]
    for other in {*DTYPES} - {dtype}:
        same = torch.zeros_like(mask, dtype=other).masked_fill(mask != 0, torch.finfo(other).min)
        assert torch.equal(attend((tensors, {**keywords, "attention_mask": same})), expected)
    assert len(in_c) == len(DTYPES)


@needs_compiler
@torch.no_grad()
def test_parameters_are_read_like_other_tensors(in_c: list[Tensor]) -> None:
    tensors, keywords = step_inputs(Step(100, tables=BOTH_TABLES))
    expected = attend((tensors, keywords))
    for name in ("pre", "post"):
        keywords[name] = replace(keywords[name], static=Parameter(keywords[name].static))
    for name in BOTH_TABLES:
        keywords[name] = Parameter(keywords[name])
    assert torch.equal(attend((tensors, keywords)), expected) and len(in_c) == 2


def with_gradients(inputs: Inputs) -> Inputs:
    inputs[0][1] = inputs[0][1].clone().requires_grad_()
    return inputs


def with_float32_factors(inputs: Inputs) -> Inputs:
    return inputs[0], changed(inputs, torch.float32)[1]


def with_strided_rows(inputs: Inputs) -> Inputs:
    inputs[0][2] = inputs[0][2].transpose(2, 3).contiguous().transpose(2, 3)
    return inputs


def with_other_groups(inputs: Inputs) -> Inputs:
    return inputs[0], {**inputs[1], "post": replace(inputs[1]["post"], groups=2)}


def with_negated_views(inputs: Inputs) -> Inputs:
    """The key and the factors of `pre` as PyTorch makes the imaginary part of a conjugate: their sign is not stored."""
    inputs[0][1] = torch._neg_view(-inputs[0][1])
    return inputs[0], {**inputs[1], "pre": inputs[1]["pre"].map(lambda factor: torch._neg_view(-factor))}


@needs_compiler
@pytest.mark.parametrize(
    "change", [with_gradients, with_float32_factors, with_strided_rows, with_other_groups, with_negated_views]
)
def test_what_c_code_cannot_do_is_done_without(change: Any, in_c: list[Tensor]) -> None:
    inputs = change(step_inputs(Step(100), torch.bfloat16))
    expected = attend(changed(inputs, torch.float64), "eager")
    output = attend(inputs)
    assert in_c == [] and output.requires_grad == (change is with_gradients)
    assert (output - expected).abs().max() < 0.03 * expected.abs().max()


@pytest.mark.parametrize("step", [STEPS[1], STEPS[6]], ids=str)
def test_float64_is_exact_and_no_work_for_c_code(step: Step, in_c: list[Tensor]) -> None:
    inputs = changed(step_inputs(step), torch.float64)
    torch.testing.assert_close(attend(inputs), attend(inputs, "eager"), atol=1e-12, rtol=1e-12)
    assert in_c == []


@pytest.mark.parametrize("dtype", DTYPES)
def test_one_warning_and_no_compiler_are_as_exact(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, in_c: list[Tensor], libraries: None
) -> None:
    monkeypatch.setattr(native_library, "find_compiler", lambda: None)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with pytest.warns(UserWarning, match="no C compiler: install gcc or clang, or set CC to one") as caught:
        for _ in range(2):
            assert_as_exact_as_the_reference(step_inputs(Step(100), dtype))
    assert len([warning for warning in caught if "C compiler" in str(warning.message)]) == 1
    assert in_c == []


@pytest.mark.parametrize("mode", ["0", "auto"])
def test_no_step_holds_a_matrix_of_heads_for_every_key(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DYNATTN_COMPILE", mode)
    tensors, keywords = step_inputs(Step(500, heads=(16, 16), width=5, terms=DYNAMIC))
    with torch.no_grad(), LargestTensor() as largest:
        attend((tensors, keywords))
    assert largest.elements <= tensors[1].numel() < 3 * 500 * 16 * 16


@pytest.mark.slow
@torch.no_grad()
def test_a_compiled_step_leaves_its_products_to_the_library_of_products() -> None:
    """As loops, with the producer of their input fused into them, they would compose once for every few columns."""
    inputs = step_inputs(Step(200, heads=(16, 16), terms=DYNAMIC))
    output, (code,) = run_and_get_code(torch.compile(lambda: attend(inputs)))
    assert code.count("extern_kernels.baddbmm(") == 2
    torch.testing.assert_close(output, attend(inputs, "eager"))


@needs_compiler
@pytest.mark.slow
@torch.no_grad()
@pytest.mark.parametrize("tables", [(), BOTH_TABLES], ids=["", "tables"])
def test_a_compiled_step_in_bfloat16_is_one_call_of_c_code(
    tables: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the cache grows, without being compiled again for every length."""
    by_compiler: list[tuple[Any, ...]] = []
    options: dict[str, Any] = {"mask": "padding", "tables": tables, "compose_bias": bool(tables)}
    steps = [Step(keys, heads=(8, 2), groups=2, window=90, **options) for keys in (100, 101, 120, 131)]
    given = [step_inputs(step, torch.bfloat16) for step in steps]
    expected = [attend(inputs) for inputs in given]

    def recorded(*args: Any) -> Tensor | None:
        by_compiler.append(args)
        return decode_native.decode_in_c(*args)

    monkeypatch.setattr(decode, "decode_in_c", recorded)
    torch.compiler.reset()
    torch._dynamo.utils.counters.clear()
    compiled = torch.compile(attend, fullgraph=True)
    for inputs, output in zip(given, expected, strict=True):
        assert torch.equal(compiled(inputs), output)
    assert len(by_compiler) == 4
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] <= 3


@needs_compiler
@pytest.mark.parametrize("cache", [None, "static"])
@pytest.mark.parametrize("family", ["dcformer", "dcpythia"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_models_generate_with_it(family: str, cache: str | None, dtype: torch.dtype, in_c: list[Tensor]) -> None:
    model = make(family).to(dtype)
    ids = torch.randint(1, 89, (2, 30))
    mask = torch.ones_like(ids)
    mask[1, :7] = 0
    keywords: dict[str, Any] = {"attention_mask": mask, "do_sample": False, "pad_token_id": 0}
    keywords |= {"cache_implementation": cache, "disable_compile": True, "max_new_tokens": 8}
    tokens = model.generate(ids, **keywords)
    assert len(in_c) == 2 * 7 and all(output.dtype == dtype for output in in_c)
    if dtype == torch.float32:
        model.set_attn_implementation("eager")
        assert torch.equal(model.generate(ids, **keywords), tokens)


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")
@pytest.mark.parametrize("step", [STEPS[1], STEPS[2]], ids=str)
def test_a_trace_of_a_step_computes_what_the_step_does(step: Step) -> None:
    """Calls of C code would leave no operation in the trace."""
    (query, key, value), keywords = step_inputs(step, torch.float32)

    def call(query: Tensor) -> Tensor:
        return dcmha_attention(query, key, value, **keywords, implementation="chunked")

    traced = torch.jit.trace(call, torch.zeros_like(query), check_trace=False)
    torch.testing.assert_close(traced(query), call(query), rtol=1e-4, atol=1e-5)
