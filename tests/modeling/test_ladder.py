"""All ways of running a model agree: whole, chunked, cached, padded, packed, static, beams, assisted, and both dtypes.

The tolerance is tied to noise: against the forward pass in float64, a way of running may be wrong by a small multiple
of what the plain forward pass in the same dtype is wrong by.
"""

import copy
from collections.abc import Callable
from functools import cache

import pytest
import torch
from cases.models import assert_within_noise
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel, StaticCache

from dynattn import (
    DCFormerConfig,
    DCFormerForCausalLM,
    DCPythiaConfig,
    DCPythiaForCausalLM,
    RCMHAConfig,
    RCMHAForCausalLM,
)

VOCAB, WINDOW = 89, 16
# Tokens that are read one at a time, at most; longer sequences begin with a chunk.
STEPS = 24
COMMON = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "initializer_range": 0.12,
    "eos_token_id": None,
    "bos_token_id": None,
}
COMPOSED = {
    **COMMON,
    "num_key_value_heads": 4,
    "sliding_window": WINDOW,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 1.0},
    "compose_init_scale": 30.0,
}
FAMILIES: dict[str, tuple[type, type, dict]] = {
    "dcformer": (DCFormerConfig, DCFormerForCausalLM, COMPOSED),
    "dcpythia": (DCPythiaConfig, DCPythiaForCausalLM, COMPOSED),
    **{
        name: (RCMHAConfig, RCMHAForCausalLM, {**COMMON, "max_position_embeddings": 320, **fields})
        for name, fields in {
            "rcmha": {"attention_type": "rcmha", "mem_len": WINDOW - 1},
            "rcmha-without-window": {"attention_type": "rcmha", "mem_len": None, "conv_kernel_size": 5},
            "rmha": {"attention_type": "rmha", "mem_len": WINDOW - 1},
            "mdha-alibi": {"attention_type": "mdha", "mem_len": WINDOW - 1, "position_scheme": "alibi"},
            "mha-rope": {"attention_type": "mha", "mem_len": WINDOW - 1, "position_scheme": "rope"},
            "mha-learned": {"attention_type": "mha", "mem_len": None, "position_scheme": "learned"},
            "mha-sinusoidal": {"attention_type": "mha", "mem_len": None, "position_scheme": "sinusoidal"},
        }.items()
    },
}


def make(family: str, dtype: torch.dtype = torch.float32, **changes: int) -> PreTrainedModel:
    config_class, model_class, fields = FAMILIES[family]
    return model_class(config_class(**{**fields, **changes})).eval().to(dtype)


def whole(model: PreTrainedModel, ids: Tensor) -> Tensor:
    return model(ids, use_cache=False).logits


def chunked(model: PreTrainedModel, ids: Tensor) -> Tensor:
    cache = DynamicCache(config=model.config)
    return torch.cat([model(chunk, past_key_values=cache).logits for chunk in ids.split(37, dim=1)], dim=1)


def one_by_one(model: PreTrainedModel, ids: Tensor) -> Tensor:
    cache = DynamicCache(config=model.config)
    return torch.cat([model(part, past_key_values=cache).logits for part in in_steps(ids, 1)], dim=1)


def static(model: PreTrainedModel, ids: Tensor) -> Tensor:
    cache = StaticCache(config=model.config, max_cache_len=ids.shape[1] + 5)
    return torch.cat([model(part, past_key_values=cache).logits for part in in_steps(ids, 11)], dim=1)


def in_steps(ids: Tensor, at_once: int) -> list[Tensor]:
    """At least `at_once` tokens, if there are as many, and then one by one."""
    first = max(at_once, ids.shape[1] - STEPS)
    return [ids[:, :first], *ids[:, first:].split(1, dim=1)] if ids.shape[1] > first else [ids]


def left_padded(model: PreTrainedModel, ids: Tensor) -> Tensor:
    """Row by row against a batch in which every row has another padding."""
    pads = [3 * row for row in range(ids.shape[0])]
    width = ids.shape[1] + max(pads)
    padded, mask = torch.zeros(ids.shape[0], width, dtype=torch.long), torch.zeros(ids.shape[0], width).long()
    for row, pad in enumerate(pads):
        start = width - ids.shape[1] - pad  # some rows are padded on the right too
        padded[row, start : start + ids.shape[1]] = ids[row]
        mask[row, start : start + ids.shape[1]] = 1
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    logits = model(padded, attention_mask=mask, position_ids=positions, use_cache=False).logits
    return logits[mask.bool()].unflatten(0, (ids.shape[0], -1))


def right_padded_without_mask(model: PreTrainedModel, ids: Tensor) -> Tensor:
    tail = torch.zeros(ids.shape[0], 13, dtype=torch.long)
    return whole(model, torch.cat([ids, tail], dim=1))[:, : ids.shape[1]]


def packed(model: PreTrainedModel, ids: Tensor) -> Tensor:
    """All rows in one sequence; positions that restart separate the documents."""
    positions = torch.arange(ids.shape[1]).repeat(ids.shape[0])[None]
    logits = model(ids.reshape(1, -1), position_ids=positions, use_cache=False).logits
    return logits.unflatten(1, (ids.shape[0], -1))[0]


def packed_with_default_cache(model: PreTrainedModel, ids: Tensor) -> Tensor:
    """As a trainer calls it that does not think of `use_cache`."""
    positions = torch.arange(ids.shape[1]).repeat(ids.shape[0])[None]
    return model(ids.reshape(1, -1), position_ids=positions).logits.unflatten(1, (ids.shape[0], -1))[0]


