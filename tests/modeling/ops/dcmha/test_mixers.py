"""The builders of published attentions, in every implementation, against their authors' formulas in float64."""

from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
from cases import mixers as authors
from cases.triton_marks import interpreted
from torch import Tensor

from dynattn import Composition, dcmha_attention
from dynattn.modeling.ops.dcmha.mixers import (
    differential_heads,
    head_convolution,
    one_term_of_the_query,
    talking_heads,
)
from dynattn.scripts.benchmark.harness.accuracy import LARGEST_MULTIPLE

HEADS = 6


class Mixer(NamedTuple):
    formula: Callable[..., Tensor]
    stages: Callable[..., dict[str, Composition]]
    shapes: tuple[tuple[int, ...], ...]  # of the weights; () is a scalar, (HEADS,) one number for each query and head


MIXERS = {
    "talking_heads": Mixer(
        authors.talking_heads,
        lambda before, after: {"pre": talking_heads(before), "post": talking_heads(after)},
        ((HEADS, HEADS), (HEADS, HEADS)),
    ),
    "head_convolution_after": Mixer(
        lambda *qkv_and_kernels: authors.head_convolution(*qkv_and_kernels[:3], after=qkv_and_kernels[3]),
        lambda kernels: {"post": head_convolution(kernels)},
        ((3, 2, 2),),
    ),
    "head_convolution_before_and_after": Mixer(
        authors.head_convolution,
        lambda before, after: {"pre": head_convolution(before), "post": head_convolution(after)},
        ((2, 3, 3), (2, 3, 3)),
    ),
    "differential": Mixer(authors.differential, lambda weight: {"post": differential_heads(weight, HEADS)}, ((),)),
    "modded_nanogpt": Mixer(
        authors.modded_nanogpt, lambda down, up: {"post": one_term_of_the_query(down, up)}, ((HEADS,), (HEADS,))
    ),
}
LENGTHS = [(70, 70), (9, 30), (1, 63)]
INTERPRETED = [(9, 9), (1, 9)]
# Triton's interpreter takes seconds for each; these two have all terms between them.
FAST = ("head_convolution_before_and_after", "modded_nanogpt")
INTERPRETED_MIXERS = [name if name in FAST else pytest.param(name, marks=pytest.mark.slow) for name in MIXERS]


def random_tensors(mixer: Mixer, queries: int, keys: int) -> list[Tensor]:
    """Query, key and value, then the weights."""
    shapes = [(2, HEADS, length, 8) for length in (queries, keys, keys)]
    shapes += [(2, queries, HEADS) if shape == (HEADS,) else shape for shape in mixer.shapes]
    return [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]


def run(attend: Callable[..., Tensor], tensors: list[Tensor]) -> list[Tensor]:
    """The output, then all gradients."""
    output = attend(*tensors)
    upstream = torch.randn(output.shape, generator=torch.Generator().manual_seed(5)).to(output.dtype)
    return [output, *torch.autograd.grad(output, tensors, upstream)]


def attention_of(mixer: Mixer, implementation: str) -> Callable[..., Tensor]:
    def attend(query: Tensor, key: Tensor, value: Tensor, *weights: Tensor) -> Tensor:
        return dcmha_attention(query, key, value, **mixer.stages(*weights), implementation=implementation)

    return attend


@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
@pytest.mark.parametrize("implementation", ["eager", "chunked"])
@pytest.mark.parametrize("name", MIXERS)
def test_outputs_and_gradients_in_float64_are_the_authors(
    name: str, implementation: str, lengths: tuple[int, int]
) -> None:
    tensors = random_tensors(MIXERS[name], *lengths)
    expected = run(MIXERS[name].formula, tensors)
    for ours, theirs in zip(run(attention_of(MIXERS[name], implementation), tensors), expected, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-12 * float(theirs.detach().abs().max()), rtol=0)


@pytest.mark.parametrize("implementation", ["eager", "chunked"])
@pytest.mark.parametrize("name", MIXERS)
def test_outputs_in_float32_are_the_authors(name: str, implementation: str) -> None:
    """Decoding in C too, which takes no gradients."""
    assert_outputs_are_the_authors(name, implementation, LENGTHS)


@interpreted
@pytest.mark.filterwarnings("ignore:divide by zero encountered in log")
@pytest.mark.parametrize("name", INTERPRETED_MIXERS)
def test_outputs_and_gradients_of_triton_are_the_authors(name: str) -> None:
    pytest.importorskip("triton")
    assert_outputs_are_the_authors(name, "triton", INTERPRETED)
    tensors = random_tensors(MIXERS[name], 9, 9)
    expected = run(MIXERS[name].formula, tensors)
    single = [tensor.detach().float().requires_grad_() for tensor in tensors]
    plain = run(MIXERS[name].formula, single)
    for ours, noisy, theirs in zip(run(attention_of(MIXERS[name], "triton"), single), plain, expected, strict=True):
        noise = (noisy - theirs).abs().max() + torch.finfo(torch.float32).eps * theirs.abs().max()
        assert (ours - theirs).abs().max() <= LARGEST_MULTIPLE * noise


@torch.no_grad()
def assert_outputs_are_the_authors(name: str, implementation: str, lengths: list[tuple[int, int]]) -> None:
    """In float32, to 1e-6 of the largest."""
    for queries, keys in lengths:
        tensors = random_tensors(MIXERS[name], queries, keys)
        expected = MIXERS[name].formula(*tensors)
        output = attention_of(MIXERS[name], implementation)(*(tensor.float() for tensor in tensors))
        torch.testing.assert_close(output.double(), expected, atol=1e-6 * float(expected.abs().max()), rtol=0)
