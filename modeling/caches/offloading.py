"""Caches that keep a layer on the host, and bring it back to the device before its turn."""

import torch
from transformers.cache_utils import Cache


def await_prefetch(cache: Cache | None, device: torch.device) -> None:
    """Makes `device` wait until an offloading cache has brought its next layer back.

    `Cache.update` of Transformers waits before it reads the keys and values of a layer. Who reads anything of the layer
    before that, such as the contexts of convolutions or the phases of CARoPE, has to wait as well. Without a CUDA
    device nothing is copied in the background.
    """
    if device.type == "cuda" and cache is not None and getattr(cache, "offloading", False):
        torch.cuda.default_stream(device).wait_stream(cache.prefetch_stream)
