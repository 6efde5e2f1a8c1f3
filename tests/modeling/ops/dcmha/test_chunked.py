"""The linear-memory op against the reference op: outputs, every gradient, memory; and models that run on it."""

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from cases.composed_op import CASES, DYNAMIC, Case, in_dtype, random_inputs, run
from cases.largest_tensor import LargestTensor
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from transformers import DynamicCache, PreTrainedModel, StaticCache

from dynattn import (
    Composition,
    DCFormerConfig,
    DCFormerForCausalLM,
    DCPythiaConfig,
    DCPythiaForCausalLM,
    dcmha_attention,
)
from dynattn.modeling.ops.dcmha.chunked.arguments import ChunkedInputs, ChunkedSettings
from dynattn.modeling.ops.dcmha.chunked.composers import compiled
from dynattn.modeling.ops.dcmha.chunked.passes import attend, attend_backward


@pytest.mark.parametrize("case", CASES, ids=str)
def test_output_and_all_gradients_equal_the_reference_in_float64(case: Case) -> None:
    tensors, keywords = random_inputs(case)
    expected = run(tensors, keywords, "eager")
    for ours, theirs in zip(run(tensors, keywords, "chunked"), expected, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-12, rtol=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize(
    "case", [Case(257, 257, heads=(4, 2)), Case(193, 193, terms=DYNAMIC, groups=2, window=70)], ids=str
)
def test_compiled_chunks_equal_the_reference_in_float64(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DYNATTN_COMPILE", "1")
    tensors, keywords = random_inputs(case)
    expected = run(tensors, keywords, "eager")
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="composing without torch.compile")
        results = run(tensors, keywords, "chunked")
    for ours, theirs in zip(results, expected, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-12, rtol=1e-12)


def test_without_a_working_compiler_chunks_are_composed_step_by_step(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_compiler(*_: Any) -> None:
        raise RuntimeError("no C++ compiler")

    monkeypatch.setenv("DYNATTN_COMPILE", "1")
    monkeypatch.setattr(compiled, "_compiled", lambda _: no_compiler)
    monkeypatch.setattr(compiled, "_broken", False)
    tensors, keywords = random_inputs(Case(100, 100))
    with pytest.warns(
        UserWarning, match="composing without torch.compile, which failed: no C\\+\\+ compiler"
    ) as caught:
        results = run(tensors, keywords, "chunked")
    assert len(caught) == 1
    for ours, theirs in zip(results, run(tensors, keywords, "eager"), strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-12, rtol=1e-12)


def test_an_unknown_compile_mode_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DYNATTN_COMPILE", "yes")
    tensors, keywords = random_inputs(Case(5, 5))
    with pytest.raises(ValueError, match="DYNATTN_COMPILE='yes' is not known; use '0', '1' or 'auto'"):
        run(tensors, keywords, "chunked")


@pytest.mark.parametrize("mode", ["auto", "0"])
@pytest.mark.parametrize("case", [Case(100, 100, terms=DYNAMIC), Case(1, 100, terms=DYNAMIC)], ids=str)
def test_bfloat16_is_as_exact_as_the_reference_is(case: Case, mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DYNATTN_COMPILE", mode)
    tensors, keywords = random_inputs(case)
    expected = run(tensors, keywords, "eager")
    low = in_dtype(torch.bfloat16, tensors, keywords)
    for ours, theirs, true in zip(run(*low, "chunked"), run(*low, "eager"), expected, strict=True):
        assert ours.dtype == torch.bfloat16
        assert (ours - true).abs().max() <= 2 * (theirs - true).abs().max()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize(
    "case", [Case(7, 7, batch=0), Case(1, 7, batch=0), Case(0, 7), Case(1, 0), Case(7, 0), Case(0, 0)], ids=str
)
def test_nothing_to_attend_with_gives_what_the_reference_gives(case: Case, dtype: torch.dtype) -> None:
    inputs = in_dtype(dtype, *random_inputs(case))
    for ours, reference in zip(*(run(*inputs, name) for name in ("chunked", "eager")), strict=True):
        assert torch.equal(ours, reference)


def test_a_nan_stays_in_its_row() -> None:
    tensors, keywords = random_inputs(Case(100, 100))
    clean = dcmha_attention(*tensors[:3], **keywords, implementation="chunked")
    with torch.no_grad():
        tensors[0][0, 1, 70] = torch.nan
    output = dcmha_attention(*tensors[:3], **keywords, implementation="chunked")
    assert output[0, 70].isnan().all()
    others = torch.ones(2, 100, dtype=torch.bool)
    others[0, 70] = False
    assert torch.equal(output[others], clean[others])


@pytest.mark.parametrize("queries", [1, 70])
def test_rows_without_a_visible_key_give_zeros_and_finite_gradients(queries: int) -> None:
    tensors, keywords = random_inputs(Case(queries, queries))
    mask = torch.ones(2, 1, queries, queries, dtype=torch.bool)
    mask[0, :, 0] = False
    output, *gradients = run(tensors, {**keywords, "attention_mask": mask}, "chunked")
    assert output[0, 0].abs().max() == 0 and output[1, 0].abs().min() > 0
    assert all(gradient.isfinite().all() for gradient in gradients)


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointing_changes_nothing(reentrant: bool) -> None:
    tensors, keywords = random_inputs(Case(100, 100))

    def op(*qkv: Tensor) -> Tensor:
        return dcmha_attention(*qkv, **keywords, implementation="chunked")

    expected = run(tensors, keywords, "chunked")[1:]
    output = checkpoint(op, *tensors[:3], use_reentrant=reentrant)
    upstream = torch.randn(output.shape, generator=torch.Generator().manual_seed(5)).double()
    output.backward(upstream)
    for tensor, gradient in zip(tensors, expected, strict=True):
        torch.testing.assert_close(tensor.grad, gradient, atol=1e-12, rtol=1e-12)


@pytest.mark.parametrize("mode", ["auto", "0"])
def test_a_query_before_its_first_key_gives_zeros(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DYNATTN_COMPILE", mode)
    tensors, keywords = random_inputs(Case(70, 70))
    keywords["first_keys"] = torch.arange(70).repeat(2, 1)
    keywords["first_keys"][1, 5:20] += 1
    output, *gradients = run(tensors, keywords, "chunked")
    assert output[1, 5:20].eq(0).all() and output[1, 20:].ne(0).all()
    for ours, theirs in zip((output, *gradients), run(tensors, keywords, "eager"), strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-12, rtol=1e-12)


@pytest.mark.parametrize("mode", ["auto", "0"])
def test_autocast_rounds_the_inputs_of_a_decoding_step_and_nothing_else(
    mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DYNATTN_COMPILE", mode)
    tensors, keywords = in_dtype(torch.bfloat16, *random_inputs(Case(1, 100)))
    keywords |= {stage: keywords[stage].map(lambda factor: factor.float()) for stage in ("pre", "post")}
    expected = dcmha_attention(*tensors[:3], **keywords, implementation="chunked")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(dcmha_attention(*tensors[:3], **keywords, implementation="chunked"), expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("mode", ["auto", "0"])
def test_a_decoding_step_in_half_precision_errs_no_more_than_the_definition(
    mode: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DYNATTN_COMPILE", mode)
    tensors, keywords = in_dtype(dtype, *random_inputs(Case(1, 300, batch=8)))
    exact_inputs, exact_keywords = in_dtype(torch.float64, tensors, keywords)
    exact = dcmha_attention(*exact_inputs[:3], **exact_keywords, implementation="eager")
    errors = {
        name: (dcmha_attention(*tensors[:3], **keywords, implementation=name).double() - exact).norm()
        for name in ("eager", "chunked")
    }
    assert errors["chunked"] <= 0.7 * errors["eager"]  # whose maps are rounded after every step


@pytest.mark.parametrize("stages", [("pre", "post"), ("post",)])
def test_a_compiled_decoding_step_mixes_heads_inside_their_groups(stages: tuple[str, ...]) -> None:
    tensors, keywords = in_dtype(torch.bfloat16, *random_inputs(Case(1, 60, groups=2, stages=stages)))
    attend = partial(dcmha_attention, **keywords, implementation="chunked")
    with torch.no_grad():
        compiled = torch.compile(attend, backend="aot_eager", fullgraph=True)(*tensors[:3])
        torch.testing.assert_close(compiled, attend(*tensors[:3]))


@pytest.mark.parametrize("queries", [1, 5])
def test_autocast_takes_factors_in_the_other_dtype_of_half_precision(queries: int) -> None:
    tensors, keywords = in_dtype(torch.float16, *random_inputs(Case(queries, 5)))
    with torch.autocast("cpu", torch.bfloat16):
        output = dcmha_attention(*tensors[:3], **keywords, implementation="chunked")
        expected = dcmha_attention(*tensors[:3], **keywords, implementation="eager")
    assert output.dtype == torch.bfloat16
    torch.testing.assert_close(output, expected, atol=0.1, rtol=0.1)
    assert {gradient.dtype for gradient in torch.autograd.grad(output.sum(), tensors)} == {torch.float16}


def test_autocast_gives_its_dtype() -> None:
    tensors, keywords = in_dtype(torch.float32, *random_inputs(Case(70, 70, terms=DYNAMIC)))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        results = run(tensors, keywords, "chunked")
    assert results[0].dtype == torch.bfloat16
    expected = run(tensors, keywords, "eager")[0]
    assert (results[0] - expected).abs().max() < 0.03 * expected.abs().max()


@pytest.mark.parametrize("mode", ["auto", "0"])
@pytest.mark.parametrize("window", [None, 32])
@pytest.mark.parametrize("has_tables", [False, True])
def test_no_map_over_all_pairs_is_ever_in_memory(
    has_tables: bool, window: int | None, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DYNATTN_COMPILE", mode)
    heads = 8

    def largest_of(length: int) -> int:
        query, key, value = (torch.randn(1, heads, length, 8) for _ in range(3))
        terms = [torch.randn(1, length, 5, heads) for _ in range(4)]
        tables = (torch.randn(length, heads), torch.randn(length, heads)) if has_tables else (None, None)
        factors = (terms[0], terms[1], None, terms[2], terms[3], None)
        inputs = ChunkedInputs(query, key, value, *factors, None, None, *tables)
        settings = ChunkedSettings(1.0, True, window, 1, 1)
        with LargestTensor() as largest:
            output = attend(inputs, settings)
            attend_backward(output, inputs, settings)
        return largest.elements

    assert largest_of(1024) < 2.1 * largest_of(512) < heads * 1024**2


def make(family: str) -> PreTrainedModel:
    config_class, model_class = {
        "dcformer": (DCFormerConfig, DCFormerForCausalLM),
        "dcpythia": (DCPythiaConfig, DCPythiaForCausalLM),
    }[family]
    config = config_class(
        vocab_size=89,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=8,
        num_key_value_heads=4,
        sliding_window=16,
        layer_types=["sliding_attention", "full_attention"],
        initializer_range=0.12,
        compose_init_scale=30.0,
        eos_token_id=None,
        bos_token_id=None,
    )
    return model_class(config).eval()


def whole(model: PreTrainedModel, ids: Tensor) -> Tensor:
    return model(ids).logits


def left_padded(model: PreTrainedModel, ids: Tensor) -> Tensor:
    mask = torch.ones_like(ids)
    mask[1, :30] = 0
    return model(ids, attention_mask=mask).logits[mask.bool()]


def packed(model: PreTrainedModel, ids: Tensor) -> Tensor:
    positions = torch.cat([torch.arange(50), torch.arange(ids.shape[1] - 50)])[None].expand(ids.shape[0], -1)
    return model(ids, position_ids=positions, use_cache=False).logits


def cached(model: PreTrainedModel, ids: Tensor) -> Tensor:
    cache = DynamicCache(config=model.config)
    chunks = [ids[:, :70], ids[:, 70:80], *ids[:, 80:].split(1, dim=1)]
    return torch.cat([model(chunk, past_key_values=cache).logits for chunk in chunks], dim=1)


def padded_and_cached(model: PreTrainedModel, ids: Tensor) -> Tensor:
    cache, mask, logits = DynamicCache(config=model.config), torch.ones_like(ids), []
    mask[1, :30] = 0
    for start, stop in ((0, 70), (70, 80), (80, 81), (81, ids.shape[1])):
        output = model(ids[:, start:stop], attention_mask=mask[:, :stop], past_key_values=cache)
        logits.append(output.logits)
    return torch.cat(logits, dim=1)[mask.bool()]


def static(model: PreTrainedModel, ids: Tensor) -> Tensor:
    cache = StaticCache(config=model.config, max_cache_len=120)
    chunks = [ids[:, :70], *ids[:, 70:].split(1, dim=1)]
    return torch.cat([model(chunk, past_key_values=cache).logits for chunk in chunks], dim=1)


def generated(model: PreTrainedModel, ids: Tensor) -> Tensor:
    mask = torch.ones_like(ids)
    mask[1, :30] = 0
    tokens = model.generate(ids, attention_mask=mask, max_new_tokens=8, do_sample=False, pad_token_id=0)
    return tokens.double()


@pytest.mark.parametrize("way", [whole, left_padded, packed, cached, padded_and_cached, static, generated])
@pytest.mark.parametrize("family", ["dcformer", "dcpythia"])
@torch.no_grad()
def test_models_give_the_logits_of_the_reference(family: str, way: Callable[[PreTrainedModel, Tensor], Tensor]) -> None:
    model = make(family).double()
    ids = torch.randint(1, 89, (2, 101))
    model.set_attn_implementation("eager")
    expected = way(model, ids)
    model.set_attn_implementation("chunked")
    torch.testing.assert_close(way(model, ids), expected, atol=1e-9, rtol=0)


def test_the_model_takes_it_by_default_and_a_padding_mask_stays_small() -> None:
    model = make("dcformer")
    assert model.config._attn_implementation == "chunked"
    seen: list[Any] = []
    for layer in model.model.layers:
        layer.register_forward_pre_hook(lambda _, args, kwargs: seen.append(kwargs["attention_mask"]), with_kwargs=True)
    ids = torch.randint(1, 89, (2, 40))
    mask = torch.ones_like(ids)
    model(ids, attention_mask=mask)
    assert seen == [None, None]
    mask[1, :7] = 0
    model(ids, attention_mask=mask)
    assert [tuple(given.shape) for given in seen[2:]] == [(2, 40)] * 2


def documents(batch: int, length: int) -> tuple[Tensor, Tensor]:
    """Packed rows of random documents: the first key of each query, and the mask of pairs that says the same."""
    starts = torch.rand(batch, length) < 0.05
    first_keys = torch.where(starts, torch.arange(length), 0).cummax(1).values
    return first_keys, (torch.arange(length) >= first_keys[..., None])[:, None]


@pytest.mark.parametrize("implementation", ["eager", "chunked"])
@pytest.mark.parametrize("mask", [None, "pairs", "bias"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_first_keys_say_what_a_mask_of_all_pairs_says(
    implementation: str, mask: str | None, dtype: torch.dtype
) -> None:
    tensors, keywords = random_inputs(Case(257, 257, mask=mask, terms=DYNAMIC))
    first_keys, visible = documents(2, 257)
    given = keywords.get("attention_mask")
    both = visible if given is None else given & visible if mask == "pairs" else torch.where(visible, given, -torch.inf)
    expected = run(tensors, keywords | {"attention_mask": both}, "eager")
    exact = dtype == torch.float64
    if not exact:
        tensors, keywords = in_dtype(dtype, tensors, keywords)
    results = run(tensors, keywords | {"first_keys": first_keys}, implementation)
    for ours, theirs in zip(results, expected, strict=True):
        tolerance = 1e-11 if exact else 2e-4
        torch.testing.assert_close(ours.double(), theirs, atol=tolerance, rtol=tolerance)


def test_first_keys_save_the_work_of_other_documents() -> None:
    query, key, value = (torch.randn(1, 4, 1024, 8) for _ in range(3))
    terms = [torch.randn(1, 1024, 5, 4) for _ in range(4)]
    first_keys = (torch.arange(1024) // 64 * 64)[None]
    inputs = ChunkedInputs(query, key, value, terms[0], terms[1], None, terms[2], terms[3], None, None, first_keys)
    sizes = []
    for starts in (first_keys, None):
        with LargestTensor() as largest:
            attend(inputs._replace(first_keys=starts), ChunkedSettings(1.0, True, None, 1, 1))
        sizes.append(largest.elements)
    assert sizes[0] < 0.5 * sizes[1]  # chunks of up to 60 queries reach over two documents at most


@pytest.mark.parametrize(("dtype", "queries"), [(torch.bfloat16, 1), (torch.bfloat16, 5), (torch.float32, 5)])
def test_a_scaling_of_zero_makes_all_visible_keys_equal(
    dtype: torch.dtype, queries: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without C code too, where PyTorch's products leave results unset for a factor of zero."""
    monkeypatch.setenv("DYNATTN_COMPILE", "0")
    torch.manual_seed(0)
    query, key, value = (torch.randn(1, 4, length, 8, dtype=dtype) for length in (queries, 9, 9))
    gate = Composition(query_gate=torch.randn(1, queries, 4, dtype=dtype))
    value = value.transpose(2, 3).contiguous().transpose(2, 3)  # strides that C code does not decode with
    found, expected = (
        dcmha_attention(query, key, value, pre=gate, scaling=0.0, implementation=name) for name in ("chunked", "eager")
    )
    torch.testing.assert_close(found, expected, atol=0.02, rtol=0.02)
