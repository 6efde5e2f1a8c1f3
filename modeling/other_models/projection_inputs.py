"""What a module of Transformers projects queries and keys from, which composed heads generate their factors from.

A module passes its attention function the queries and keys, but not what they were projected from. So hooks on its
projections note that, in the order of a forward pass:

    forward(...)                            begins a `Call`
        q_proj(x), k_proj(x)                `note_query_input` and `note_key_input`
        attend_with_composed_heads(q, ..)   takes both, and generates factors from them
"""

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn


@dataclass
class Call:
    """A call of a module's `forward`: its layer of the cache, and the inputs of both projections once they have run."""

    cache_layer: Any = None
    query_input: Tensor | None = None  # [B, T, E]
    key_input: Tensor | None = None  # [B, S, key_size]; None where keys are read from a cache

    def take_inputs(self) -> tuple[Tensor | None, Tensor | None]:
        """Both inputs, which are gone then: whoever attends twice must project twice."""
        taken = self.query_input, self.key_input
        self.query_input = self.key_input = None
        return taken


class Running(threading.local):
    """The call that runs in a thread, which is not kept on the module, because several threads may call it at once."""

    def __init__(self) -> None:
        self.call: Call | None = None


RUNNING = Running()


def note_query_input(_: nn.Module, inputs: tuple[Tensor, ...]) -> None:
    """A hook before the projection of queries, whose input is `[B, T, E]`, or `[B, .., E]` of a picture's rows."""
    if RUNNING.call is not None:
        RUNNING.call.query_input = _as_rows(inputs[0])


def note_key_input(_: nn.Module, inputs: tuple[Tensor, ...]) -> None:
    """A hook before the projection of keys, whose input is `[B, S, key_size]`, or `[B, .., key_size]`."""
    if RUNNING.call is not None:
        RUNNING.call.key_input = _as_rows(inputs[0])


NOTES = (note_query_input, note_key_input)


def note_first(projection: nn.Module, note: Callable[..., None]) -> None:
    """Makes `note` the first hook of a projection, before those of others, which may change its input.

    Quantization that rotates the input has such a hook, which also makes itself the first. An adapter that took the
    place of a projection calls it with inputs that it has changed, as PEFT's OFT does, so a projection within another
    one notes nothing.
    """
    for hook in projection._forward_pre_hooks.values():
        if hook is note:
            return
        if hook not in NOTES:  # a joint projection has both notes, in any order
            break
    for module in projection.modules():
        hooks = module._forward_pre_hooks
        for key in [key for key, hook in hooks.items() if hook is note]:
            del hooks[key]
    projection.register_forward_pre_hook(note, prepend=True)


def _as_rows(states: Tensor) -> Tensor:
    """States `[B, .., E]` as `[B, T, E]`, the same object if they are so already."""
    return states.flatten(1, -2) if states.ndim > 3 else states


def joined_rows(states: Tensor, batch: int) -> Tensor:
    """States `[B * n, S, E]` as `[B, n * S, E]`, as Mllama joins the tiles of a picture; the same object if n is 1.

    `torch.export` would make a constant of what `len` returns, and so the graph would take one batch size only.
    """
    rows = states.shape[0]
    return states if rows == batch or rows % batch else states.reshape(batch, -1, states.shape[-1])
