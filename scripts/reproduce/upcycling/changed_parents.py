"""What parents become before their training goes on: wider, or composed in place. Neither changes logits."""

import shutil
from copy import deepcopy
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from ...common.atomic_folder import staged_folder
from ...common.checkpoint_files import TOKENIZER_PATTERNS, matching_files
from ...common.errors import UserError
from ..model_training import matched_width

# How many tokens are compared, and by how much their logits may differ, relative to the largest one. Products of
# matrices of other widths are rounded differently, most in half precision.
PROBE, TOLERANCE = 64, 0.02


def widen_mlps(source: Path, destination: Path, like: Path, seed: int) -> None:
    """Writes the language model of `source`, with its tokenizer, with about as many parameters as that of `like`.

    Its logits stay the same: new hidden units begin with random weights from `seed`, and nothing reads them yet.

    Raises:
        UserError: the width of its MLPs is no field of its configuration, or the logits differ.
    """
    parent = AutoModelForCausalLM.from_pretrained(source)
    config = deepcopy(parent.config)
    if getattr(config, "intermediate_size", None) is None:
        raise UserError(
            f"the configuration of {source} ({config.model_type}) has no intermediate_size to widen; give --arms "
            "without wide"
        )
    make = AutoModelForCausalLM.from_config
    config.intermediate_size = matched_width(make, AutoConfig.from_pretrained(like), parent.config)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        wider = make(config)
    _copy_weights(parent, wider)
    check_same_logits(parent, wider)
    _save(wider, source, destination)


def compose_in_place(source: Path, destination: Path, groups: int, seed: int) -> None:
    """Writes the language model of `source`, with its tokenizer, with heads composed in so many groups.

    Args:
        seed: of the weights of the composition.

    Raises:
        UserError: the logits differ from those without composition.
    """
    config = AutoConfig.from_pretrained(source)
    config.composed_heads = {} if groups == 1 else {"compose_groups": groups}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        composed = AutoModelForCausalLM.from_pretrained(source, config=config)
    check_same_logits(AutoModelForCausalLM.from_pretrained(source), composed)
    _save(composed, source, destination)


def _save(model: PreTrainedModel, source: Path, destination: Path) -> None:
    """Writes a model, and the tokenizer of `source`."""
    with staged_folder(destination) as folder:
        model.save_pretrained(folder)
        for name in matching_files(source, TOKENIZER_PATTERNS):
            shutil.copyfile(source / name, folder / name)


@torch.no_grad()
def check_same_logits(parent: PreTrainedModel, changed: PreTrainedModel) -> None:
    """Raises UserError unless both models have the same logits for some tokens."""
    tokens = torch.arange(PROBE).unsqueeze(0) % parent.config.vocab_size
    expected, logits = (model.eval()(tokens).logits.float() for model in (parent, changed))
    error, scale = (expected - logits).abs().max().item(), expected.abs().max().item()
    if not error <= TOLERANCE * scale:
        raise UserError(
            f"logits of {type(changed).__name__} differ from those of {type(parent).__name__} by {error:.2g} (limit "
            f"{TOLERANCE * scale:.2g}), so what they learn does not compare; give another parent or other --arms"
        )


@torch.no_grad()
def _copy_weights(parent: PreTrainedModel, wider: PreTrainedModel) -> None:
    """Gives `wider` the parent's weights, in the first rows and columns of what is larger."""
    weights = wider.state_dict()
    for name, weight in parent.state_dict().items():
        target = weights[name]
        if target.shape[-1] != weight.shape[-1]:  # `[..., hidden, width]`: what reads the hidden units
            target.zero_()
        if "gate_up_proj" in name:  # `[..., 2 * width, hidden]`: gates first, then what they scale
            target, weight = (each.unflatten(-2, (2, -1)) for each in (target, weight))
        target[tuple(slice(size) for size in weight.shape)] = weight
