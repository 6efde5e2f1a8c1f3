"""Configurations with hostile fields: what is accepted runs and is finite, what is refused is refused by name."""

import dataclasses
import json
import math
import tempfile
from random import Random
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from transformers import AutoConfig, PreTrainedConfig

import dynattn
from dynattn.families import FAMILIES

from ..harness import Case, FindingError, Kind, expect, one_line

SMALL: dict[str, Case] = {
    "shared": {
        "vocab_size": 31,
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "max_position_embeddings": 64,
        "initializer_range": 0.1,
        "bos_token_id": None,
        "eos_token_id": None,
    },
    "DCFormer": {"sliding_window": 5},
    "DCPythia": {"sliding_window": 5, "head_dim": 8},
    "RCMHA": {"mem_len": 5},
    "DCModernBert": {"local_attention": 6, "pad_token_id": 0, "cls_token_id": 1, "sep_token_id": 2},
    "DCViT": {"image_size": 12, "patch_size": 4, "num_channels": 2, "representation_size": None},
    "DCBart": {"pad_token_id": 0, "decoder_start_token_id": 0, "forced_eos_token_id": None},
    "RCMHASeq2Seq": {"pad_token_id": 0, "decoder_start_token_id": 0},
}
ROTATING = ("DCFormer", "DCPythia", "DCModernBert")
PAIRS = ("image_size", "patch_size")
# JSON has no other numbers than these; "NaN" and the like are read back by Python's parser.
NUMBERS: tuple[Any, ...] = (0, -1, -7, 1, 2, 3, 5, 10**12, 2**63, 0.0, 0.5, -0.5, 1.5, 1e-30, 1e30)
NUMBERS += (float("nan"), float("inf"), -float("inf"))
OTHERS: tuple[Any, ...] = (
    None,
    True,
    False,
    "",
    "1",
    "relu",
    "gelu",
    "no-such",
    "sliding_attention",
    [],
    {},
    [1],
    ["a"],
)
OTHERS += ({"a": 1}, [None], "\u0000", "x" * 5000)
ROPE_TYPES = ("default", "linear", "dynamic", "yarn", "longrope", "llama3", "proportional", "no-such", 3, None)
ROPE_FIELDS: dict[str, tuple[Any, ...]] = {
    "rope_theta": (1e4, 10, 0, -1, 1e-5, float("nan"), float("inf"), "10000", None),
    "factor": (1.0, 2.0, 8, 0, -1, 0.5, float("nan"), float("inf"), "2", None),
    "partial_rotary_factor": (1.0, 0.5, 0.25, 0, -0.5, 1.5, 0.3, float("nan"), "1", None),
    "original_max_position_embeddings": (32, 64, 0, -1, 1.5, None, "32"),
    "attention_factor": (1.0, 0.5, 0, -1, float("nan"), None, "1"),
    "beta_fast": (32, 1, 0, -1, float("nan"), None),
    "beta_slow": (1, 64, 0, -1, float("nan"), None),
    "low_freq_factor": (1.0, 4.0, 0, -1, None),
    "high_freq_factor": (4.0, 1.0, 0, -1, None),
    "short_factor": ([1.0] * 2, [1.0] * 4, [0.0] * 2, [], [-1.0, 1.0], None, "a"),
    "long_factor": ([1.0] * 2, [1.0] * 4, [2.0] * 4, [], ["a"], None),
    "mscale": (1.0, 0, -1, None),
}
# A configuration may be made before its vocabulary is known, so that models alone compare these with it.
CHECKED_BY_MODELS = ("pad_token_id", "decoder_start_token_id", "forced_eos_token_id")
# A model of more parameters would not fit into the time or the memory; then only the configuration is made.
LARGEST = 20_000_000
SIZES = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "head_dim")
SIZES += ("max_position_embeddings", "mem_len", "conv_kernel_size", "compose_hidden_size", "mgate_dim")
SIZES += ("decoder_layers", "num_channels", "representation_size", "num_register_tokens", "local_attention")


def generate(random: Random) -> Case:
    family = random.choice([name for name in SMALL if name != "shared"])
    own = own_fields(family)
    fields = {}
    for _ in range(random.choice((1, 1, 1, 2, 3))):
        name = random.choice(own)
        fields[name] = random_rope(random) if name == "rope_parameters" else random_value(random, name)
    return {"class": family, "fields": fields}


def own_fields(family: str) -> list[str]:
    """The fields that our classes document; those of every Transformers configuration are not ours."""
    inherited = {field.name for field in dataclasses.fields(PreTrainedConfig)}
    tokens = {"pad_token_id", "bos_token_id", "eos_token_id"}
    names = [field.name for field in dataclasses.fields(getattr(dynattn, f"{family}Config"))]
    return sorted((set(names) - inherited) | (set(names) & tokens)) + ["rope_parameters"] * 4 * (family in ROTATING)


def random_value(random: Random, name: str) -> Any:
    if name == "layer_types":
        kinds = ("sliding_attention", "full_attention", "chunked_attention", None, 1)
        return [random.choice(kinds[: random.choice((2, 5))]) for _ in range(random.choice((0, 1, 2, 2, 3)))]
    if name in PAIRS and random.random() < 0.4:
        return [random.choice((*NUMBERS, 4, 8, 12, None)) for _ in range(random.choice((1, 2, 2, 2, 3)))]
    if name.endswith("_act"):
        return random.choice(
            ("relu", "gelu", "silu", "relu2", "gelu_pytorch_tanh", "tanh", "no-such", "", "GELU", 3, None)
        )
    return random.choice(NUMBERS) if random.random() < 0.75 else random.choice(OTHERS)


