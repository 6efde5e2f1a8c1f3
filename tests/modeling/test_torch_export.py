"""`torch.export` of a model serves all lengths, whatever its position scheme reads from tables."""

from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from dynattn import DCFormerConfig, DCFormerForCausalLM, RCMHAConfig, RCMHAForCausalLM

SMALL: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "initializer_range": 0.2,
}
WINDOW = 6


def dcformer(**fields: Any) -> PreTrainedModel:
    return DCFormerForCausalLM(DCFormerConfig(**SMALL, **fields, compose_init_scale=20.0, sliding_window=WINDOW))


def rcmha(**fields: Any) -> PreTrainedModel:
    return RCMHAForCausalLM(RCMHAConfig(**SMALL, **fields, mem_len=WINDOW - 1))


@pytest.mark.parametrize(
    "make",
    [
        pytest.param(lambda: dcformer(), id="dcformer-rope"),
        pytest.param(lambda: dcformer(position_scheme="alibi"), id="dcformer-alibi"),
        pytest.param(lambda: dcformer(position_gain="distance"), id="dcformer-gain"),
        pytest.param(lambda: rcmha(), id="rcmha"),
        pytest.param(lambda: rcmha(attention_type="mha", position_scheme="alibi"), id="rcmha-alibi"),
        pytest.param(lambda: rcmha(attention_type="mha", position_scheme="t5"), id="rcmha-t5"),
    ],
)
@torch.no_grad()
def test_an_exported_model_serves_all_lengths(make: Any) -> None:
    torch.manual_seed(1)
    model = make().eval()
    ids = torch.randint(1, 97, (2, 12))
    length = {1: torch.export.Dim("length", min=2, max=100)}
    shapes = {"input_ids": length, "attention_mask": length, "use_cache": None}
    given = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "use_cache": False}
    exported = torch.export.export(model, (), given, dynamic_shapes=shapes, strict=False).module()
    for tokens in (2, WINDOW - 1, WINDOW, 40, 100):
        ids = torch.randint(1, 97, (2, tokens))
        given = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "use_cache": False}
        given["attention_mask"][0, : tokens // 3] = 0
        seen = given["attention_mask"].bool()
        torch.testing.assert_close(exported(**given).logits[seen], model(**given).logits[seen], atol=1e-4, rtol=1e-4)
