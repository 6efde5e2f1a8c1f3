"""What a run measures of each layer's composition."""

import torch
from torch import Tensor

from dynattn import DCFormerConfig, DCFormerForCausalLM
from dynattn.scripts.pretrain.outputs.composition_health import measure_health


def make(**changes: object) -> tuple[DCFormerForCausalLM, dict[str, Tensor]]:
    model = DCFormerForCausalLM(DCFormerConfig.from_size("tiny", vocab_size=64, **changes)).eval()
    return model, {"input_ids": torch.randint(64, (40,))}


def test_every_layer_of_a_model_is_measured():
    model, item = make()
    found = measure_health(model, lambda batch: model(**batch, use_cache=False), item)
    whats = {name.split(".", 2)[2] for name in found}
    terms = {"query_low_rank", "key_low_rank", "query_gate", "key_gate"}
    assert whats == {*terms, "gate_share", "similarity_before", "similarity_after"}
    assert len(found) == model.config.num_hidden_layers * 2 * len(whats)
    assert all(value == value for value in found.values())
    assert not any(module._forward_hooks for module in model.modules())


def test_a_composition_that_begins_as_the_identity_has_no_size():
    model, item = make(compose_init_scale=0.0)
    found = measure_health(model, lambda batch: model(**batch, use_cache=False), item)
    assert all(found[name] == 0 for name in found if name.endswith(("mix", "query_gate", "key_gate", "share")))
    before, after = ([v for n, v in sorted(found.items()) if n.endswith(when)] for when in ("before", "after"))
    assert before == after


def test_a_plain_model_has_no_health():
    model, item = make(compose_pre=False, compose_post=False)
    assert measure_health(model, lambda batch: model(**batch), item) == {}
