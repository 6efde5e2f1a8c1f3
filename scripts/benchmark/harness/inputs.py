"""Inputs of the attention op, with composition that matters, and its truth in any precision."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

from dynattn.modeling.layers.rms_norm import rms_normalize
from dynattn.modeling.ops.dcmha.composition import Composition
from dynattn.modeling.ops.dcmha.eager import dcmha_eager

from .accuracy import Results

RANK = 2
COMPOSED, PLAIN, STATIC = "composed", "plain", "static"
TRUTH_CHUNK = 128


@dataclass(frozen=True)
class Inputs:
    """Arguments of the op: `query` `[B, H, T, D]`, `key` and `value` `[B, H, S, D]`, and a gradient of its output."""

    query: Tensor
    key: Tensor
    value: Tensor
    cotangent: Tensor  # [B, T, H, D]
    pre: Composition | None = None
    post: Composition | None = None
    window: int | None = None
    visible: Tensor | None = None  # [B, 1, 1, S], where keys are padding

    @property
    def scaling(self) -> float:
        return self.query.shape[-1] ** -0.5

    def leaves(self) -> dict[str, Tensor]:
        """Everything that the output depends on, by name."""
        named = {"query": self.query, "key": self.key, "value": self.value}
        for stage, composition in (("pre", self.pre), ("post", self.post)):
            if composition is not None:
                named |= {f"{stage}.{name}": factor for name, factor in factors_of(composition).items()}
        return named

    def map(self, change: Callable[[Tensor], Tensor]) -> "Inputs":
        """The same inputs with `change` applied to every leaf and to the gradient."""
        stages: dict[str, Any] = {"pre": change_factors(self.pre, change), "post": change_factors(self.post, change)}
        tensors: dict[str, Any] = {name: change(getattr(self, name)) for name in ("query", "key", "value", "cotangent")}
        return replace(self, **stages, **tensors)

    def rows(self, start: int, stop: int) -> "Inputs":
        """Queries `start` to `stop` with the keys that they see; the last query stands at the last key."""
        cached = self.key.shape[2] - self.query.shape[2]
        first = 0 if self.window is None else max(0, cached + start - self.window + 1)
        queries, keys = slice(start, stop), slice(first, cached + stop)
        return replace(
            self,
            query=self.query[:, :, queries],
            key=self.key[:, :, keys],
            value=self.value[:, :, keys],
            cotangent=self.cotangent[:, queries],
            pre=rows_of(self.pre, queries, keys),
            post=rows_of(self.post, queries, keys),
            visible=None if self.visible is None else self.visible[..., keys],
        )


def factors_of(composition: Composition) -> dict[str, Tensor]:
    """The terms that are present, by name."""
    present = {field.name: getattr(composition, field.name) for field in fields(composition)}
    return {name: factor for name, factor in present.items() if isinstance(factor, Tensor)}


def change_factors(composition: Composition | None, change: Callable[[Tensor], Tensor]) -> Composition | None:
    """The same composition with `change` applied to every term that is present."""
    if composition is None:
        return None
    changed: dict[str, Any] = {name: change(factor) for name, factor in factors_of(composition).items()}
    return replace(composition, **changed)


def rows_of(composition: Composition | None, queries: slice, keys: slice) -> Composition | None:
    """The factors of some queries and keys."""
    if composition is None:
        return None
    slices = {"query": queries, "key": keys}
    rows: dict[str, Any] = {
        name: factor[:, slices[name.partition("_")[0]]]
        for name, factor in factors_of(composition).items()
        if name != "static"
    }
    return replace(composition, **rows)


def make_inputs(
    heads: int,
    width: int,
    queries: int,
    keys: int,
    *,
    batch: int,
    dtype: torch.dtype,
    device: torch.device,
    seed: int,
    window: int | None = None,
) -> dict[str, Inputs]:
    """Random inputs for each function: the same queries, keys and values with different compositions.

    Composition changes scores by about their own size. All lies in memory as the models leave it: token after token
    where it comes from a projection, head after head in a cache (where there are more keys than queries), and factors
    as their generator writes them (heads contiguous, then tokens).
    """
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int, scale: float = 1.0) -> Tensor:
        return (torch.randn(*shape, generator=generator) * scale).to(device, dtype)

    def projected(length: int) -> Tensor:
        return normal(batch, length, heads, width).transpose(1, 2)

    def keys_or_values() -> Tensor:
        return projected(keys) if keys == queries else normal(batch, heads, keys, width)

    def dynamic() -> Composition:
        terms: dict[str, Any] = {}
        for side, length in (("query", queries), ("key", keys)):
            down = rms_normalize(normal(batch, RANK, length, heads), 1e-6)
            terms[f"{side}_down"] = down.transpose(1, 2)
            terms[f"{side}_up"] = normal(batch, RANK, length, heads, scale=0.5 * heads**-0.5).transpose(1, 2)
            terms[f"{side}_gate"] = torch.tanh(normal(batch, length, heads, scale=0.5))
        return Composition(**terms)

    plain = Inputs(
        query=projected(queries),
        key=keys_or_values(),
        value=keys_or_values(),
        cotangent=normal(batch, queries, heads, width),
        window=window,
    )
    static = [Composition(static=normal(heads, heads, scale=0.5 * heads**-0.5)) for _ in range(2)]
    return {
        PLAIN: plain,
        COMPOSED: replace(plain, pre=dynamic(), post=dynamic()),
        STATIC: replace(plain, pre=static[0], post=static[1]),
    }


def evaluate(attend: Callable[[Inputs], Tensor], inputs: Inputs, *, backward: bool) -> Results:
    """The output of `attend` and, after a backward pass, the gradient of every leaf (which must require one)."""
    if not backward:
        with torch.no_grad():
            return {"output": attend(inputs)}
    output = attend(inputs)
    leaves = inputs.leaves()
    gradients = torch.autograd.grad(output, list(leaves.values()), inputs.cotangent)
    return {"output": output.detach(), **{f"grad {name}": one for name, one in zip(leaves, gradients, strict=True)}}


def requiring_grad(inputs: Inputs) -> Inputs:
    """The same inputs as leaves of a graph."""
    return inputs.map(lambda tensor: tensor.detach().requires_grad_())


def attend_by_definition(inputs: Inputs, *, is_causal: bool = True) -> Tensor:
    """The reference op."""
    arguments: dict[str, Any] = {
        "attention_mask": inputs.visible,
        "is_causal": is_causal,
        "sliding_window": inputs.window,
    }
    output, _ = dcmha_eager(
        inputs.query, inputs.key, inputs.value, pre=inputs.pre, post=inputs.post, scaling=inputs.scaling, **arguments
    )
    return output


def truth_in(inputs: Inputs, dtype: torch.dtype, *, backward: bool, chunks: Sequence[slice] | None = None) -> Results:
    """The reference op's results in `dtype` from the same numbers, a few queries at a time to fit in memory.

    With `chunks`, only their queries: outputs in that order, and gradients of a loss that depends on nothing else.
    """
    exact = inputs.map(lambda tensor: tensor.detach().to(dtype).requires_grad_(backward))
    leaves = exact.leaves()
    sums = {name: torch.zeros_like(leaf) for name, leaf in leaves.items()} if backward else {}
    outputs = []
    length = exact.query.shape[2]
    if chunks is None:
        chunks = [slice(start, min(start + TRUTH_CHUNK, length)) for start in range(0, length, TRUTH_CHUNK)]
    for chunk in chunks:
        rows = exact.rows(chunk.start, chunk.stop)
        with torch.set_grad_enabled(backward):
            output = attend_by_definition(rows)
        outputs.append(output.detach())
        if backward:
            gradients = torch.autograd.grad(output, list(leaves.values()), rows.cotangent)
            for name, gradient in zip(leaves, gradients, strict=True):
                sums[name] += gradient
    return {"output": torch.cat(outputs, dim=1), **{f"grad {name}": total for name, total in sums.items()}}
