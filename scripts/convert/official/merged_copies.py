"""Checks of the official checkpoints' redundant tensors before any is dropped."""

from collections.abc import Iterator

import torch
from torch import Tensor

from ..common.tensor_source import TensorSource
from .config import OfficialConfig
from .layout import DYNAMIC, MERGED_STATIC, STATIC


def composition_prefixes(config: OfficialConfig) -> list[str]:
    """What the names of the tensors of each layer's composition begin with."""
    return [DYNAMIC.replace("{layer}", str(layer)) for layer in range(config.n_layer)]


def stale_copies(source: TensorSource, config: OfficialConfig) -> Iterator[float]:
    """The largest difference of each layer whose merged composition (`dw_m`, `qkw_m`) differs from its parts.

    The official training path trains the merged copies only, and its inference merges again from the parts.
    """
    for prefix in composition_prefixes(config):
        differences = []
        if {prefix + "dw_m", prefix + "dw1", prefix + "dd"} <= source.headers.keys():
            parts = [source.read(prefix + part).flatten(1) for part in ("dw1", "dd")]
            differences.append(merged_difference(source.read(prefix + "dw_m"), torch.cat(parts, dim=-1)))
        if {prefix + "qkw_m", prefix + "qkw"} <= source.headers.keys():
            differences.append(merged_difference(source.read(prefix + "qkw_m"), source.read(prefix + "qkw")))
        if any(differences):
            yield max(differences)


def merged_difference(copy: Tensor, original: Tensor) -> float:
    """The largest difference between a merged copy `[...]` and what it was made from; infinite if not comparable."""
    if copy.numel() != original.numel() or not copy.is_floating_point():
        return float("inf")
    # Either tensor may have been saved in a narrower dtype, so both are compared in it.
    narrow = min(copy.dtype, original.dtype, key=lambda dtype: dtype.itemsize)
    if torch.equal(copy.flatten().to(narrow), original.flatten().to(narrow)):
        return 0.0
    return (copy.flatten().float() - original.flatten().float()).abs().max().item()


def static_matrices(source: TensorSource, config: OfficialConfig) -> tuple[list[str], list[str]]:
    """The names of the stored matrices that mix heads, and of those that are mere placeholders (identity or zero)."""
    mixing: list[str] = []
    placeholders: list[str] = []
    for key in (prefix + name for prefix in composition_prefixes(config) for name in STATIC):
        if key in source.headers:
            matrix = source.read(key).float()
            is_placeholder = not matrix.any() or torch.equal(matrix, torch.eye(config.n_head)[None])
            (placeholders if is_placeholder else mixing).append(key)
    return mixing, placeholders


def trained_statics(source: TensorSource, config: OfficialConfig) -> list[str]:
    """The names of merged static matrices (`sw`) that are neither the identity nor made from `pre_proj.w, post_proj.w`.

    Official code makes them with `use_sw`, and its training trains them alone.
    """
    trained: list[str] = []
    identity = torch.eye(config.n_head).expand(len(STATIC), -1, -1)
    for prefix in composition_prefixes(config):
        if (key := prefix + MERGED_STATIC) not in source.headers:
            continue
        originals = [identity]
        if source.headers.keys() >= {prefix + name for name in STATIC}:
            originals.append(identity + torch.cat([source.read(prefix + name).float() for name in STATIC]))
        copy = source.read(key)
        if all(merged_difference(copy, original) for original in originals):
            trained.append(key)
    return trained
