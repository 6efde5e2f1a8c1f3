"""A parent with wider MLPs: the plain model with as many parameters as composition adds."""

import shutil
from copy import deepcopy
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from ...common.atomic_folder import staged_folder
from ...common.checkpoint_files import TOKENIZER_PATTERNS, matching_files
from ..model_training import matched_width


def widen_mlps(source: Path, destination: Path, like: Path, seed: int) -> None:
    """Writes the GPT-NeoX of `source`, with its tokenizer, with about as many parameters as the model of `like`.

    Its logits stay the same: new hidden units begin with random weights from `seed`, and nothing reads them yet.
    """
    parent = AutoModelForCausalLM.from_pretrained(source)
    config = deepcopy(parent.config)
    make = AutoModelForCausalLM.from_config
    config.intermediate_size = matched_width(make, AutoConfig.from_pretrained(like), parent.config)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        wider = make(config)
    _copy_weights(parent, wider)
    with staged_folder(destination) as folder:
        wider.save_pretrained(folder)
        for name in matching_files(source, TOKENIZER_PATTERNS):
            shutil.copyfile(source / name, folder / name)


@torch.no_grad()
def _copy_weights(parent: PreTrainedModel, wider: PreTrainedModel) -> None:
    """Gives `wider` the parent's weights, in the first rows and columns of what is larger."""
    weights = wider.state_dict()
    for name, weight in parent.state_dict().items():
        if name.endswith("dense_4h_to_h.weight"):
            weights[name].zero_()
        weights[name][tuple(slice(size) for size in weight.shape)] = weight
