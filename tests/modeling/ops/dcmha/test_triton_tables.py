"""Tables by distance in the Triton kernels, in the interpreter: every gradient against the reference in float64."""

from typing import Any

import pytest
import torch
from cases.composed_op import DYNAMIC, Case, in_dtype, random_inputs, run
from cases.triton_marks import interpreted
from torch import Tensor
from transformers import DynamicCache

from dynattn import DCFormerConfig, DCFormerForCausalLM, dcmha_attention

pytest.importorskip("triton")
from dynattn.modeling.ops.dcmha.triton import tuning
from dynattn.modeling.ops.dcmha.triton.arguments import MapInputs, MapSettings
from dynattn.modeling.ops.dcmha.triton.attention import _forward_op
from dynattn.modeling.ops.dcmha.triton.composers.choice import composer_class_for
from dynattn.modeling.ops.dcmha.triton.composers.head_by_head import HeadByHeadComposer
from dynattn.modeling.ops.dcmha.triton.decode import _decode_op

from .test_triton import family, poisoned, small
from .test_triton_windows import assert_equal, record

__all__ = ["family", "poisoned", "small"]  # fixtures
# The log-sum-exp of a patch without a visible key.
pytestmark = [pytest.mark.filterwarnings("ignore:divide by zero encountered in log"), interpreted]

BOTH = ("bias", "gain")
CASES = [
    Case(9, 12, (2, 1), tables=BOTH, rank=1, batch=1),
    Case(9, 9, (2, 2), tables=BOTH, compose_bias=True, rank=1, batch=1),
]
WIDE = [
    Case(12, 19, (4, 2), tables=BOTH, mask="pairs"),
    Case(12, 12, (4, 4), groups=2, tables=BOTH, compose_bias=True, rank=1),
    Case(12, 12, (3, 1), tables=("bias",), terms=DYNAMIC),
    Case(12, 12, (2, 2), tables=("gain",), stages=("post",)),
    Case(12, 12, (2, 2), tables=BOTH, stages=("pre",), rank=1, compose_bias=True),
    Case(12, 12, (2, 2), tables=BOTH, stages=(), is_causal=False),  # later keys read row 0
    Case(33, 33, (2, 1), window=5, tables=BOTH, rank=1),
    Case(34, 60, (2, 1), window=5, tables=BOTH, rank=1, offset=10),
    Case(34, 60, (2, 2), window=5, tables=BOTH, rank=1, offset=35, batch=1),  # the last queries stand behind all keys
    Case(33, 40, (2, 2), window=6, rank=1, offset=-9, batch=1),
    Case(19, 11, (2, 2), tables=BOTH, rank=1),  # queries before the first key see nothing
    Case(9, 30, (2, 2), tables=BOTH, rank=1, offset=10, mask="padding"),
    Case(12, 19, (4, 2), groups=2, tables=BOTH, rank=1),
]
DECODING = [
    Case(1, 37, (4, 2), tables=BOTH),
    Case(1, 37, (4, 2), groups=2, tables=BOTH, compose_bias=True, offset=20, window=9, mask="padding"),
    Case(1, 40, (3, 1), tables=("bias",), window=7),
]


