"""Encoders, vision transformers and encoder-decoders: every way of running one gives what the plain pass gives."""

import copy
import dataclasses
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Any

import torch
from torch import Tensor
from transformers import EncoderDecoderCache, PreTrainedModel
from transformers.cache_utils import DynamicCache, StaticCache

import dynattn

from ..harness import Case, FindingError, Kind, expect, one_line
from .models import (
    VOCAB,
    attention_fields,
    check_beam_search,
    expect_equal,
    first_then_one_by_one,
    random_layers,
    rcmha_fields,
)

Inputs = dict[str, Tensor]
Way = Callable[[PreTrainedModel, Inputs, Case], Tensor]
TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "cls_token_id": 1, "eos_token_id": 2, "sep_token_id": 2}
TOKENS |= {"vocab_size": VOCAB, "decoder_start_token_id": 1}
CHANNELS = 2


@dataclass(frozen=True)
class Family:
    """What is fuzzed of a family.

    Attributes:
        prefix: of its classes.
        head: what follows the prefix in the name of the model.
        fields: random fields of its configuration.
        inputs: random inputs of a case.
        ways: ways of running it, each of which gives the logits of the plain pass.
    """

    prefix: str
    head: str
    fields: Callable[[Random], Case]
    inputs: Callable[[Case], Inputs]
    ways: tuple[Way, ...]


def generate(random: Random) -> Case:
    name = random.choice(list(FAMILIES))
    family = FAMILIES[name]
    way = random.choice(family.ways).__name__
    return {
        "class": f"{name}, {way}",
        "family": name,
        "way": way,
        "fields": family.fields(random),
        "length": random.choice((1, 2, 5, 17, 30, 41)),
        "source": random.choice((1, 3, 17, 50)),
        "batch": random.choice((1, 2, 3)),
        "cut": random.randint(1, 12),
        "seed": random.randrange(2**31),
    }


def encoder_fields(random: Random) -> Case:
    fields = attention_fields(random)
    return fields | {
        "local_attention": random.choice((2, 3, 6, 100)),
        "layer_types": random_layers(random, fields["num_hidden_layers"]),
        "mlp_bias": random.random() < 0.3,
        "norm_bias": random.random() < 0.3,
        "decoder_bias": random.random() < 0.5,
    }


def image_fields(random: Random) -> Case:
    patch = random.choice((1, 2, [2, 3]))
    height, width = (patch, patch) if isinstance(patch, int) else patch
    prefix: Case = {"use_class_token": True, "use_distillation_token": random.random() < 0.3}
    prefix |= {"classifier_pooling": random.choice(("mean", "cls", "cls_mean"))}
    return {
        **attention_fields(random),
        **(prefix if random.random() < 0.6 else {}),
        "num_channels": CHANNELS,
        "patch_size": patch,
        "image_size": [height * random.choice((1, 3, 6)), width * random.choice((1, 2, 7))],
        "num_register_tokens": random.choice((0, 0, 1, 3)),
        "position_embedding_type": random.choice(("sincos2d", "learned")),
        "representation_size": random.choice((None, 10)),
        "mlp_type": random.choice(("mlp", "swiglu")),
        "qk_norm_type": random.choice(("layer_norm", "rms_norm")),
        "layer_scale_init": random.choice((None, 0.5)),
        "attention_output_bias": random.choice((None, True, False)),
    }


def translator_fields(random: Random) -> Case:
    learned = random.random() < 0.5
    return {
        **attention_fields(random),
        "decoder_layers": random.choice((None, 1, 3)),
        "position_embedding_type": "learned" if learned else "sinusoidal",
        "position_offset": random.choice((0, 2)) if learned else 0,
        "max_position_embeddings": 64,
        "scale_embedding": random.random() < 0.3,
        "normalize_embedding": random.random() < 0.5,
        "normalize_before": random.random() < 0.5,
        "hidden_dropout": 0.0,
        **{f"compose_{place}": random.random() < 0.7 for place in ("encoder", "decoder", "cross")},
    }


def relative_translator_fields(random: Random) -> Case:
    fields = rcmha_fields(random)
    centred = random.random() < 0.6
    return {
        **{name: value for name, value in fields.items() if name not in ("memory_type", "mem_len")},
        "position_scheme": None,
        "max_position_embeddings": 64,
        "decoder_layers": random.choice((None, 1, 3)),
        "encoder_conv_is_causal": not centred,
        # A centred convolution has as many tokens before as behind.
        "conv_kernel_size": random.choice((1, 3, 5)) if centred else fields["conv_kernel_size"],
    }


def text(case: Case) -> Inputs:
    return {"input_ids": tokens(case["batch"], case["length"])}


