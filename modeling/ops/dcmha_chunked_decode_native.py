"""Composition of a decoding step's maps on a CPU: in place, in C code that reads each factor once, as the cache has it.

A few keys at a time are turned so that their heads are contiguous, as they are in the factors, and back.
"""

import functools
from collections.abc import Callable
from ctypes import c_long, c_void_p
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .native_library import lanes, load_library

if TYPE_CHECKING:
    from .dcmha import Composition

# One thread does it all: more maps than this are worth several.
MOST_ELEMENTS = 1 << 18
FACTORS = ("query_down", "query_up", "query_gate", "key_down", "key_up", "key_gate", "static")
# Compiled with `-D`: `LANES` numbers a register, `HEADS`, `GROUPS`, `QUERY_RANK`, `KEY_RANK`.
SOURCE = r"""
#include <string.h>

#define KEYS 16
#define GROUP (HEADS / GROUPS)
#define INLINE static inline __attribute__((always_inline))
#define HEAD_VECTORS(h) for (int h = 0; h < HEADS; h += LANES)
#define AT(rows, h) (*(const vec *)((rows) + (h)))

typedef float vec __attribute__((vector_size(4 * LANES), aligned(4)));

INLINE float total(vec sums) {
    float parts[LANES];
    memcpy(parts, &sums, sizeof(sums));
    for (int half = LANES / 2; half; half /= 2)
        for (int i = 0; i < half; i++) parts[i] += parts[i + half];
    return parts[0];
}

/* Adds a key's maps `[HEADS]`, weighted by `down` and summed inside each group, times `up`. */
INLINE void add_hidden(vec *sum, const float *maps, const float *down, const float *up) {
    for (int first = 0; first < HEADS; first += GROUP) {
        vec hidden = {0};
        for (int h = first; h < first + GROUP; h += LANES) hidden += AT(maps, h) * AT(down, h);
        float of_group = total(hidden);
        for (int h = first; h < first + GROUP; h += LANES) sum[h / LANES] += of_group * AT(up, h);
    }
}

/* Rows of one factor, and how many numbers lie between items, keys and ranks. */
typedef struct {
    const float *at;
    long item, key, rank;
} factor;

#define ROW(factor, s, r) ((factor).at + item * (factor).item + (s) * (factor).key + (r) * (factor).rank)

/* Composes maps [items, HEADS, length]. */
void compose(float *maps, long items, long length, const factor *factors, const float *mixing) {
    factor query_down = factors[0], query_up = factors[1], query_gate = factors[2];
    factor key_down = factors[3], key_up = factors[4], key_gate = factors[5];
    float tile[KEYS][HEADS];
    for (long item = 0; item < items; item++, maps += HEADS * length)
        for (long start = 0; start < length; start += KEYS) {
            int count = length - start < KEYS ? length - start : KEYS;
            for (int h = 0; h < HEADS; h++)
                for (int k = 0; k < count; k++) tile[k][h] = maps[h * length + start + k];
            for (int k = 0; k < count; k++) {
                vec sum[HEADS / LANES];
                const float *here = tile[k];
                long s = start + k;
                HEAD_VECTORS(h) {
                    sum[h / LANES] = AT(here, h);
                    if (query_gate.at) sum[h / LANES] += AT(here, h) * AT(ROW(query_gate, 0, 0), h);
                    if (key_gate.at) sum[h / LANES] += AT(here, h) * AT(ROW(key_gate, s, 0), h);
                }
                for (int r = 0; r < QUERY_RANK; r++) add_hidden(sum, here, ROW(query_down, 0, r), ROW(query_up, 0, r));
                for (int r = 0; r < KEY_RANK; r++) add_hidden(sum, here, ROW(key_down, s, r), ROW(key_up, s, r));
                if (mixing)
                    for (int from = 0; from < HEADS; from++)
                        HEAD_VECTORS(h) sum[h / LANES] += here[from] * AT(mixing + from * HEADS, h);
                memcpy(tile[k], sum, sizeof(sum));
            }
            for (int h = 0; h < HEADS; h++)
                for (int k = 0; k < count; k++) maps[h * length + start + k] = tile[k][h];
        }
}
"""


def serves(maps: Tensor, *stages: "Composition | None") -> bool:
    """Whether `compose_in_place` can do this: real tensors, float32 throughout, heads contiguous, no gradients."""
    if type(maps) is not Tensor or maps.dtype != torch.float32:
        return False
    if maps.numel() > MOST_ELEMENTS and torch.get_num_threads() > 1:
        return False
    factors = [factor for stage in stages if stage is not None for factor in _factors(stage) if factor is not None]
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in (maps, *factors)):
        return False
    return all(factor.dtype == torch.float32 and factor.stride(-1) == 1 for factor in factors)


def compose_in_place(maps: Tensor, composition: "Composition") -> None:
    """Composes maps `[B, H, S]` of one query, contiguous."""
    *factors, static = _factors(composition)
    items, heads, length = maps.shape
    ranks = (0 if down is None else down.shape[2] for down in (composition.query_down, composition.key_down))
    places = [number for factor in factors for number in _place(factor)]
    mixing = None if static is None else static.contiguous()
    compose = _function(heads, composition.groups, *ranks)
    addresses = (c_long * len(places))(*places)
    compose(maps.data_ptr(), items, length, addresses, None if mixing is None else mixing.data_ptr())


def _factors(composition: "Composition") -> list[Tensor | None]:
    return [getattr(composition, name) for name in FACTORS]


def _place(factor: Tensor | None) -> tuple[int, int, int, int]:
    """Address and distances of `[B, S, H]` or `[B, S, R, H]`; the last distance of the first is never used."""
    if factor is None:
        return 0, 0, 0, 0
    item, key, rank, *_ = factor.stride()
    return factor.data_ptr(), item, key, rank


@functools.cache
def _function(heads: int, groups: int, query_rank: int, key_rank: int) -> Callable[..., None]:
    """Compiled for the widest registers that the heads of a group fill."""
    width = lanes()
    while heads // groups % width:
        width //= 2
    macros = {"LANES": width, "HEADS": heads, "GROUPS": groups, "QUERY_RANK": query_rank, "KEY_RANK": key_rank}
    compose = load_library(SOURCE, tuple(macros.items())).compose
    compose.restype, compose.argtypes = None, (c_void_p, c_long, c_long, c_void_p, c_void_p)
    return compose
