"""Models of Transformers that are no decoders, with heads composed in place: are they saved and trained well?

python -m tests.fuzz.model_classes --record FILE.json [CLASS ...]
"""

import inspect
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import PreTrainedConfig
from transformers.models.auto import modeling_auto

from dynattn import with_composed_heads
from dynattn.families import FAMILIES

from .decoder_types import are_near, fields_of, first_line, limited, report, saved_and_loaded, start, strengthened

VOCABULARY, TOKENS, TARGETS, IMAGE, BINS, FRAMES, SAMPLES = 97, 12, 6, 32, 16, 60, 2000
LARGEST = 60_000_000  # parameters; configurations without the fields below make models of their usual size
WIDTHS = ("hidden_size", "d_model", "embed_dim", "dim", "n_embd", "embedding_size", "projection_dim")
INNER = ("intermediate_size", "ffn_dim", "encoder_ffn_dim", "decoder_ffn_dim", "d_ff", "hidden_dim", "mlp_dim")
LAYERS = ("num_hidden_layers", "encoder_layers", "decoder_layers", "num_layers", "n_layers", "n_layer")
LAYERS += ("num_decoder_layers", "decoder_num_hidden_layers")
HEADS = ("num_attention_heads", "encoder_attention_heads", "decoder_attention_heads", "num_heads", "n_heads", "n_head")
DROPPED = ("attention_dropout", "attention_probs_dropout_prob", "attn_pdrop", "dropout", "hidden_dropout_prob")
DROPPED += ("activation_dropout", "dropout_rate", "classifier_dropout", "hidden_dropout", "drop_path_rate")
DROPPED += ("layerdrop", "encoder_layerdrop", "decoder_layerdrop", "mask_time_prob", "feat_proj_dropout")
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    **dict.fromkeys((*WIDTHS, "decoder_hidden_size", "encoder_hidden_size"), 32),
    **dict.fromkeys(INNER, 48),
    **dict.fromkeys(LAYERS, 2),
    **dict.fromkeys((*HEADS, "decoder_num_attention_heads", "num_key_value_heads"), 4),
    **dict.fromkeys(DROPPED, 0.0),
    **dict.fromkeys(("d_kv", "head_dim", "patch_size"), 8),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "max_target_positions"), 64),
    **dict.fromkeys(("num_experts", "num_local_experts"), 4),
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "image_size": IMAGE,
    "num_mel_bins": BINS,
    "max_source_positions": FRAMES // 2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 1,
}
CHECKS = ("files of the plain model", "files", "gradient checkpointing")
RECORD = {
    "command": "python -m tests.fuzz.model_classes",
    "what": "small random models of the classes that Transformers' Auto classes know, but that for decoders, with "
    "heads composed in place: outputs of plain models against those after they were loaded with composed heads; "
    "outputs before models were saved and loaded against those after; gradients with checkpointing against those "
    "without",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Checks every class, or those that are named, and returns 0 if no outputs differ."""
    given = start(__doc__, "classes", argv)
    rows = {name: check_class(name) for name in given.classes or class_names()}
    report(RECORD, "classes", rows, given.record)
    return 1 if any("different" in row.values() for row in rows.values()) else 0


def class_names() -> list[str]:
    """The first class of each model type in each mapping of the Auto classes, but that of decoders."""
    mappings = [name for name in dir(modeling_auto) if name.endswith("MAPPING_NAMES") and name.startswith("MODEL_")]
    found: dict[str, None] = {}
    for mapping in sorted(mappings):
        if "CAUSAL_LM" not in mapping:
            for kind, names in getattr(modeling_auto, mapping).items():
                if kind not in FAMILIES:
                    found[names if isinstance(names, str) else names[0]] = None
    return list(found)


def check_class(name: str) -> dict[str, str]:
    """What each check finds of a class: `equal`, `different`, or why there is none."""
    print(name, file=sys.stderr, flush=True)
    try:
        return limited(lambda: checks_of(name))
    except Exception as error:  # models are refused, or cannot be made so small, in many ways
        return dict.fromkeys(CHECKS, first_line(error))


def checks_of(name: str) -> dict[str, str]:
    """The outcome of all checks of a model that can be called with and without composed heads."""
    plain = small_model(getattr(transformers, name))
    given = inputs_of(plain)
    expected = outputs(plain, given)
    if not expected:
        raise ValueError("it has no outputs for these inputs")
    model = saved_and_loaded(plain, with_composed_heads(type(plain), compose_rank=2, dropout=0.0))
    found = {"files of the plain model": verdict(outputs(model, given), expected)}
    strengthened(model)
    found["files"] = verdict(outputs(saved_and_loaded(model, type(model)), given), outputs(model, given))
    found["gradient checkpointing"] = checkpointed(model, given)
    if found["gradient checkpointing"] == "different" == checkpointed(plain, given):
        found["gradient checkpointing"] = "the plain model fails, too"
    return found


def checkpointed(model: Any, given: dict[str, Tensor]) -> str:
    """Whether gradients with checkpointing are those without, or why there are none."""
    whole = gradients(model, given)
    try:
        model.gradient_checkpointing_enable()
        return verdict(gradients(model, given), whole)
    except Exception as error:  # such as models that do not support it
        return first_line(error)


def small_model(model_class: Any) -> Any:
    """A model whose weights are large enough that outputs depend on all of them, in inference."""
    config = model_class.config_class(**fields_of(model_class.config_class, SIZES))
    for part in parts_of(config):
        for field, value in fields_of(type(part), SIZES).items():
            setattr(part, field, value)
    torch.manual_seed(0)
    model = model_class(config)
    if (size := model.num_parameters()) > LARGEST:
        raise ValueError(f"it has {size:,} parameters; give its configuration the names of its sizes")
    for weight in model.parameters():
        if weight.dim() > 1:
            torch.nn.init.normal_(weight, std=0.15)
    return model.eval()


def parts_of(config: PreTrainedConfig) -> Iterator[PreTrainedConfig]:
    """The configurations within one, such as those for texts and for pictures."""
    for part in vars(config).values():
        if isinstance(part, PreTrainedConfig):
            yield part
            yield from parts_of(part)


def inputs_of(model: Any) -> dict[str, Tensor]:
    """Random inputs of two rows: texts, pictures, videos or sound, as `forward` reads them."""
    generator = torch.Generator().manual_seed(1)
    size = getattr(model.config, "image_size", None) or IMAGE
    height, width = (size, size) if isinstance(size, int) else size
    pictures = torch.randn(2, getattr(model.config, "num_channels", None) or 3, height, width, generator=generator)
    if "Video" in type(model).__name__:
        pictures = pictures[:, None].repeat(1, getattr(model.config, "num_frames", 2), 1, 1, 1)
    tokens = torch.randint(3, VOCABULARY, (2, TOKENS), generator=generator)
    possible = {
        "pixel_values": pictures,
        "input_features": torch.randn(2, BINS, FRAMES, generator=generator),
        "input_values": torch.randn(2, SAMPLES, generator=generator),
        "input_ids": tokens,
        "decoder_input_ids": tokens[:, :TARGETS],
    }
    if model.main_input_name not in ("input_ids", "pixel_values"):
        del possible["input_ids"]
    known = inspect.signature(model.forward).parameters
    return {name: value for name, value in possible.items() if name in known}


@torch.no_grad()
def outputs(model: Any, given: dict[str, Tensor]) -> dict[str, Tensor]:
    """All floating-point tensors that a call returns, by their place; what is random has one seed."""
    torch.manual_seed(0)
    return floating(model(**given))


def floating(output: Any) -> dict[str, Tensor]:
    """The floating-point tensors of an output."""
    values = enumerate(output.to_tuple() if hasattr(output, "to_tuple") else output)
    return {str(place): value for place, value in values if isinstance(value, Tensor) and value.is_floating_point()}


def gradients(model: Any, given: dict[str, Tensor]) -> dict[str, Tensor]:
    """Gradients in training of all weights that have one, of the mean size of all outputs."""
    torch.manual_seed(0)
    model.train()
    model.zero_grad()
    sizes = [one.double().abs().mean() for one in floating(model(**given)).values() if one.requires_grad]
    torch.stack(sizes).sum().backward()
    model.eval()
    return {name: weight.grad.clone() for name, weight in model.named_parameters() if weight.grad is not None}


def verdict(found: dict[str, Tensor], expected: dict[str, Tensor]) -> str:
    """Whether tensors of the same names are the same but for rounding."""
    same = found.keys() == expected.keys() and all(near(found[name], expected[name]) for name in expected)
    return "equal" if same else "different"


def near(found: Tensor, expected: Tensor) -> bool:
    """Whether tensors are the same but for rounding, also where scores are infinite or there are none."""
    if found.shape != expected.shape or not expected.numel():
        return found.shape == expected.shape
    one, other = (tensor.nan_to_num() for tensor in (found, expected))
    return are_near(one, other) or bool((one - other).abs().max() < 1e-6)


if __name__ == "__main__":
    sys.exit(main())