def images(case: Case) -> Inputs:
    height, width = case["fields"]["image_size"]
    return {"pixel_values": torch.randn(case["batch"], CHANNELS, height, width)}


def translation(case: Case) -> Inputs:
    source, target = tokens(case["batch"], case["source"]), tokens(case["batch"], case["length"])
    return {"input_ids": source, "decoder_input_ids": target}


def tokens(batch: int, length: int) -> Tensor:
    """`[B, T]`, no special ones."""
    return torch.randint(3, VOCAB, (batch, length))


def check(case: Case) -> None:
    """Finds logits that differ from the plain pass by more than rounding, and what cannot be run."""
    torch.set_num_threads(1)
    torch.manual_seed(case["seed"])
    family = FAMILIES[case["family"]]
    model, inputs = build(case), family.inputs(case)
    way = next(way for way in family.ways if way.__name__ == case["way"])
    with torch.no_grad():
        plain = logits_of(model, inputs)
        truth = logits_of(copy.deepcopy(model).double(), inputs)
        try:
            found = way(model, inputs, case)
        except Exception as error:  # every way is documented to work
            raise FindingError(f"{case['class']}: {one_line(error)}") from error
    expect_equal(case, found, plain, truth)


def build(case: Case) -> PreTrainedModel:
    family = FAMILIES[case["family"]]
    config_class = getattr(dynattn, f"{family.prefix}Config")
    known = {field.name for field in dataclasses.fields(config_class)}
    fields = {name: value for name, value in {**TOKENS, **case["fields"]}.items() if name in known}
    model = getattr(dynattn, f"{family.prefix}{family.head}")(config_class(**fields)).eval()
    return randomized(model)


def randomized(model: PreTrainedModel) -> PreTrainedModel:
    """The model with other numbers where training starts from zeros, such as a classifier."""
    with torch.no_grad():
        for weight in model.parameters():
            if not weight.any():
                weight.normal_(std=0.2)
    return model


def logits_of(model: PreTrainedModel, inputs: Inputs, **options: Any) -> Tensor:
    dtype = next(model.parameters()).dtype
    given = {name: tensor.to(dtype) if tensor.is_floating_point() else tensor for name, tensor in inputs.items()}
    return model(**given, **options).logits


def alone(model: PreTrainedModel, inputs: Inputs, case: Case) -> Tensor:
    rows = zip(*(tensor.split(1) for tensor in inputs.values()), strict=True)
    return torch.cat([logits_of(model, dict(zip(inputs, row, strict=True))) for row in rows])


def reloaded(model: PreTrainedModel, inputs: Inputs, case: Case) -> Tensor:
    with tempfile.TemporaryDirectory(prefix="dynattn-fuzz-") as folder:
        model.save_pretrained(folder)
        return logits_of(type(model).from_pretrained(folder).eval(), inputs)


def eagerly(model: PreTrainedModel, inputs: Inputs, case: Case) -> Tensor:
    model.set_attn_implementation("eager")
    return logits_of(model, inputs)


def checkpointed(model: PreTrainedModel, inputs: Inputs, case: Case) -> Tensor:
    model.gradient_checkpointing_enable()
    return logits_of(model.train(), inputs)


def with_mask(model: PreTrainedModel, inputs: Inputs, case: Case) -> Tensor:
    """A mask that hides nothing."""
    return logits_of(model, inputs, attention_mask=torch.ones_like(inputs["input_ids"]))


def embedded(model: PreTrainedModel, inputs: Inputs, case: Case) -> Tensor:
    return model(inputs_embeds=model.get_input_embeddings()(inputs["input_ids"])).logits


def padded(model: PreTrainedModel, inputs: Inputs, case: Case) -> Tensor:
    """Every row has another padding, on a side that the case decides; what it holds must not matter."""
    ids = inputs["input_ids"]
    pads = [(row * case["cut"]) % 7 for row in range(len(ids))]
    length = ids.shape[1]
    rows = tokens(len(ids), length + max(pads))
    mask, positions = torch.zeros_like(rows), torch.zeros_like(rows)
    for row, pad in enumerate(pads):
        start = max(pads) - pad if case["seed"] % 2 else 0
        place = slice(start, start + length)
        rows[row, place], mask[row, place], positions[row, place] = ids[row], 1, torch.arange(length)
    logits = model(rows, attention_mask=mask, position_ids=positions).logits
    return logits[mask.bool()].unflatten(0, (len(ids), -1))


