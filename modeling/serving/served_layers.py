"""How serving engines run a model with composed heads: of a DCMHA family, or of Transformers, changed in place.

Processes that share sequences find out in the same way with what its layers attend.
"""

from dataclasses import dataclass, field, replace
from inspect import signature
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..ops.dcmha.attention import Attention
from ..ops.dcmha.composition import Composition, pack_side
from ..ops.dcmha.key_source import KeySource
from ..ops.distance_tables import DistanceTables
from .paged_attention import attending_to_pages
from .paged_rows import ALIGNMENT, RowLayout
from .requirements import ADVICE


class ServedLayers(NamedTuple):
    """What an engine has to know of a model's layers."""

    layout: RowLayout  # of the rows in which all of them keep what they need of a token
    windows: list[int | None]  # of each layer, the token itself included; None where it sees everything


class Call(NamedTuple):
    """With what a layer attends."""

    layer: int
    layout: RowLayout
    window: int | None


@dataclass
class Probe(KeySource):
    """The `key_source` of one forward pass, in which it notes with what every layer attends."""

    calls: list[Call] = field(default_factory=list)

    def key_count(self, layer: int) -> int:
        return 1

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
        """Takes what `KeySource` takes, for one token, and returns zeros."""
        sides = [pack_side(stage, "key") for stage in (pre, post) if stage is not None]
        terms = max((side.shape[2] for side in sides if side is not None), default=0)
        layout = RowLayout(query.shape[1], key.shape[1], key.shape[3], terms)
        padding = -layout.width % ALIGNMENT.get(attend, 1)
        self.calls.append(Call(layer, replace(layout, padding=padding), sliding_window))
        return torch.zeros_like(query.transpose(1, 2))


@torch.no_grad()
def served_layers(model: Any) -> ServedLayers:
    """Finds with what the layers of a causal model attend, by running it on one token; its weights do not matter.

    Raises:
        ValueError: a paged cache does not keep what the layers need, or heads are composed only in some of them.
    """
    name, windows = type(model).__name__, configured_windows(model)
    probe = Probe()
    zero = torch.zeros(1, 1, dtype=torch.long, device=model.device)
    run_on_pages(model, probe, input_ids=zero, position_ids=zero)
    found = {call.layer: call for call in probe.calls}
    if len(probe.calls) != len(windows) or found.keys() != set(range(len(windows))):
        raise ValueError(
            f"{name} attends with composed heads in layers {[call.layer for call in probe.calls]} of {len(windows)}, "
            f"and a paged cache needs each of them once; compose all layers (without names=[...]), or {ADVICE}"
        )
    if len({call.layout for call in probe.calls}) > 1:
        raise ValueError(f"the layers of {name} have heads of different sizes, and a paged cache has one; {ADVICE}")
    for layer, window in enumerate(windows):
        if found[layer].window != window:
            raise ValueError(
                f"layer {layer} of {name} attends with sliding_window={found[layer].window}, and a paged cache would "
                f"have {window}, as its configuration says; {ADVICE}"
            )
    return ServedLayers(found[0].layout, windows)


def configured_windows(model: Any) -> list[int | None]:
    """The window of each layer of a model, by its configuration.

    Raises:
        ValueError: layers keep something else of earlier tokens than rows, or hide keys in another way than by windows;
            or the model counts positions by itself.
    """
    name, config = type(model).__name__, model.config.get_text_config(decoder=True)
    window = getattr(config, "sliding_window", None)
    everywhere = "full_attention" if window is None else "sliding_attention"
    kinds = getattr(config, "layer_types", None) or [everywhere] * config.num_hidden_layers
    # Models that FlashAttention serves pass their windows to the function, and hide no other keys by masks.
    hides_by_windows = is_of_family(model) or model._supports_flash_attn
    if model.config.is_encoder_decoder or model._is_stateful or not hides_by_windows:
        raise ValueError(f"{name} has masks of its own, or needs more of earlier tokens than a paged cache; {ADVICE}")
    # Decoders such as Bart's count on from the length of a cache, and take other keywords without reading them.
    if not is_of_family(model) and "position_ids" not in signature(type(model).forward).parameters:
        raise ValueError(
            f"{name} takes no position_ids, so that tokens would get positions of other requests; use generate() with "
            "one prompt at a time"
        )
    # RoBERTa's kin, whose first position is behind the number of their padding token.
    if any(hasattr(module, "create_position_ids_from_input_ids") for module in model.modules()):
        raise ValueError(f"{name} counts positions from its padding token on, and engines count from 0; {ADVICE}")
    if others := sorted({*kinds} - {"full_attention", "sliding_attention"}):
        raise ValueError(f"{name} has layers of type {others}, which a paged cache does not serve; {ADVICE}")
    return [window if kind == "sliding_attention" else None for kind in kinds]


def is_of_family(model: Any) -> bool:
    """Whether a model is of a DCMHA family, all of which pass a `key_source` on to all layers.

    Not all models of Transformers do that.
    """
    return hasattr(model.config, "composes")


def run_on_pages(model: Any, paged: KeySource, *, position_ids: Tensor, **inputs: Any) -> Any:
    """Runs a model, or the one without a head that it holds, on a batch of requests, which is one row of `T` tokens.

    Args:
        paged: what attends to the tokens of the requests: a `PagedAttention`, or a `Probe`.
        position_ids: `[1, T]`.
        inputs: further arguments of the model, such as `input_ids`.
    """
    inputs |= {"position_ids": position_ids, "use_cache": False}
    inputs["attention_mask"] = no_mask(model, position_ids.shape[1], position_ids.device)
    if is_of_family(model):
        return model(key_source=paged, **inputs)
    with attending_to_pages(paged):
        return model(**inputs)


def no_mask(model: Any, tokens: int, device: torch.device) -> Any:
    """A mask for so many tokens that keeps a model from making one; with a `key_source` nothing reads it.

    It should be made on the model's device. All its elements are one in memory, and moving it would make them many.
    """
    if is_of_family(model):
        return dict.fromkeys(model.config.layer_types)
    return torch.ones((), dtype=torch.bool, device=device).expand(1, 1, tokens, tokens)