def random_rope(random: Random) -> Any:
    if random.random() < 0.1:
        return random.choice(OTHERS)
    one = {"rope_type": random.choice(ROPE_TYPES)}
    for name in random.sample(sorted(ROPE_FIELDS), random.randint(0, 6)):
        one[name] = random.choice(ROPE_FIELDS[name])
    if random.random() < 0.2:
        return {
            kind: random.choice((one, {"rope_type": "default"})) for kind in ("full_attention", "sliding_attention")
        }
    return one


def check(case: Case) -> None:
    config_class = getattr(dynattn, f"{case['class']}Config")
    # Fields that travel to JSON keep their value but not the identity of the case.
    known = {field.name for field in dataclasses.fields(config_class)}
    shared = {name: value for name, value in SMALL["shared"].items() if name in known}
    fields = {**shared, **SMALL[case["class"]], **case["fields"]}
    changed = ", ".join(f"{name}={value!r}"[:60] for name, value in case["fields"].items())
    try:
        config = config_class(**fields)
    except (ValueError, StrictDataclassError) as error:
        expect_named(case, error, changed)
        return
    except Exception as error:
        raise FindingError(f"{case['class']} is not refused properly: {one_line(error)} | {changed}") from error
    if not fits(config):
        return
    try:
        run(config, case["class"])
    except ValueError as error:
        expect(
            any(name in str(error) for name in CHECKED_BY_MODELS),
            f"{case['class']} accepted, then fails: {one_line(error)} | {changed}",
        )
        expect_named(case, error, changed)
    except FindingError as error:
        raise FindingError(f"{case['class']} accepted, then {error} | {changed}") from error
    except Exception as error:
        raise FindingError(f"{case['class']} accepted, then fails: {one_line(error)} | {changed}") from error


def expect_named(case: Case, error: Exception, changed: str) -> None:
    """A refusal says which of the fields in `changed` it is about."""
    named = [name for name in case["fields"] if any(part in str(error) for part in aliases(name, case))]
    expect(named, f"{case['class']}: refused without naming the field: {one_line(error)} | {changed}")


def aliases(name: str, case: Case) -> list[str]:
    """What a message may call a field: rotary parameters also by their own names."""
    rotary = case["fields"].get("rope_parameters")
    inner = list(rotary) if name == "rope_parameters" and isinstance(rotary, dict) else []
    return [name, *(["rope", *inner] if name == "rope_parameters" else [])]


def fits(config: PreTrainedConfig) -> bool:
    """Whether a model of this size can be made in a moment."""
    sizes = [abs(size) for name in SIZES if isinstance(size := getattr(config, name, None), int | float)]
    sizes += [size for name in ("image_shape", "patch_shape") for size in getattr(config, name, ())]
    if not all(math.isfinite(size) for size in sizes) or max(sizes) > 10**5:
        return False
    layers, hidden = config.num_hidden_layers, config.hidden_size
    heads = (config.num_attention_heads or 1) * (getattr(config, "head_dim", None) or 1)
    layers = max(layers, getattr(config, "decoder_layers", None) or 0)
    wide = max(hidden, heads, config.intermediate_size, getattr(config, "vocab_size", 1), 1)
    if hasattr(config, "grid"):
        (rows, columns), pixels = config.grid, math.prod(config.image_shape) * config.num_channels
        patches = rows * columns + config.num_prefix_tokens
        # Attention maps are the largest tensors, unless a patch holds many pixels.
        wide = max(wide, pixels, math.prod(config.patch_shape) * config.num_channels, patches**2 * heads // hidden)
    return max(layers, 1) * wide * max(hidden, 1) * 10 < LARGEST


def run(config: PreTrainedConfig, family: str) -> None:
    """A model is made, gives finite logits, and its configuration survives a file."""
    torch.manual_seed(0)
    known = next(one for one in FAMILIES.values() if one.prefix == family)
    model = known.load_model_class(known.main_auto_class)(config).eval()
    with torch.no_grad():
        logits = model(**random_inputs(config)).logits
    expect(logits.isfinite().all(), "logits are not finite")
    with tempfile.TemporaryDirectory(prefix="dynattn-fuzz-") as folder:
        config.save_pretrained(folder)
        again = AutoConfig.from_pretrained(folder).to_dict()
    volatile = ("transformers_version", "_name_or_path")
    before, after = ({k: v for k, v in d.items() if k not in volatile} for d in (config.to_dict(), again))
    # As text, in which NaN equals NaN; files sort the keys of dictionaries.
    texts = [json.dumps(fields, sort_keys=True, default=repr) for fields in (before, after)]
    expect(texts[0] == texts[1], "the saved configuration is another")


def random_inputs(config: PreTrainedConfig) -> dict[str, torch.Tensor]:
    """Images, or tokens, for an encoder-decoder of a source and a target."""
    if hasattr(config, "image_shape"):
        return {"pixel_values": torch.randn(2, config.num_channels, *config.image_shape)}
    limit = config.max_position_embeddings if config.is_encoder_decoder else 7
    rows = max(1, min(config.vocab_size, 31))
    source, target = (torch.randint(0, rows, (2, min(length, limit))) for length in (7, 5))
    return {"input_ids": source, **({"decoder_input_ids": target} if config.is_encoder_decoder else {})}


KIND = Kind("configurations", generate, check, fast=40, seconds=30, batch=150)
