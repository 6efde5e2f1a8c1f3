"""The forward and the backward pass of `dcmha_triton`: matrix products and, between them, the kernels."""

import torch
from torch import Tensor

from .dcmha_triton_arguments import Chunk, MapInputs, MapSettings, Statics
from .dcmha_triton_workspace import Workspace, multiply, padded


def attend(inputs: MapInputs, settings: MapSettings) -> tuple[Tensor, Tensor]:
    """Returns the output `[B, T, H, D]` and the log-sum-exp of each row of composed scores, `[B, H, T]` in float32."""
    work = Workspace(inputs, settings, ("scores", *_static_maps(inputs, backward=False)))
    batch, heads, queries, width = work.query.shape
    output = work.query.new_zeros(batch, queries, heads, width)
    lse = work.query.new_zeros(batch, heads, queries, dtype=torch.float32)
    for chunk in work.chunks():
        scores, probs = work.scores(chunk), work.map("scores", chunk)
        plain = None if inputs.post_static is None else work.map("plain", chunk)
        statics = Statics(_mixed_scores(work, chunk, inputs.pre_static, scores), plain=plain)
        partial_lse = work.partial_of_queries("dcmha_statistics", chunk)
        work.launch("dcmha_statistics", chunk, statics, scores, partial_lse)
        rows = lse[chunk.items, :, chunk.queries]
        work.merge(chunk, partial_lse, rows)
        work.launch("dcmha_probs", chunk, statics, scores, probs, rows)
        if inputs.post_static is not None and plain is not None:
            work.mix(inputs.post_static.t(), plain, probs, out=probs)
        mixed = torch.bmm(work.grouped(probs), work.of_keys(work.value, chunk)).view(*scores.shape[:3], width)
        output[chunk.items, chunk.queries] = mixed.transpose(1, 2)
    real = inputs.query.shape[2]
    return output[:, :real].contiguous(), lse[..., :real].contiguous()


def attend_backward(grad_output: Tensor, lse: Tensor, inputs: MapInputs, settings: MapSettings) -> dict[str, Tensor]:
    """Returns the gradients of all `inputs` that are there, but of what hides keys, by name; sums are float32."""
    maps = ("scores", "grad_composed", "result", *_static_maps(inputs, backward=True))
    work = Workspace(inputs, settings, maps)
    grad_output, lse = (padded(rows, 2, work.queries) for rows in (grad_output.transpose(1, 2), lse))
    delta = torch.zeros_like(lse)
    sums = _Sums(work, inputs)
    for chunk in work.chunks():
        scores, grad_composed = work.scores(chunk), work.map("grad_composed", chunk)
        grad_chunk, value = work.of_queries(grad_output, chunk), work.of_keys(work.value, chunk)
        multiply(grad_chunk, value.transpose(1, 2), out=work.grouped(grad_composed))
        statics = Statics(
            _mixed_scores(work, chunk, inputs.pre_static, scores),
            _mixed_grads(work, chunk, inputs.post_static, grad_composed),
        )
        rows, delta_rows = (tensor[chunk.items, :, chunk.queries] for tensor in (lse, delta))
        probs = _backward_post(work, sums, chunk, inputs.post_static, statics, scores, grad_composed, delta_rows, rows)
        sums.add(sums.value, chunk, probs, grad_chunk)
        grad_probs = _grad_probs(statics, grad_composed)
        grads = _backward_pre(work, sums, chunk, inputs.pre_static, statics, scores, grad_probs, delta_rows, rows)
        sums.add(sums.key, chunk, grads, work.of_queries(work.query, chunk), work.scaling)
        sums.set_query(chunk, grads)
    return sums.results(inputs)


