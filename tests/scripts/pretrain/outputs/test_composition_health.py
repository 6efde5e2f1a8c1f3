"""What a run measures of each layer's composition."""

from typing import Any

import pytest
import torch
from torch import Tensor

from dynattn import DCFormerConfig, DCFormerForCausalLM, DCModernBertConfig, DCModernBertForMaskedLM
from dynattn.scripts.common.composition_measures import head_similarity
from dynattn.scripts.inspect.measures import measure_layer, observe
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


def test_a_composition_that_begins_as_the_identity_has_no_size():
    model, item = make(compose_init_scale=0.0)
    found = measure_health(model, lambda batch: model(**batch, use_cache=False), item)
    assert all(found[name] == 0 for name in found if name.endswith(("low_rank", "query_gate", "key_gate", "share")))
    before, after = ([v for n, v in sorted(found.items()) if n.endswith(when)] for when in ("before", "after"))
    assert before == after


@pytest.mark.parametrize(
    "fields",
    [
        {"position_scheme": "alibi", "compose_position_bias": True, "position_gain": "distance"},
        {"position_scheme": "carope"},
    ],
    ids=lambda fields: fields["position_scheme"],
)
def test_maps_are_those_that_the_model_itself_attends_with(fields: dict[str, Any]):
    model, item = make(**fields, compose_init_scale=3.0)
    if model.model.position_gain is not None:
        torch.nn.init.uniform_(model.model.position_gain.weight, 0.5, 1.5)
    found = measure_health(model, lambda batch: model(**batch, use_cache=False), item)
    observed, _ = observe(model, item["input_ids"][None])
    for index, layer in enumerate(observed):
        for stage, measured in measure_layer(layer).items():
            for when, expected in zip(("before", "after"), measured["similarity"], strict=True):
                assert found[f"{index:02}.{stage}.similarity_{when}"] == pytest.approx(expected, abs=1e-4)


def test_documents_of_a_packed_sequence_are_measured_apart():
    """Two copies of a document have the same maps, so the similarity of heads is that of one copy."""
    model, item = make(compose_init_scale=3.0)
    run, twice = (lambda batch: model(**batch, use_cache=False)), item["input_ids"].repeat(2)
    packed = measure_health(model, run, {"input_ids": twice, "position_ids": torch.arange(40).repeat(2)})
    assert packed == pytest.approx(measure_health(model, run, item), rel=1e-4)
    assert packed != pytest.approx(measure_health(model, run, {"input_ids": twice}), rel=1e-2)


def test_an_encoder_is_measured_with_what_its_tokens_see():
    config = DCModernBertConfig.from_size("tiny", num_hidden_layers=2, local_attention=8, attn_implementation="eager")
    model, item = DCModernBertForMaskedLM(config).eval(), {"input_ids": torch.randint(3, 2048, (40,))}
    found = measure_health(model, lambda batch: model(**batch, use_cache=False), item)
    maps = model(item["input_ids"][None], output_attentions=True).attentions
    distance = (torch.arange(40)[:, None] - torch.arange(40)).abs()
    for layer, visible in enumerate((distance >= 0, distance <= 4)):
        expected = head_similarity(maps[layer][0].detach(), visible)
        assert abs(found[f"{layer:02}.post.similarity_after"] - expected) < 1e-5


def test_a_plain_model_has_no_health():
    model, item = make(compose_pre=False, compose_post=False)
    assert measure_health(model, lambda batch: model(**batch), item) == {}