@pytest.fixture(autouse=True)
def several(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of windows, and tiles of sums, of which a few tokens have several."""
    monkeypatch.setattr(tuning, "BLOCK", 16)
    monkeypatch.setattr(tuning, "DISTANCE_SUMS", (16, 16, 16, 4))


@pytest.mark.usefixtures("small", "family")
@pytest.mark.parametrize("case", [*CASES, *(pytest.param(case, marks=pytest.mark.slow) for case in WIDE)], ids=str)
def test_outputs_and_gradients_of_all_inputs_and_tables_equal_the_reference(case: Case) -> None:
    tensors, keywords = random_inputs(case)
    assert_equal(run(*in_dtype(torch.float32, tensors, keywords), "triton"), run(tensors, keywords, "eager"))


@pytest.mark.slow
@pytest.mark.usefixtures("small", "family")
def test_packed_documents_count_distances_along_the_row() -> None:
    tensors, keywords = random_inputs(Case(20, 20, (4, 2), tables=BOTH, rank=1))
    keywords["first_keys"] = torch.tensor([[0] * 7 + [7] * 13, [0] * 15 + [15] * 5])
    assert_equal(run(*in_dtype(torch.float32, tensors, keywords), "triton"), run(tensors, keywords, "eager"))


@pytest.mark.slow
@pytest.mark.usefixtures("small", "family")
@pytest.mark.parametrize("compose_bias", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_tables_in_float32_beside_half_precision_are_as_exact_as_in_the_reference(
    dtype: torch.dtype, compose_bias: bool
) -> None:
    tensors, keywords = in_dtype(dtype, *random_inputs(Case(20, 20, (4, 2), tables=BOTH, compose_bias=compose_bias)))
    tables = [tensor.detach().float().requires_grad_() for tensor in tensors[-2:]]
    keywords |= dict(zip(("position_bias", "position_gain"), tables, strict=True))
    tensors = [*tensors[:-2], *tables]
    truth = run(*in_dtype(torch.float64, tensors, keywords), "eager")
    found, plain = (run(tensors, keywords, name) for name in ("triton", "eager"))
    for ours, noise, exact in zip(found, plain, truth, strict=True):
        assert ours.dtype == noise.dtype
        assert (ours - exact).norm() <= 1.5 * (noise - exact).norm() + 2**-9 * exact.norm()


@pytest.mark.usefixtures("small")
def test_tables_without_gradients_are_not_summed(monkeypatch: pytest.MonkeyPatch) -> None:
    tensors, keywords = in_dtype(torch.float32, *random_inputs(Case(9, 9, (1, 1), tables=BOTH, rank=1, batch=1)))
    keywords["position_bias"] = keywords["position_bias"].detach()
    names = record(monkeypatch, run=True)
    run([*tensors[:-2], tensors[-1]], keywords, "triton")
    assert names.count("dcmha_distance_sums") == names.count("dcmha_backward_post") == 2
    names.clear()
    keywords["position_gain"] = keywords["position_gain"].detach()
    run(tensors[:-2], keywords, "triton")
    assert "dcmha_backward_post" in names and "dcmha_distance_sums" not in names


@pytest.mark.parametrize("is_composed", [False, True])
def test_half_precision_does_not_round_a_composed_bias_to_that_of_scores(is_composed: bool) -> None:
    rows = torch.empty(1, 16, 9, 4, dtype=torch.bfloat16)
    inputs = MapInputs(*(rows,) * 3, *(None for _ in MapInputs._fields[3:]))
    bias = "composed_bias" if is_composed else "position_bias"
    inputs = inputs._replace(pre_key=torch.empty(1, 9, 3, 16), **{bias: torch.empty(9, 16)})
    assert (composer_class_for(inputs, MapSettings(1.0, True, None, 1)) is HeadByHeadComposer) == is_composed


@torch.no_grad()
@pytest.mark.parametrize("case", DECODING, ids=str)
def test_a_decoding_step_equals_the_reference(case: Case) -> None:
    tensors, keywords = random_inputs(case)
    expected = dcmha_attention(*tensors[:3], **keywords, implementation="eager")
    low, options = in_dtype(torch.float32, tensors, keywords)
    output = dcmha_attention(*low[:3], **options, implementation="triton")
    torch.testing.assert_close(output.double(), expected, atol=2e-6, rtol=1e-5)
    if case.offset is not None:
        options["offset"] = torch.tensor(case.offset)
        assert torch.equal(dcmha_attention(*low[:3], **options, implementation="triton"), output)


@torch.no_grad()
def test_half_precision_tells_far_distances_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuning, "DECODE_PROGRAMS", 1)
    query, key, value = torch.randn(1, 1, 1, 16), *torch.randn(2, 1, 1, 400, 16)
    bias = 0.5 * torch.arange(400.0)[:, None]  # the farthest keys weigh most
    exact = dcmha_attention(*(one.double() for one in (query, key, value)), position_bias=bias, implementation="eager")
    low = [one.bfloat16() for one in (query, key, value)]
    output, rounded = (
        dcmha_attention(*low, position_bias=table, implementation="triton") for table in (bias, bias.bfloat16())
    )
    assert (output - exact).abs().max() < 0.03 < (rounded - exact).abs().max()


@pytest.mark.usefixtures("small")
def test_the_operators_say_what_they_return() -> None:
    def rows(*shape: int) -> Tensor:
        return torch.randn(shape, requires_grad=True)

    query, terms, table = rows(1, 2, 9, 8), rows(1, 9, 3, 2), rows(12, 2)
    tables: tuple[Any, ...] = (None, table, table, None, None, torch.tensor(0))
    arguments = (query, query, query, terms, None, None, terms, None, None, *tables, 1.0, True, None, 1)
    torch.library.opcheck(_forward_op, arguments, test_utils=("test_schema", "test_faketensor"))
    step = [tensor.detach() for tensor in (query[:, :, :1], query, query, table, table)]
    stages = [[None] * 7, [None] * 7]
    step_arguments = (*step[:3], *stages, None, None, *step[3:], torch.tensor(3), 1.0, None, 1, 1, True)
    torch.library.opcheck(_decode_op, step_arguments, test_utils=("test_schema", "test_faketensor"))


@pytest.mark.slow
@pytest.mark.usefixtures("small")
def test_a_compiler_sees_one_node_and_skips_tables_without_gradients() -> None:
    tensors, keywords = in_dtype(torch.float32, *random_inputs(Case(9, 9, (2, 2), tables=BOTH, rank=1, batch=1)))
    keywords["position_bias"] = keywords["position_bias"].detach()
    tensors = [*tensors[:-2], tensors[-1]]
    compiled = torch.compile(dcmha_attention, fullgraph=True, backend="aot_eager")
    output = compiled(*tensors[:3], **keywords, implementation="triton")
    upstream = torch.randn(output.shape, generator=torch.Generator().manual_seed(5)).to(output.dtype)
    found = (output, *torch.autograd.grad(output, tensors, upstream))
    for ours, theirs in zip(found, run(tensors, keywords, "triton"), strict=True):
        torch.testing.assert_close(ours, theirs, atol=0, rtol=0)


@pytest.mark.slow
@torch.no_grad()
@pytest.mark.parametrize("scheme", ["alibi", "t5"])
def test_a_model_computes_the_same_with_its_tables_in_both_passes_of_generation(scheme: str) -> None:
    fields = {"position_scheme": scheme, "position_gain": "distance", "compose_position_bias": scheme == "t5"}
    sizes = {"vocab_size": 61, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    config = DCFormerConfig(**sizes, num_attention_heads=2, max_position_embeddings=40, sliding_window=8, **fields)
    models = {name: DCFormerForCausalLM(config).eval().requires_grad_(False) for name in ("eager", "triton")}
    models["triton"].load_state_dict(models["eager"].state_dict())
    ids, logits = torch.randint(61, (2, 20)), {}
    for name, model in models.items():
        model.set_attn_implementation(name)
        cache = DynamicCache(config=model.config)
        logits[name] = [model(part, past_key_values=cache).logits for part in ids.split([18, 1, 1], dim=1)]
    for found, expected in zip(logits["triton"], logits["eager"], strict=True):
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-4)
