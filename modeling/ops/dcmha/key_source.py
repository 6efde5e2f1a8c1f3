"""The argument `key_source` of models and of their attention functions."""

from typing import Protocol

from torch import Tensor

from ..distance_tables import DistanceTables
from .attention import Attention
from .composition import Composition


class KeySource(Protocol):
    """Attends for a layer, also to keys that are not in the call, and knows which of all keys each token sees.

    `PagedAttention` has them from the cache of a serving engine, `SharedAttention` from other processes. A `Probe` has
    none, and notes what it is asked for.
    """

    def key_count(self, layer: int) -> int:
        """The most keys that a token of the call attends to in a layer, those of the call included."""

    def attend(
        self,
        layer: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        pre: Composition | None,
        post: Composition | None,
        scaling: float,
        sliding_window: int | None,
        attend: Attention,
        tables: DistanceTables,
    ) -> Tensor:
        """The output `[B, T, H, D]` of the `T` tokens of a call, in a causal layer.

        Args:
            layer: index of the layer.
            query: `[B, H, T, D]`.
            key, value: `[B, H_kv, T, D]`, of the same tokens.
            pre, post: the composition of both stages, with the factors of these tokens on both sides.
            scaling: what scores are multiplied by.
            sliding_window: how many keys a token sees, itself included; None for all.
            attend: the implementation of attention that was chosen for the model.
            tables: by distance, with a row for each of `key_count` keys.

        Raises:
            ValueError: the source cannot attend for such a call.
        """
