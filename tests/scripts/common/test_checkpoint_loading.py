"""Which checkpoints predict the next token, and so can be scored."""

from typing import Any

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from dynattn.scripts.common.checkpoint_loading import reads_both_ways

HEADS = {"num_attention_heads": 2, "num_hidden_layers": 1}
SIZES = {
    "bert": {**HEADS, "hidden_size": 8, "intermediate_size": 8},
    "bert-generation": {**HEADS, "hidden_size": 8, "intermediate_size": 8},
    "cpmant": {**HEADS, "hidden_size": 8, "dim_head": 4, "dim_ff": 8},
    "gpt2": {"n_embd": 8, "n_head": 2, "n_layer": 1},
    "xlm": {"emb_dim": 8, "n_heads": 2, "n_layers": 1},
    "xlnet": {"d_model": 8, "n_head": 2, "n_layer": 1, "d_inner": 8},
}


@pytest.mark.parametrize(
    ("model_type", "fields"),
    [
        *((model_type, {}) for model_type in SIZES),
        ("bert", {"is_decoder": True}),
        ("bert-generation", {"is_decoder": True}),
        ("xlm", {"causal": True}),
        ("xlnet", {"attn_type": "uni"}),
    ],
    ids=str,
)
@torch.no_grad()
def test_models_whose_logits_depend_on_later_tokens_are_known(model_type: str, fields: dict[str, Any]) -> None:
    config = CONFIG_MAPPING[model_type](vocab_size=20, **SIZES[model_type], **fields)
    model = AutoModelForCausalLM.from_config(config).eval()
    texts = torch.tensor([[5, 6, 7, 8], [5, 6, 7, 9]])
    first, second = (model(input_ids=text[None]).logits[0, :3] for text in texts)
    assert reads_both_ways(config) == (not torch.equal(first, second))