def _backward_post(
    work: Workspace,
    sums: "_Sums",
    chunk: Chunk,
    static: Tensor | None,
    statics: Statics,
    scores: Tensor,
    grad_composed: Tensor,
    delta: Tensor,
    lse: Tensor,
) -> Tensor:
    """The first sweep: sets `delta` and `_grad_probs`, adds gradients of factors, returns composed probabilities."""
    probs, plain = work.map("result", chunk), None if static is None else work.map("plain", chunk)
    partial_delta = work.partial_of_queries("dcmha_backward_post", chunk)
    partial = sums.partial("dcmha_backward_post", chunk, "post")
    written = probs.view(scores.dtype), probs, _grad_probs(statics, grad_composed), partial_delta
    tensors = (scores, grad_composed, *written, *partial, lse)
    work.launch("dcmha_backward_post", chunk, statics._replace(plain=plain), *tensors)
    torch.sum(partial_delta, dim=1, out=delta)
    sums.add_factors(chunk, "post", partial)
    if static is not None and plain is not None:
        work.mix(static.t(), plain, probs, out=probs)
        sums.add_static("post", plain, grad_composed)
    return work.grouped(probs)


def _backward_pre(
    work: Workspace,
    sums: "_Sums",
    chunk: Chunk,
    static: Tensor | None,
    statics: Statics,
    scores: Tensor,
    grad_probs: Tensor,
    delta: Tensor,
    lse: Tensor,
) -> Tensor:
    """The second sweep; adds gradients of factors, returns the gradients of the scores."""
    grads, plain = work.map("result", chunk), None if static is None else work.map("plain", chunk)
    partial = sums.partial("dcmha_backward_pre", chunk, "pre")
    tensors = (scores, grad_probs, grads, delta, *partial, lse)
    work.launch("dcmha_backward_pre", chunk, statics._replace(plain=plain), *tensors)
    sums.add_factors(chunk, "pre", partial)
    if static is not None and plain is not None:
        work.mix(static, plain, grads, out=grads)
        sums.add_static("pre", scores, plain)
    return work.grouped(grads)


def _grad_probs(statics: Statics, grad_composed: Tensor) -> Tensor:
    """Where the first sweep leaves the gradients of the probabilities: over what it alone needs."""
    return grad_composed if statics.grads is None else statics.grads


def _static_maps(inputs: MapInputs, *, backward: bool) -> list[str]:
    """Names of the buffers that products with static matrices need."""
    pre, post = inputs.pre_static is not None, inputs.post_static is not None
    needed = {"mixed_scores": pre, "mixed_grads": post and backward, "plain": post or (pre and backward)}
    return [name for name in needed if needed[name]]


def _mixed_scores(work: Workspace, chunk: Chunk, static: Tensor | None, scores: Tensor) -> Tensor | None:
    if static is None:
        return None
    return work.mix(static.t(), scores, scores, out=work.map("mixed_scores", chunk, scores.dtype))


def _mixed_grads(work: Workspace, chunk: Chunk, static: Tensor | None, grads: Tensor) -> Tensor | None:
    if static is None:
        return None
    return work.mix(static, grads, grads, out=work.map("mixed_grads", chunk))