def packed_by_borders(model: PreTrainedModel, ids: Tensor) -> Tensor:
    """What Transformers' flattening collator passes, and an all-ones mask that must not undo it."""
    borders = torch.arange(ids.shape[0] + 1, dtype=torch.int32) * ids.shape[1]
    row = ids.reshape(1, -1)
    logits = model(row, attention_mask=torch.ones_like(row), cu_seq_lens_q=borders, cu_seq_lens_k=borders).logits
    return logits.unflatten(1, (ids.shape[0], -1))[0]


def checkpointed(model: PreTrainedModel, ids: Tensor) -> Tensor:
    model = copy.deepcopy(model)
    model.gradient_checkpointing_enable()
    return whole(model.train(), ids)


def alone(model: PreTrainedModel, ids: Tensor) -> Tensor:
    return torch.cat([whole(model, row) for row in ids.split(1)])


WAYS: dict[str, Callable[[PreTrainedModel, Tensor], Tensor]] = {
    way.__name__: way
    for way in (
        chunked,
        one_by_one,
        static,
        left_padded,
        right_padded_without_mask,
        packed,
        packed_with_default_cache,
        packed_by_borders,
        checkpointed,
        alone,
    )
}


# Lengths in float32: one token, one chunk, several chunks. Each way also runs in bfloat16 with one length, which is
# shorter where tokens are read one by one, because conversions of dtype do not depend on the length.
RUNS = [
    *((way, torch.float32, length) for way in WAYS for length in (1, 24, 257)),
    *((way, torch.bfloat16, 24 if WAYS[way] in (one_by_one, static) else 100) for way in WAYS),
]


@cache
def example(family: str, dtype: torch.dtype, length: int) -> tuple[PreTrainedModel, Tensor, Tensor, Tensor]:
    """A model and tokens for all ways of running it, with the logits of the plain pass, in its dtype and in float64."""
    torch.manual_seed(0)
    model = make(family, dtype)
    ids = torch.randint(1, VOCAB, (3, length))
    return model, ids, whole(model, ids), whole(copy.deepcopy(model).double(), ids)


@pytest.mark.parametrize(("way", "dtype", "length"), RUNS, ids=str)
@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_every_way_of_running_gives_the_same_logits(family: str, way: str, length: int, dtype: torch.dtype) -> None:
    model, ids, plain, exact = example(family, dtype, length)
    assert_within_noise(WAYS[way](model, ids), plain, exact)


@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_documents_and_windows_hide_what_they_should(family: str) -> None:
    """The ladder's other half: a token that must be seen does change the logits."""
    model = make(family)
    ids = torch.randint(1, VOCAB, (1, 40))
    changed = ids.clone()
    changed[0, 10] = (changed[0, 10] % (VOCAB - 1)) + 1
    difference = (whole(model, ids) - whole(model, changed)).abs().amax(-1)[0]
    assert difference[:10].max() == 0
    assert difference[10:].min() > 1e-4
    positions = torch.cat([torch.arange(20), torch.arange(20)])[None]
    separate = [model(x, position_ids=positions, use_cache=False).logits for x in (ids, changed)]
    assert (separate[0] - separate[1])[0, 20:].abs().max() == 0


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("how", ["static", "beams", "assisted", "sampled", "left-padded"])
def test_generation_agrees_with_the_model_without_a_cache(family: str, how: str) -> None:
    model = make(family)
    ids = torch.randint(1, VOCAB, (1 if how == "assisted" else 2, 21))
    arguments: dict = {"max_new_tokens": 14, "do_sample": False, "pad_token_id": 0}
    arguments["attention_mask"] = torch.ones_like(ids)
    if how == "beams":
        arguments["num_beams"] = 4
    if how == "sampled":
        arguments |= {"do_sample": True, "temperature": 0.7, "top_k": 20}
    if how == "left-padded":
        arguments["attention_mask"][1, :9] = 0
    other: dict = {}
    if how == "static":
        other["cache_implementation"] = "static"
    if how == "assisted":
        torch.manual_seed(5)
        other["assistant_model"] = make(family)
    torch.manual_seed(3)
    with_cache = model.generate(ids, **arguments, **other)
    torch.manual_seed(3)
    assert torch.equal(with_cache, model.generate(ids, **arguments, use_cache=False))


# Whether a step is one graph is told in a few seconds by compiling one layer to PyTorch's operators.
@pytest.mark.parametrize(
    ("family", "backend", "changes"),
    [
        ("rcmha", "eager", {"num_hidden_layers": 1}),
        *(
            pytest.param(family, "inductor", {}, marks=pytest.mark.slow)
            for family in ("dcformer", "dcpythia", "rcmha", "mha-rope")
        ),
    ],
)
@torch.no_grad()
def test_a_compiled_decoding_step_gives_the_logits_of_one_that_is_not(
    family: str, backend: str, changes: dict[str, int]
) -> None:
    torch.compiler.reset()
    model = make(family, **changes)
    ids = torch.randint(1, VOCAB, (2, 40))
    cache = StaticCache(config=model.config, max_cache_len=48)
    prefill = model(ids[:, :12], past_key_values=cache).logits
    step = torch.compile(model, fullgraph=True, backend=backend)
    logits = [step(token, past_key_values=cache).logits for token in ids[:, 12:].split(1, dim=1)]
    exact = whole(copy.deepcopy(model).double(), ids)
    assert_within_noise(torch.cat([prefill, *logits], dim=1), whole(model, ids), exact)