def holes(model: PreTrainedModel, inputs: Inputs, case: Case) -> Tensor:
    """What hidden tokens are must not matter to the others."""
    ids = inputs["input_ids"]
    mask = (torch.rand(ids.shape) > 0.3).long()
    mask[:, -1] = 1
    other = torch.where(mask.bool(), ids, (ids + 7) % VOCAB)
    first, second = (model(one, attention_mask=mask).logits[mask.bool()] for one in (ids, other))
    expect(torch.equal(first, second), "hidden tokens change logits")
    return logits_of(model, inputs)


def packed(model: PreTrainedModel, inputs: Inputs, case: Case) -> Tensor:
    """All rows in one, told apart by positions."""
    ids = inputs["input_ids"]
    positions = torch.arange(ids.shape[1]).repeat(len(ids))[None]
    return model(ids.reshape(1, -1), position_ids=positions).logits.unflatten(1, (len(ids), -1))[0]


def targets_alone(model: PreTrainedModel, inputs: Inputs, case: Case) -> Tensor:
    """The loss without logits is that with them."""
    labels = torch.where(torch.rand(inputs["input_ids"].shape) < 0.4, inputs["input_ids"], -100)
    labels[0, 0] = 3
    with_logits = model(**inputs, labels=labels, num_items_in_batch=torch.tensor(3))
    loss = model(**inputs, labels=labels, num_items_in_batch=torch.tensor(3), skip_logits=True).loss
    expect(abs(loss - with_logits.loss) <= 1e-5 * with_logits.loss, f"losses {loss} and {with_logits.loss}")
    return with_logits.logits


def stepwise(model: PreTrainedModel, inputs: Inputs, case: Case, cache: Any) -> Tensor:
    """The target in parts, each of which reads the cache of those before."""
    target, logits = inputs["decoder_input_ids"], []
    parts = target.split(case["cut"], dim=1) if case["seed"] % 2 else first_then_one_by_one(target, case["cut"])
    encoded = model.get_encoder()(input_ids=inputs["input_ids"])
    for part in parts:
        output = model(encoder_outputs=encoded, decoder_input_ids=part, past_key_values=cache, use_cache=True)
        cache = output.past_key_values
        logits.append(output.logits)
    return torch.cat(logits, dim=1)


def in_steps(model: PreTrainedModel, inputs: Inputs, case: Case) -> Tensor:
    return stepwise(model, inputs, case, None)


def in_steps_from_own_caches(model: PreTrainedModel, inputs: Inputs, case: Case) -> Tensor:
    config = model.config.get_text_config(decoder=True)
    cache = EncoderDecoderCache(DynamicCache(config=config), DynamicCache(config=config))
    return stepwise(model, inputs, case, cache)


def in_steps_from_static_caches(model: PreTrainedModel, inputs: Inputs, case: Case) -> Tensor:
    config, source = model.config.get_text_config(decoder=True), inputs["input_ids"].shape[1]
    own = StaticCache(config=config, max_cache_len=inputs["decoder_input_ids"].shape[1] + case["cut"] % 4)
    cache = EncoderDecoderCache(own, StaticCache(config=config, max_cache_len=source))
    return stepwise(model, inputs, case, cache)


def with_padded_source(model: PreTrainedModel, inputs: Inputs, case: Case) -> Tensor:
    source = inputs["input_ids"]
    rows = torch.cat([source, tokens(len(source), case["cut"])], dim=1)
    mask = torch.ones_like(rows)
    mask[:, source.shape[1] :] = 0
    return model(rows, attention_mask=mask, decoder_input_ids=inputs["decoder_input_ids"]).logits


def beams(model: PreTrainedModel, inputs: Inputs, case: Case) -> Tensor:
    check_beam_search(model, inputs["input_ids"])
    return logits_of(model, inputs)


ALWAYS: tuple[Way, ...] = (alone, reloaded, eagerly, checkpointed)
TRANSLATING: tuple[Way, ...] = (
    *ALWAYS,
    with_mask,
    with_padded_source,
    in_steps,
    in_steps_from_own_caches,
    in_steps_from_static_caches,
    beams,
)
FAMILIES = {
    "DCModernBert": Family(
        "DCModernBert",
        "ForMaskedLM",
        encoder_fields,
        text,
        (*ALWAYS, with_mask, embedded, padded, holes, packed, targets_alone),
    ),
    "DCViT": Family("DCViT", "ForImageClassification", image_fields, images, ALWAYS),
    "DCBart": Family("DCBart", "ForConditionalGeneration", translator_fields, translation, TRANSLATING),
    "RCMHASeq2Seq": Family(
        "RCMHASeq2Seq", "ForConditionalGeneration", relative_translator_fields, translation, TRANSLATING
    ),
}
KIND = Kind("bidirectional", generate, check, fast=12, batch=40)