class _Sums:
    """The gradients of all inputs while they add up: what several chunks add to in float32."""

    def __init__(self, work: Workspace, inputs: MapInputs) -> None:
        self.work = work
        self.query = torch.zeros_like(work.query)
        self.key, self.value = (torch.zeros_like(rows, dtype=torch.float32) for rows in (work.key, work.value))
        self.factors = {
            name: rows.new_zeros(*rows.shape[:2], rows.shape[3], rows.shape[2] * rows.shape[4])  # [B, H, rows, length]
            for name, rows in work.factors._asdict().items()
            if rows is not None
        }
        statics = {"pre_static": inputs.pre_static, "post_static": inputs.post_static}
        self.statics = {
            name: torch.zeros_like(static, dtype=torch.float32)
            for name, static in statics.items()
            if static is not None
        }

    def partial(self, kernel: str, chunk: Chunk, stage: str) -> list[Tensor | None]:
        """Room for what each patch adds to the gradients of a stage's rows of queries and of keys.

        It is `[items, patches along the queries, patches along the keys, H, rows, queries or keys of a patch]`.
        """
        patches = self.work.grid(kernel, chunk)[::-1]
        partial: list[Tensor | None] = []
        for side, block in zip(("query", "key"), self.work.tiles[kernel], strict=False):
            sums = self.factors.get(f"{stage}_{side}")
            partial.append(None if sums is None else sums.new_empty(*patches, *sums.shape[1:3], block))
        return partial

    def add_factors(self, chunk: Chunk, stage: str, partial: list[Tensor | None]) -> None:
        """Adds the sums of `partial`, or sets them for queries: no other chunk has these."""
        of_queries, of_keys = partial
        if of_queries is not None:
            sums = self.factors[f"{stage}_query"][chunk.items, :, :, chunk.queries]
            torch.sum(of_queries, dim=2, out=_in_blocks(sums, of_queries.shape[-1]))
        if of_keys is not None:
            sums = self.factors[f"{stage}_key"][chunk.items, :, :, chunk.keys]
            _in_blocks(sums, of_keys.shape[-1]).add_(of_keys.sum(1))

    def add_static(self, stage: str, maps: Tensor, grads: Tensor) -> None:
        """Adds the products of maps before and gradients after a static matrix, summed over all pairs.

        Sums over so many keys are cut into many small ones: by row of the batch where there are many, else by query.
        """
        maps, grads = self.work.all_heads(maps).to(grads.dtype), self.work.all_heads(grads)
        if 4 * maps.shape[0] >= maps.shape[2]:
            pairs = [(maps.flatten(2), grads.flatten(2))]
        else:
            pairs = list(zip(maps.transpose(1, 2), grads.transpose(1, 2), strict=True))
        for left, right in pairs:
            self.statics[f"{stage}_static"] += _product(left, right.transpose(1, 2)).sum(0)

    def add(self, total: Tensor, chunk: Chunk, maps: Tensor, rows: Tensor, scaling: float = 1.0) -> None:
        """Adds `maps^T @ rows * scaling` to the gradients of the chunk's keys."""
        total, maps = self.work.of_keys(total, chunk), maps.transpose(1, 2)
        if maps.is_cuda and maps.dtype != total.dtype:
            torch.baddbmm(total, maps, rows, alpha=scaling, out_dtype=total.dtype, out=total)
        else:
            total.baddbmm_(maps.to(total.dtype), rows.to(total.dtype), alpha=scaling)

    def set_query(self, chunk: Chunk, maps: Tensor) -> None:
        """Sets `maps @ key * scaling`: no other chunk has these queries."""
        grad = self.query[chunk.items, :, chunk.queries]
        rows = grad.new_empty(maps.shape[0], maps.shape[1], grad.shape[-1])
        multiply(maps, self.work.of_keys(self.work.key, chunk), out=rows, scaling=self.work.scaling)
        grad.copy_(rows.view(grad.shape))

    def results(self, inputs: MapInputs) -> dict[str, Tensor]:
        queries, keys = inputs.query.shape[2], inputs.key.shape[2]
        sums = {"query": self.query[:, :, :queries]}
        sums |= {"key": self.key[:, :keys].view_as(inputs.key)}
        sums |= {"value": self.value[:, :keys].view_as(inputs.value)}
        for name, total in self.factors.items():
            sums[name] = total.permute(0, 3, 2, 1)[:, : getattr(inputs, name).shape[1]]
        return sums | self.statics


def _in_blocks(sums: Tensor, block: int) -> Tensor:
    """`[items, H, rows, length]` to `[items, length / block, H, rows, block]`, a view."""
    return sums.unflatten(3, (-1, block)).movedim(3, 1)


def _product(left: Tensor, right: Tensor) -> Tensor:
    """`left @ right`, in float32."""
    if left.is_cuda and left.dtype != torch.float32:
        return torch.bmm(left, right, out_dtype=torch.float32)
    return torch.bmm(left.float(), right.float())
