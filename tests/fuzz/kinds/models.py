"""Whole models of random small configurations: every way of running one gives the logits of the plain forward pass."""

import copy
import dataclasses
import tempfile
from collections.abc import Callable
from random import Random
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, DynamicCache, PreTrainedModel, StaticCache

import dynattn

from ..harness import Case, FindingError, Kind, expect, one_line
from .engine import serve

VOCAB = 61
FAMILIES = ("DCFormer", "DCPythia", "RCMHA")
# Beams whose scores, mean logarithms of probabilities, differ by less have equal ones but for rounding.
SAME_SCORE = 1e-4
# A way of running may be wrong by this many times what the plain pass in float32 is wrong by.
MULTIPLE = 8


def generate(random: Random) -> Case:
    family = random.choice(FAMILIES)
    fields = composed_fields(random, family) if family != "RCMHA" else rcmha_fields(random)
    length = random.choice((1, 2, 5, 17, 30, 41))
    return {
        "class": f"{family}, {(way := random.choice(ways_of(family, fields)))}",
        "family": family,
        "way": way,
        "fields": fields,
        "length": length,
        "batch": random.choice((1, 2, 3)),
        "cut": random.randint(1, max(1, length - 1)),
        "seed": random.randrange(2**31),
    }


def ways_of(family: str, fields: Case) -> list[str]:
    """The ways that promise equal logits; memory of segments is another function of the segments."""
    if fields.get("memory_type") == "segment":
        return ["reloaded", "alone", "beams", "checkpointed"]
    return list(WAYS)


