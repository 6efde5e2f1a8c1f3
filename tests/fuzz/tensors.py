"""Random tensors in hostile layouts, random masks, and errors that are measured against noise."""

import ctypes
import mmap
from collections.abc import Callable, Mapping
from random import Random
from typing import Any

import torch
from torch import Tensor

from .harness import Case, expect

DTYPES = {name: getattr(torch, name) for name in ("float64", "float32", "bfloat16", "float16")}
# Errors may be this many times those of the reference implementation in the same dtype.
MULTIPLE = 6
# What soft masks add to the scores of keys that they mean to hide.
SOFT = -1e4
LAYOUTS = ("plain", "transposed", "sliced", "wide", "offset", "expanded", "before-guard", "after-guard")

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *(ctypes.c_int,) * 3, ctypes.c_long)
_libc.mprotect.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


def random_values(shape: tuple[int, ...], seed: int, scale: float = 1.0) -> Tensor:
    """Normal numbers in float64."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * scale


def laid_out(values: Tensor, layout: str) -> Tensor:
    """Returns the same numbers with other strides, or in memory whose neighbourhood kills who touches it."""
    return _LAYOUTS[layout](values)


def _plain(values: Tensor) -> Tensor:
    return values.contiguous().clone()


def _transposed(values: Tensor) -> Tensor:
    return _plain(values) if values.ndim < 2 else values.transpose(-1, -2).contiguous().transpose(-1, -2)


def _sliced(values: Tensor) -> Tensor:
    """Every other element of the second dimension; what lies between is NaN where the dtype has one."""
    if values.ndim < 2:
        return _wide(values)
    room = _poison(values, (values.shape[0], 2 * values.shape[1], *values.shape[2:]))
    return room[:, ::2].copy_(values)


def _wide(values: Tensor) -> Tensor:
    """Every third element of the last dimension."""
    return _poison(values, (*values.shape[:-1], 3 * values.shape[-1]))[..., 1::3].copy_(values)


def _offset(values: Tensor) -> Tensor:
    """The middle of a longer last dimension, which is not aligned."""
    return _poison(values, (*values.shape[:-1], values.shape[-1] + 3))[..., 1 : 1 + values.shape[-1]].copy_(values)


def _expanded(values: Tensor) -> Tensor:
    """All rows of the first dimension are the first one."""
    return values[:1].clone().expand_as(values) if values.shape[:1] != (0,) else _plain(values)


def _poison(values: Tensor, shape: tuple[int, ...]) -> Tensor:
    return values.new_full(shape, float("nan") if values.is_floating_point() else 1)


def _before_guard(values: Tensor) -> Tensor:
    """Contiguous; the byte after the last element cannot be read."""
    return _guarded(values, at_end=True)


def _after_guard(values: Tensor) -> Tensor:
    """Contiguous; the byte before the first element cannot be read."""
    return _guarded(values, at_end=False)


def _guarded(values: Tensor, *, at_end: bool) -> Tensor:
    """A copy between two pages that end a process that reads or writes them. The memory is never given back."""
    size, page = values.numel() * values.itemsize, mmap.PAGESIZE
    if not size:
        return _plain(values)
    pages = -(-size // page)
    start = _libc.mmap(None, (pages + 2) * page, mmap.PROT_READ | mmap.PROT_WRITE, 0x22, -1, 0)  # private, anonymous
    for guard in (start, start + (pages + 1) * page):
        expect(_libc.mprotect(guard, page, 0) == 0, "the test cannot protect memory")
    first = start + page + (pages * page - size if at_end else 0)
    buffer = (ctypes.c_char * size).from_address(first)
    return torch.frombuffer(buffer, dtype=values.dtype).view(values.shape).copy_(values)


_LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "plain": _plain,
    "transposed": _transposed,
    "sliced": _sliced,
    "wide": _wide,
    "offset": _offset,
    "expanded": _expanded,
    "before-guard": _before_guard,
    "after-guard": _after_guard,
}

MASK_KINDS = ("boolean", "additive", "hiding rows", "soft", "all hidden", "all visible")


def random_mask(random: Random, sizes: tuple[int, int, int, int]) -> dict[str, Any]:
    """A mask as JSON values: any of the shapes that broadcast to `sizes`."""
    shape = [size if random.random() < 0.6 else 1 for size in sizes]
    return {
        "kind": random.choice(MASK_KINDS),
        "shape": shape[random.choice((0, 0, 0, 1, 2, 3)) :],
        "seed": random.randrange(2**31),
        "layout": random.choice(LAYOUTS),
    }


def make_mask(mask: Mapping[str, Any] | None, dtype: torch.dtype) -> Tensor | None:
    """The mask of a case, boolean or additive in `dtype`; hidden keys have the lowest number or minus infinity."""
    if mask is None:
        return None
    shape = tuple(mask["shape"])
    numbers = random_values(shape, mask["seed"])
    visible = numbers > -0.3
    if mask["kind"] == "hiding rows":
        visible &= random_values((*shape[:-1], 1), mask["seed"] + 1) > 0
    if mask["kind"].startswith("all"):
        visible = torch.full(shape, mask["kind"] == "all visible")
    if mask["kind"] == "boolean" or (mask["kind"] != "soft" and mask["seed"] % 2):
        return laid_out(visible, mask["layout"])
    lowest = torch.finfo(dtype).min if mask["seed"] % 3 else float("-inf")
    hidden = SOFT if mask["kind"] == "soft" else lowest
    return laid_out(numbers.masked_fill(~visible, hidden).to(dtype), mask["layout"])


def mask_in_float64(mask: Tensor | None) -> Tensor | None:
    """The same mask for float64, whose lowest number is another one."""
    if mask is None or mask.dtype == torch.bool:
        return mask
    return mask.double().masked_fill(mask <= torch.finfo(mask.dtype).min, float("-inf"))


def rounding_of(name: str, case: Mapping[str, Any], truth: Mapping[str, Tensor]) -> float:
    """A few roundings of a result of a case: of the output, or of a gradient; both are sums of many terms.

    Soft masks make scores as large as they are, and a rounding of those is a relative error of the probabilities. The
    roundings of a gradient's terms, which are as many as pairs of tokens, add up like random steps. So do those of rows
    whose keys share an entry of the mask: the terms of a row are as large as products of values, and their sum is zero.
    """
    values = [truth[name]] if name == "output" else list(truth.values())
    largest = max((float(value.abs().max()) for value in values if value.numel()), default=0.0)
    is_soft = case["mask"] is not None and case["mask"]["kind"] == "soft"
    factor = 4 * (-SOFT if is_soft and case["dtype"] in ("float64", "float32") else 1.0)
    sizes, eps = case["sizes"], torch.finfo(DTYPES[case["dtype"]]).eps
    if name != "output":
        factor *= 1 + (sizes["batch"] * sizes["queries"] * sizes["keys"]) ** 0.5 / 50
    rows = 0
    if name == "gradient of mask" and case["mask"]["shape"][-1] == 1:
        rows = sizes["batch"] * sizes["heads"] * sizes["queries"]
    return eps * (factor * (largest + 1e-3) + 4 * rows**0.5)


def expect_within_noise(name: str, actual: Tensor, plain: Tensor, truth: Tensor, rounding: float) -> None:
    """Finds errors beyond a multiple of those of `plain`, the reference in the same dtype, or of a rounding."""
    expect(actual.shape == truth.shape, f"{name} has shape {tuple(actual.shape)}, not {tuple(truth.shape)}")
    expect(actual.dtype == plain.dtype, f"{name} is {actual.dtype}, not {plain.dtype}")
    if not truth.numel() or not bool(plain.isfinite().all()):
        return
    expect(actual.isfinite().all(), f"{name} is not finite, and that of the reference is")
    noise = max(float((plain.double() - truth).abs().max()), rounding)
    error = float((actual.double() - truth).abs().max())
    expect(error <= MULTIPLE * noise, f"{name} is wrong by {error:.1e}, where the reference is by {noise:.1e}")


def gradients(output: Tensor, leaves: Mapping[str, Tensor], case: Case) -> dict[str, Tensor]:
    """The gradients of an op's leaves for a random one of its output; those of leaves without influence are zero."""
    grads: tuple[Tensor | None, ...] = (None,) * len(leaves)
    if output.requires_grad and leaves:
        wanted = random_values(tuple(output.shape), case["seed"] + 99).to(DTYPES[case["dtype"]]).to(output.dtype)
        wanted = laid_out(wanted, case["grad_layout"])
        grads = torch.autograd.grad(output, list(leaves.values()), wanted, allow_unused=True)
    return {
        f"gradient of {name}": torch.zeros_like(leaf) if grad is None else grad
        for (name, leaf), grad in zip(leaves.items(), grads, strict=True)
    }
