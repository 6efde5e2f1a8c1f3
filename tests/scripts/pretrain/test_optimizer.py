"""Which weights decay."""

import pytest
from transformers import LlamaConfig, LlamaForCausalLM

from dynattn.scripts.pretrain import PretrainArguments
from dynattn.scripts.pretrain.optimizer import build_optimizer


@pytest.mark.parametrize("tied", [True, False])
def test_only_matrices_that_are_no_embeddings_decay(tied: bool):
    config = LlamaConfig(
        vocab_size=8, hidden_size=4, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1,
        tie_word_embeddings=tied, attention_bias=True,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    optimizer = build_optimizer(model, PretrainArguments(output="x", weight_decay=0.3))
    names = {id(weight): name for name, weight in model.named_parameters()}
    decayed, rest = ({names[id(weight)] for weight in group["params"]} for group in optimizer.param_groups)
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.3, 0.0]
    assert decayed | rest == set(names.values())
    assert all(name.endswith("bias") or "norm" in name or "embed" in name for name in rest)
    assert ("lm_head.weight" in decayed) == (not tied)
