"""The arguments of the chunked op, as autograd and compilers see them, and those of a decoding step."""

from typing import NamedTuple

from torch import Tensor

from ...distance_tables import NO_TABLES, DistanceTables
from ..composition import Composition


class ChunkedInputs(NamedTuple):
    """The arguments that are tensors; `pack_factors` packs the factors."""

    query: Tensor  # [B, H, T, D]
    key: Tensor  # [B, H_kv, S, D]
    value: Tensor  # [B, H_kv, S, D]
    pre_query: Tensor | None  # [B, T, terms, H]
    pre_key: Tensor | None  # [B, S, terms, H]
    pre_static: Tensor | None  # [H, H], indexed [in, out]
    post_query: Tensor | None  # [B, T, terms, H]
    post_key: Tensor | None  # [B, S, terms, H]
    post_static: Tensor | None  # [H, H], indexed [in, out]
    mask: Tensor | None  # four dimensions that broadcast to [B, H, T, S]
    first_keys: Tensor | None  # [B, T], integers
    position_bias: Tensor | None = None  # [L, H]
    position_gain: Tensor | None = None  # [L, H]
    offset: Tensor | None = None  # [], an integer: position of the first query; None: the last query is at the last key


# Fields of `ChunkedInputs` that are tables by distance, and those that have gradients: all but integers.
TABLES = ("position_bias", "position_gain")
DIFFERENTIABLE = tuple(name for name in ChunkedInputs._fields if name not in ("first_keys", "offset"))


class ChunkedSettings(NamedTuple):
    """The arguments that are not tensors."""

    scaling: float
    is_causal: bool
    sliding_window: int | None
    pre_groups: int
    post_groups: int
    compose_bias: bool = False  # whether the bias is added before the first composition


class PackedStage(NamedTuple):
    """One stage of all items, with packed terms."""

    query: Tensor | None  # [B, T, terms, H]
    key: Tensor | None  # [B, S, terms, H]
    static: Tensor | None  # [H, H], indexed [in, out]
    groups: int


def stages_of(inputs: ChunkedInputs, settings: ChunkedSettings) -> tuple[PackedStage, PackedStage]:
    """Returns the stages `pre` and `post`."""
    pre = PackedStage(inputs.pre_query, inputs.pre_key, inputs.pre_static, settings.pre_groups)
    return pre, PackedStage(inputs.post_query, inputs.post_key, inputs.post_static, settings.post_groups)


class DecodeStep(NamedTuple):
    """The arguments for a single query, which sees all keys except those that `mask` hides."""

    query: Tensor  # [B, H, 1, D]
    key: Tensor  # [B, H_kv, S, D]
    value: Tensor  # [B, H_kv, S, D]
    pre: Composition | None
    post: Composition | None
    scaling: float
    mask: Tensor | None = None  # four dimensions that broadcast to [B, H, 1, S]
    tables: DistanceTables = NO_TABLES

    def with_last_keys(self, count: int) -> "DecodeStep":
        """The same step for the last `count` keys, as views; the query sees no others."""
        window = slice(-count, None)
        pre, post = (None if stage is None else stage.narrow(keys=window) for stage in (self.pre, self.post))
        mask = self.mask if self.mask is None or self.mask.shape[-1] == 1 else self.mask[..., window]
        return self._replace(key=self.key[:, :, window], value=self.value[:, :, window], pre=pre, post=post, mask=mask)

    @property
    def groups(self) -> int:
        """The head groups of the stages, which have the same number in the steps that C code takes."""
        return next((stage.groups for stage in (self.pre, self.post) if stage is not None), 1)