def attention_fields(random: Random) -> Case:
    """Sizes, heads and their composition, as every family with composed heads has them."""
    heads = random.choice((2, 4, 6, 8))
    groups = random.choice([number for number in (1, 1, 2, 3) if heads % number == 0 and heads // number > 1])
    fields = {
        "num_attention_heads": heads,
        "num_key_value_heads": random.choice([number for number in range(1, heads + 1) if heads % number == 0]),
        "hidden_size": random.choice((16, 24, 48)),
        "head_dim": random.choice((4, 8, 12)),
        "intermediate_size": 24,
        "num_hidden_layers": random.choice((1, 2, 3)),
        "compose_groups": groups,
        "compose_rank": random.choice([rank for rank in (1, 2, 3) if rank <= heads // groups]),
        "compose_hidden_size": random.choice((None, 1, 5)),
        "compose_init_scale": random.choice((1.0, 30.0)),
        "initializer_range": 0.15,
        "tie_word_embeddings": random.random() < 0.3,
        "attention_bias": random.random() < 0.3,
        "use_qk_norm": random.random() < 0.7,
        "qk_norm_type": random.choice(("rms_norm", "rms_norm", "layer_norm", "joint_rms_norm")),
    }
    switches = ("pre", "post", "query_wise", "key_wise", "low_rank", "gate", "static")
    return fields | {f"compose_{name}": random.random() < 0.75 for name in switches}


def composed_fields(random: Random, family: str) -> Case:
    fields = attention_fields(random)
    fields |= {
        "sliding_window": random.choice((2, 3, 7, 100)),
        "layer_types": random_layers(random, fields["num_hidden_layers"]),
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": random.choice((10.0, 1e4)),
            "partial_rotary_factor": random.choice((0.5, 1.0)),
        },
    }
    if random.random() < 0.5:
        fields |= random_positions(random, sorted(set(fields["layer_types"])))
    elif random.random() < 0.3:
        fields["no_rope_layers"] = [random.choice((0, 1)) for _ in fields["layer_types"]]
    if family == "DCFormer":
        fields["mgate_dim"] = random.choice((None, 3, 8))
        fields["norm_placement"] = random.choice(("input", "input", "output"))
    else:
        fields["use_parallel_residual"] = random.random() < 0.6
    return fields


def random_layers(random: Random, layers: int) -> list[str]:
    return [random.choice(("sliding_attention", "full_attention")) for _ in range(layers)]


def random_positions(random: Random, layer_types: list[str]) -> Case:
    """A position scheme for all layers or for each layer type, and perhaps a gain."""
    relative = ("rope", "none", "alibi", "t5", "carope")
    fields: Case = {"position_scheme": random.choice((*relative, "learned", "sinusoidal"))}
    if random.random() < 0.4:
        fields["position_scheme"] = {layer_type: random.choice(relative) for layer_type in layer_types}
    scheme = fields["position_scheme"]
    schemes = {scheme} if isinstance(scheme, str) else set(scheme.values())
    if "carope" in schemes:  # it turns whole heads
        fields["rope_parameters"] = {"rope_theta": random.choice((10.0, 1e4)), "partial_rotary_factor": 1.0}
    fields["compose_position_bias"] = not schemes.isdisjoint(("alibi", "t5")) and random.random() < 0.5
    fields["position_gain"] = random.choice((None, None, "distance", "bucket"))
    return fields


def rcmha_fields(random: Random) -> Case:
    kind = random.choice(("rcmha", "rcmha", "rmha", "mdha", "mha"))
    scheme = random.choice(("none", "rope", "alibi", "t5", "learned")) if kind in ("mdha", "mha") else "none"
    memory = random.choice(("streaming", "streaming", "segment"))
    return {
        "attention_type": kind,
        "position_scheme": scheme,
        "memory_type": memory,
        "mem_len": random.choice((None, 1, 3, 12, 50)),
        "max_position_embeddings": 128,
        "conv_kernel_size": random.choice((1, 2, 3, 5)),
        "num_attention_heads": random.choice((1, 2, 3, 4)),
        "head_dim": random.choice((4, 6)),
        "hidden_size": 24,
        "intermediate_size": 20,
        "num_hidden_layers": random.choice((1, 2, 3)),
        "initializer_range": 0.2,
        "qk_bias": random.choice((None, True, False)),
        "lm_head_bias": random.random() < 0.5,
        "hidden_act": random.choice(("relu2", "relu", "gelu")),
    }


def check(case: Case) -> None:
    """Finds logits that differ from the plain pass by more than rounding, and what cannot be run."""
    torch.set_num_threads(1)
    torch.manual_seed(case["seed"])
    check_model(build(case), case)


def check_model(model: PreTrainedModel, case: Case) -> None:
    """`check` of a model; a case has `class`, `way`, `batch`, `length`, `cut` and `seed`."""
    ids = torch.randint(1, VOCAB, (case["batch"], case["length"]))
    if case["way"] == "beams":
        check_beam_search(model, ids)
        return
    with torch.no_grad():
        plain = model(ids, use_cache=False).logits
        truth = copy.deepcopy(model).double()(ids, use_cache=False).logits
        try:
            logits = WAYS[case["way"]](model, ids, case)
        except Exception as error:  # every way is documented to work
            raise FindingError(f"{case['class']}: {one_line(error)}") from error
    expect_equal(case, logits, plain, truth)


def expect_equal(case: Case, logits: Tensor, plain: Tensor, truth: Tensor) -> None:
    """Finds logits that are further from the `truth` in float64 than rounding takes those of the `plain` pass."""
    expect(logits.shape == truth.shape, f"{case['class']}: logits of shape {tuple(logits.shape)}")
    noise = max(float((plain - truth).abs().max()), float(truth.abs().max()) * torch.finfo(torch.float32).eps)
    error = float((logits - truth).abs().nan_to_num(1e30).max())
    expect(
        error <= MULTIPLE * noise, f"{case['class']}: logits wrong by {error:.1e}, those of the plain by {noise:.1e}"
    )


def build(case: Case) -> PreTrainedModel:
    config_class = getattr(dynattn, f"{case['family']}Config")
    known = {field.name for field in dataclasses.fields(config_class)}
    ours = {"vocab_size": VOCAB, "eos_token_id": None, "bos_token_id": None, "pad_token_id": 0}
    fields = {name: value for name, value in {**ours, **case["fields"]}.items() if name in known}
    return getattr(dynattn, f"{case['family']}ForCausalLM")(config_class(**fields)).eval()


def in_steps(model: PreTrainedModel, parts: tuple[Tensor, ...], cache: object) -> Tensor:
    return torch.cat([model(part, past_key_values=cache, use_cache=True).logits for part in parts], dim=1)


def one_by_one(model: PreTrainedModel, ids: Tensor, case: Case) -> Tensor:
    return in_steps(model, ids.split(1, dim=1), DynamicCache(config=model.config))


def chunked(model: PreTrainedModel, ids: Tensor, case: Case) -> Tensor:
    return in_steps(model, ids.split(case["cut"], dim=1), DynamicCache(config=model.config))


def static(model: PreTrainedModel, ids: Tensor, case: Case) -> Tensor:
    cache = StaticCache(config=model.config, max_cache_len=ids.shape[1] + case["cut"] % 4)
    return in_steps(model, ids.split(case["cut"], dim=1), cache)


def static_by_one(model: PreTrainedModel, ids: Tensor, case: Case) -> Tensor:
    cache = StaticCache(config=model.config, max_cache_len=ids.shape[1])
    return in_steps(model, first_then_one_by_one(ids, case["cut"]), cache)


def first_then_one_by_one(ids: Tensor, first: int) -> tuple[Tensor, ...]:
    rest = ids[:, first:]
    return (ids[:, :first], *(rest.split(1, dim=1) if rest.shape[1] else ()))


def left_padded(model: PreTrainedModel, ids: Tensor, case: Case) -> Tensor:
    """Every row has another padding; what it holds must not matter."""
    pads = [(row * case["cut"]) % 7 for row in range(len(ids))]
    padded = torch.randint(1, VOCAB, (len(ids), ids.shape[1] + max(pads)))
    mask = torch.zeros_like(padded)
    for row, pad in enumerate(pads):
        start = max(pads) - pad
        padded[row, start : start + ids.shape[1]] = ids[row]
        mask[row, start : start + ids.shape[1]] = 1
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    logits = model(padded, attention_mask=mask, position_ids=positions, use_cache=False).logits
    return logits[mask.bool()].unflatten(0, (len(ids), -1))


def left_padded_steps(model: PreTrainedModel, ids: Tensor, case: Case) -> Tensor:
    """Left padding, then token by token, as `generate` does."""
    pad = 1 + case["cut"] % 5
    mask = torch.ones(len(ids), pad + ids.shape[1], dtype=torch.long)
    mask[::2, :pad] = 0
    padded = torch.cat([torch.randint(1, VOCAB, (len(ids), pad)), ids], dim=1)
    cache, parts, seen = DynamicCache(config=model.config), [], 0
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    for part in first_then_one_by_one(padded, pad + case["cut"]):
        end = seen + part.shape[1]
        options = {"attention_mask": mask[:, :end], "position_ids": positions[:, seen:end], "past_key_values": cache}
        parts.append(model(part, use_cache=True, **options).logits)
        seen = end
    logits = torch.cat(parts, dim=1)[:, pad:]
    # Rows without padding have other tokens before: only padded rows are those of the plain pass.
    return torch.where((mask[:, :1] == 0)[..., None], logits, model(ids, use_cache=False).logits)


def packed(model: PreTrainedModel, ids: Tensor, case: Case) -> Tensor:
    positions = torch.arange(ids.shape[1]).repeat(len(ids))[None]
    logits = model(ids.reshape(1, -1), position_ids=positions, use_cache=case["seed"] % 2 == 0).logits
    return logits.unflatten(1, (len(ids), -1))[0]


def packed_into_a_cache(model: PreTrainedModel, ids: Tensor, case: Case) -> Tensor:
    """An empty cache that the caller gives is as good as none."""
    positions = torch.arange(ids.shape[1]).repeat(len(ids))[None]
    cache = DynamicCache(config=model.config)
    if case["seed"] % 2:
        cache = StaticCache(config=model.config, max_cache_len=ids.numel() + 3)
    logits = model(ids.reshape(1, -1), position_ids=positions, past_key_values=cache).logits
    return logits.unflatten(1, (len(ids), -1))[0]


def packed_by_borders(model: PreTrainedModel, ids: Tensor, case: Case) -> Tensor:
    borders = torch.arange(len(ids) + 1, dtype=torch.int32) * ids.shape[1]
    logits = model(ids.reshape(1, -1), cu_seq_lens_q=borders, cu_seq_lens_k=borders, use_cache=False).logits
    return logits.unflatten(1, (len(ids), -1))[0]


def with_mask_and_positions(model: PreTrainedModel, ids: Tensor, case: Case) -> Tensor:
    """What is the default, said aloud: must change nothing."""
    positions = torch.arange(ids.shape[1]).expand(ids.shape)
    return model(ids, attention_mask=torch.ones_like(ids), position_ids=positions, use_cache=True).logits


def with_four_dimensional_mask(model: PreTrainedModel, ids: Tensor, case: Case) -> Tensor:
    """A causal mask as a caller may make it; windows are in it where all layers have the same."""
    length = ids.shape[1]
    mask = torch.ones(length, length, dtype=torch.bool).tril()
    windows = [model.config.sliding_window if "sliding" in kind else None for kind in model.config.layer_types]
    if len(set(windows)) == 1 and windows[0] is not None:
        mask &= torch.ones_like(mask).triu(1 - windows[0])
    elif any(window is not None and window < length for window in windows):
        return model(ids, use_cache=False).logits
    additive = torch.zeros(mask.shape).masked_fill(~mask, torch.finfo(torch.float32).min)
    chosen = mask if case["seed"] % 2 else additive
    return model(ids, attention_mask=chosen.expand(len(ids), 1, -1, -1), use_cache=False).logits


def holes(model: PreTrainedModel, ids: Tensor, case: Case) -> Tensor:
    """A mask with holes: what the hidden tokens are must not matter to the others, and a cache changes nothing."""
    mask = (torch.rand(ids.shape) > 0.3).long()
    mask[:, -1] = 1
    other = torch.where(mask.bool(), ids, (ids + 7) % VOCAB)
    options = {"attention_mask": mask, "position_ids": (mask.cumsum(-1) - 1).clamp(min=0)}
    logits = [model(one, **options, use_cache=False).logits for one in (ids, other)]
    difference = float((logits[0] - logits[1])[mask.bool()].abs().max())
    expect(difference == 0, f"hidden tokens change logits by {difference:.1e}")
    cached = model(ids, **options, past_key_values=DynamicCache(config=model.config), use_cache=True).logits
    difference = float((logits[0] - cached)[mask.bool()].abs().max())
    size = float(logits[0].abs().max())
    expect(difference <= 1e-5 * max(size, 1), f"a cache changes logits of {size:.1e} by {difference:.1e}")
    return model(ids, use_cache=False).logits


def reloaded(model: PreTrainedModel, ids: Tensor, case: Case) -> Tensor:
    with tempfile.TemporaryDirectory(prefix="dynattn-fuzz-") as folder:
        model.save_pretrained(folder)
        again = type(model) if hasattr(model.config, "composed_heads") else AutoModelForCausalLM
        return again.from_pretrained(folder).eval()(ids, use_cache=False).logits


def alone(model: PreTrainedModel, ids: Tensor, case: Case) -> Tensor:
    return torch.cat([model(row, use_cache=False).logits for row in ids.split(1)])


def eagerly(model: PreTrainedModel, ids: Tensor, case: Case) -> Tensor:
    model.set_attn_implementation("eager")
    return model(ids, use_cache=False).logits


def checkpointed(model: PreTrainedModel, ids: Tensor, case: Case) -> Tensor:
    model.gradient_checkpointing_enable()
    return model.train()(ids, use_cache=False).logits


def embedded(model: PreTrainedModel, ids: Tensor, case: Case) -> Tensor:
    return model(inputs_embeds=model.get_input_embeddings()(ids), use_cache=False).logits


def paged(model: Any, ids: Tensor, case: Case) -> Tensor:
    """Requests of a serving engine, where this package attends to its pages."""
    if not (model.supports_paged_cache and model.attends_to_paged_cache):
        return model(ids, use_cache=False).logits
    return serve(model, ids, case["cut"])


def check_beam_search(model: Any, ids: Tensor) -> None:
    """Beam search gives the same tokens when it is repeated, and without a cache, too.

    Beams may have the same score but for rounding; then either may be kept, and the scores are compared.
    """
    options = {"max_new_tokens": 6, "do_sample": False, "num_beams": 3, "attention_mask": torch.ones_like(ids)}
    options |= {"return_dict_in_generate": True, "output_scores": True}
    first, again = model.generate(ids, **options), model.generate(ids, **options)
    expect(torch.equal(first.sequences, again.sequences), "beam search is another when it is repeated")
    if getattr(model.config, "memory_type", "") == "segment":
        return
    plain = model.generate(ids, use_cache=False, **options)
    if not torch.equal(first.sequences, plain.sequences):
        error = float((first.sequences_scores - plain.sequences_scores).abs().max())
        expect(error <= SAME_SCORE, f"beam search needs its cache; scores differ by {error:.1e}")


WAYS: dict[str, Callable[[PreTrainedModel, Tensor, Case], Tensor]] = {
    way.__name__: way
    for way in (
        one_by_one,
        chunked,
        static,
        static_by_one,
        left_padded,
        left_padded_steps,
        packed,
        packed_into_a_cache,
        packed_by_borders,
        with_mask_and_positions,
        with_four_dimensional_mask,
        holes,
        reloaded,
        alone,
        eagerly,
        checkpointed,
        embedded,
        paged,
    )
} | {"beams": alone}
KIND = Kind("models", generate, check, fast=12, batch=40)
