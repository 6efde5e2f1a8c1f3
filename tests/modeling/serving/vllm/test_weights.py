"""Where the weights of models that Transformers loads come from."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from huggingface_hub import constants
from torch import nn
from transformers import AutoConfig, LlamaConfig, LlamaForCausalLM

from dynattn import with_composed_heads
from dynattn.modeling.serving.vllm.model import ComposedInPlaceForCausalLM

LLAMA = {"vocab_size": 97, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}


def test_weights_are_those_of_the_folder_for_downloads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's option `download_dir`, here a folder that holds the checkpoint already."""
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    downloaded = tmp_path / "models--some--llama"
    model, snapshot = with_composed_heads(LlamaForCausalLM)(LlamaConfig(**LLAMA)), downloaded / "snapshots" / "0"
    model.save_pretrained(snapshot)
    (downloaded / "refs").mkdir()
    (downloaded / "refs" / "main").write_text("0", encoding="utf-8")
    served = ComposedInPlaceForCausalLM.__new__(ComposedInPlaceForCausalLM)
    nn.Module.__init__(served)
    served.processes, served.download_folder = 1, str(tmp_path)
    config = AutoConfig.from_pretrained(snapshot)
    options = SimpleNamespace(model="some/llama", revision=None, hf_config=config, dtype=torch.float32)
    loaded = served.load_decoder(options)
    assert all(torch.equal(tensor, loaded.state_dict()[name]) for name, tensor in model.state_dict().items())
