"""Random inputs of the attention op, and the results of the reference op for them in any dtype."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Generator, Tensor

from dynattn.modeling.layers.rms_norm import rms_norm
from dynattn.modeling.ops.dcmha.composition import Composition
from dynattn.modeling.ops.dcmha.eager import dcmha_eager
from dynattn.modeling.ops.masking import visible_keys

from .accuracy import Results, with_gradients
from .settings import BenchmarkSettings
from .shapes import Shape

RANK = 2
# The functions: dynamic composition, none at all, and static talking heads.
COMPOSED, PLAIN, STATIC = "composed", "plain", "static"
# Parts of dynamic composition: one rank of the query after the softmax, the query's terms alone, and gates alone.
POST, QUERY, GATES = "post", "query", "gates"
# Queries that the reference op processes at a time, to bound its memory.
REFERENCE_CHUNK = 128


@dataclass(frozen=True)
class OpInputs:
    """Arguments of the op, and a gradient of its output (`cotangent`) for the backward pass."""

    query: Tensor  # [B, H, T, D]
    key: Tensor  # [B, H, S, D]
    value: Tensor  # [B, H, S, D]
    cotangent: Tensor  # [B, T, H, D]
    pre: Composition | None = None
    post: Composition | None = None
    window: int | None = None
    visible: Tensor | None = None  # broadcastable to [B, 1, T, S], False for padding; None if there is none
    is_causal: bool = True  # whether a query sees no key after its own

    @property
    def scaling(self) -> float:
        return self.query.shape[-1] ** -0.5

    @property
    def hides_later_keys(self) -> bool:
        """Whether there are keys that causality hides: a single query is the last token, and sees every key."""
        return self.is_causal and self.query.shape[2] > 1

    def arguments(self) -> dict[str, Any]:
        """The arguments of an implementation of the op, by name."""
        return {
            "query": self.query,
            "key": self.key,
            "value": self.value,
            "pre": self.pre,
            "post": self.post,
            "scaling": self.scaling,
            "attention_mask": self.visible,
            "is_causal": self.hides_later_keys,
            "sliding_window": self.window,
        }

    def mask_by_position(self) -> Tensor | None:
        """Which keys each query sees by causality and window, `[T, S]`; None if each sees all."""
        queries, keys, device = self.query.shape[2], self.key.shape[2], self.query.device
        return visible_keys(queries, keys, is_causal=self.is_causal, sliding_window=self.window, device=device)

    def leaves(self) -> dict[str, Tensor]:
        """All tensors that the output depends on, by name, `[B, H, T or S, D]` and the terms of the compositions."""
        named = {"query": self.query, "key": self.key, "value": self.value}
        for stage, composition in (("pre", self.pre), ("post", self.post)):
            if composition is not None:
                named |= {f"{stage}.{name}": factor for name, factor in composition.tensors().items()}
        return named

    def map(self, change: Callable[[Tensor], Tensor]) -> "OpInputs":
        """The same inputs with a `change` `[...]` to `[...]` applied to every leaf and to the cotangent."""
        tensors: dict[str, Any] = {name: change(getattr(self, name)) for name in ("query", "key", "value", "cotangent")}
        return replace(self, **tensors, **self._stages(lambda stage: stage.map(change)))

    def rows(self, start: int, stop: int) -> "OpInputs":
        """Queries `start` to `stop` with the keys that they see; queries are aligned to the end of the keys."""
        cached = self.key.shape[2] - self.query.shape[2]
        first = 0 if self.window is None else max(0, cached + start - self.window + 1)
        queries = slice(start, stop)
        part = self.with_keys(slice(first, cached + stop if self.is_causal else None))
        stages = part._stages(lambda stage: stage.narrow(queries))
        return replace(part, query=self.query[:, :, queries], cotangent=self.cotangent[:, queries], **stages)

    def with_keys(self, keys: slice) -> "OpInputs":
        """All queries with some keys."""
        return replace(
            self,
            key=self.key[:, :, keys],
            value=self.value[:, :, keys],
            visible=None if self.visible is None else self.visible[..., keys],
            **self._stages(lambda stage: stage.narrow(keys=keys)),
        )

    def _stages(self, change: Callable[[Composition], Composition]) -> dict[str, Any]:
        """Both compositions, by name, after a `change`; one that is absent stays so."""
        stages = {"pre": self.pre, "post": self.post}
        return {name: None if stage is None else change(stage) for name, stage in stages.items()}


@dataclass(frozen=True)
class RandomTensors:
    """Draws tensors in the memory layouts of the models, and of about the sizes that they have there."""

    shape: Shape  # of which heads and width count
    settings: BenchmarkSettings
    generator: Generator

    def normal(self, *shape: int, scale: float = 1.0) -> Tensor:
        """A random tensor `[*shape]`."""
        drawn = torch.randn(*shape, generator=self.generator) * scale
        return drawn.to(self.settings.device, self.settings.dtype)

    def projected(self, length: int) -> Tensor:
        """`[B, H, length, D]`, token-major, as a projection writes it."""
        return self.normal(self.settings.batch_size, length, self.shape.heads, self.shape.width).transpose(1, 2)

    def cached(self, length: int) -> Tensor:
        """`[B, H, length, D]`, head-major, as a cache keeps it."""
        return self.normal(self.settings.batch_size, self.shape.heads, length, self.shape.width)

    def static(self) -> Composition:
        """A static matrix alone."""
        heads = self.shape.heads
        return Composition(static=self.normal(heads, heads, scale=0.5 * heads**-0.5))

    def dynamic(self, queries: int, keys: int) -> Composition:
        """All dynamic terms, as their generator writes them: heads contiguous, then tokens."""
        batch, heads, terms = self.settings.batch_size, self.shape.heads, dict[str, Any]()
        for side, length in (("query", queries), ("key", keys)):
            down = rms_norm(self.normal(batch, RANK, length, heads), 1e-6)
            terms[f"{side}_down"] = down.transpose(1, 2)
            terms[f"{side}_up"] = self.normal(batch, RANK, length, heads, scale=0.5 * heads**-0.5).transpose(1, 2)
            terms[f"{side}_gate"] = torch.tanh(self.normal(batch, length, heads, scale=0.5))
        return Composition(**terms)


def inputs_of(
    shape: Shape,
    settings: BenchmarkSettings,
    *,
    queries: int | None = None,
    keys: int | None = None,
    window: int | None = None,
    is_causal: bool = True,
) -> dict[str, OpInputs]:
    """Random inputs for each function: the same queries, keys and values with different compositions.

    Composition changes scores by about their own size, so that an error in any term shows. More keys than queries come
    from a cache. There are as many of either as the shape has tokens, unless others are given.
    """
    queries, keys = queries or shape.length, keys or shape.length
    draw = RandomTensors(shape, settings, Generator().manual_seed(settings.seed))
    keys_or_values = draw.projected if keys == queries else draw.cached
    plain = OpInputs(
        query=draw.projected(queries),
        key=keys_or_values(keys),
        value=keys_or_values(keys),
        cotangent=draw.normal(settings.batch_size, queries, shape.heads, shape.width),
        window=window,
        is_causal=is_causal,
    )
    static = [draw.static() for _ in range(2)]
    pre, post = draw.dynamic(queries, keys), draw.dynamic(queries, keys)
    by_query, gates = ("query_down", "query_up", "query_gate"), ("query_gate", "key_gate")
    first_rank = terms_of(post, "query_down", "query_up").map(lambda term: term[:, :, :1])
    return {
        PLAIN: plain,
        COMPOSED: replace(plain, pre=pre, post=post),
        STATIC: replace(plain, pre=static[0], post=static[1]),
        POST: replace(plain, post=first_rank),
        QUERY: replace(plain, pre=terms_of(pre, *by_query), post=terms_of(post, *by_query)),
        GATES: replace(plain, pre=terms_of(pre, *gates), post=terms_of(post, *gates)),
    }


def terms_of(composition: Composition, *names: str) -> Composition:
    """The composition with nothing but the terms of these names."""
    named: dict[str, Any] = {name: getattr(composition, name) for name in names}
    return Composition(**named)


def evaluate(attend: Callable[[OpInputs], Tensor], inputs: OpInputs, *, backward: bool) -> Results:
    """The output `[B, T, H, D]` and, with `backward`, the gradient of every leaf, each of which must require one."""
    if not backward:
        with torch.no_grad():
            return {"output": attend(inputs)}
    return with_gradients(attend(inputs), inputs.leaves(), inputs.cotangent)


def requiring_grad(inputs: OpInputs) -> OpInputs:
    """The same inputs as leaves of the autograd graph."""
    return inputs.map(lambda tensor: tensor.detach().requires_grad_())


def attend_by_reference(inputs: OpInputs) -> Tensor:
    """The reference op, the eager implementation. Returns `[B, T, H, D]`."""
    output, _ = dcmha_eager(**inputs.arguments())
    return output


def reference_results(
    inputs: OpInputs, dtype: torch.dtype, *, backward: bool, chunks: Sequence[slice] | None = None
) -> Results:
    """The reference op's results on the same inputs in `dtype`, computed for a few queries at a time to fit in memory.

    With `chunks`, only the queries in these: their outputs in that order, and gradients of a loss that depends on
    nothing else. Gradients are summed over the queries in float32 at least: how they are divided is no part of the op.
    """
    converted = inputs.map(lambda tensor: tensor.detach().to(dtype).requires_grad_(backward))
    leaves = converted.leaves()
    wide = torch.promote_types(dtype, torch.float32)
    sums = {name: torch.zeros_like(leaf, dtype=wide) for name, leaf in leaves.items()} if backward else {}
    outputs = []
    length = converted.query.shape[2]
    if chunks is None:
        chunks = [slice(start, min(start + REFERENCE_CHUNK, length)) for start in range(0, length, REFERENCE_CHUNK)]
    for chunk in chunks:
        rows = converted.rows(chunk.start, chunk.stop)
        with torch.set_grad_enabled(backward):
            output = attend_by_reference(rows)
        outputs.append(output.detach())
        if backward:
            gradients = torch.autograd.grad(output, list(leaves.values()), rows.cotangent)
            for name, gradient in zip(leaves, gradients, strict=True):
                sums[name] += gradient
    return {"output": torch.cat(outputs, dim=1), **{f"grad {name}": total.to(dtype) for name, total in sums.items()}}
