"""Caches that keep a layer on the host, and bring it back to the device before its turn."""

from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache


def await_copies(cache: Cache | None, device: torch.device) -> None:
    """Makes `device` wait until an offloading cache has brought its next layer back, and later copies wait for it.

    `Cache.update` of Transformers waits before it reads the keys and values of a layer. Who reads anything of the layer
    before that, such as the contexts of convolutions or the phases of CARoPE, has to wait as well. Without a CUDA
    device nothing is copied in the background.
    """
    if device.type == "cuda" and cache is not None and getattr(cache, "offloading", False):
        computation = torch.cuda.default_stream(device)
        computation.wait_stream(cache.prefetch_stream)
        cache.prefetch_stream.wait_stream(computation)


def update_layer(cache: Cache, key: Tensor, value: Tensor, index: int, *others: Any) -> Any:
    """`cache.update` of a layer with keys and values `[B, H_kv, T, D]`, and what else its layer keeps.

    An update begins to bring the next layer back. Before version 5.20 Transformers did so while that layer was perhaps
    still on its way to the host, and then attended to what was in memory before.
    """
    await_copies(cache, key.device)
    return cache.update(key, value, index, *others)


def read_layer(cache: Cache, index: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """The keys and values `[B, H_kv, S, D]` of a layer on `device`, without an update.

    An offloading cache brings a layer back only when it updates it, which a cache of a source does once.
    """
    await_copies(cache, device)
    layer: Any = cache.layers[index]
    return layer.keys.to(device), layer.values.to(device)
