"""DCBart: BART, mBART and Marian with composition off, one model in all ways of running, caches, and bad inputs."""

import copy
from typing import Any

import pytest
import torch
from cases.models import assert_same_gradients
from cases.seq2seq import IDENTITY, OFF, PARENTS, SMALL, THEIRS, make_model, make_pair, random_tokens, rename, whole
from cases.seq2seq import in_steps as one_by_one
from huggingface_hub.errors import StrictDataclassError
from torch import Tensor
from transformers import BartConfig
from transformers.models.bart.modeling_bart import BartLearnedPositionalEmbedding

from dynattn import DCBartConfig, DCBartForConditionalGeneration
from dynattn.modeling.caches.composed_cache import ComposedLayerMixin

LENGTHS = [(11, 5), (5, 13)]  # of source and target


def assert_same(ours: Tensor, theirs: Tensor) -> None:
    torch.testing.assert_close(ours, theirs, atol=1e-5 * float(theirs.abs().max()), rtol=0)


EQUALITIES = [("eager", OFF), ("sdpa", OFF), ("chunked", OFF), ("eager", IDENTITY), ("chunked", IDENTITY)]


@pytest.mark.parametrize(("source_length", "target_length"), LENGTHS)
@pytest.mark.parametrize(("implementation", "composition"), EQUALITIES, ids=str)
@pytest.mark.parametrize("name", PARENTS)
@torch.no_grad()
def test_the_parents_logits(
    name: str, implementation: str, composition: dict[str, Any], source_length: int, target_length: int
) -> None:
    parent, model = make_pair(name, implementation, **composition)
    source, target = random_tokens(3, source_length), random_tokens(3, target_length)
    mask = torch.ones_like(source)
    mask[1, -2:] = 0
    assert_same(whole(model, source, target, mask), whole(parent, source, target, mask))
    assert_same(one_by_one(model, source, target), whole(parent, source, target))


@pytest.mark.parametrize("name", PARENTS)
@pytest.mark.parametrize(("implementation", "composition"), [("sdpa", OFF), ("chunked", IDENTITY)], ids=str)
def test_the_parents_loss_and_gradients(name: str, implementation: str, composition: dict[str, Any]) -> None:
    parent, model = (net.double() for net in make_pair(name, implementation, **composition))
    source, labels = random_tokens(2, 7), random_tokens(2, 12)
    target = random_tokens(2, 12) if name == "mbart" else None  # which shifts labels in a way of its own
    labels[1, -4:] = -100
    losses = []
    for net in (parent, model):
        losses.append(net(input_ids=source, labels=labels, decoder_input_ids=target).loss)
        losses[-1].backward()
    assert losses[0].item() == pytest.approx(losses[1].item(), abs=1e-6)
    learned = {rename(key): p.grad for key, p in parent.named_parameters() if p.requires_grad}  # but Marian's sinusoids
    ours = dict(model.named_parameters())
    assert_same_gradients([ours[key].grad for key in learned], list(learned.values()))


@pytest.mark.parametrize("name", PARENTS)
@pytest.mark.parametrize("beams", [1, 3])
def test_the_parents_translations(name: str, beams: int) -> None:
    parent, model = make_pair(name, "chunked", **IDENTITY)
    source = random_tokens(2, 9)
    texts = [net.generate(source, num_beams=beams, max_new_tokens=12, do_sample=False) for net in (parent, model)]
    assert torch.equal(*texts)


@torch.no_grad()
def test_both_sides_of_cross_attention_matter() -> None:
    model = make_model()
    source, target = random_tokens(1, 7), random_tokens(1, 5)
    expected = whole(model, source, target)
    for generator in ("composition", "key_composition"):
        changed = copy.deepcopy(model)
        module = getattr(changed.model.decoder.layers[0].cross_attn, generator)
        module.factor_weight.zero_()
        module.gate_weight.zero_()
        assert (whole(changed, source, target) - expected).abs().max() > 0.01


def test_plain_models_use_plain_caches() -> None:
    output = make_model(compose_key_wise=False)(
        input_ids=random_tokens(1, 5), decoder_input_ids=random_tokens(1, 2), use_cache=True
    )
    cache = output.past_key_values
    for part in (cache.self_attention_cache, cache.cross_attention_cache):
        assert not any(isinstance(layer, ComposedLayerMixin) for layer in part.layers)


def test_new_tokens_have_no_bias() -> None:
    model = make_model()
    model.final_logits_bias.fill_(1.0)
    model.resize_token_embeddings(90)
    assert model.final_logits_bias[0, :83].eq(1).all() and model.final_logits_bias[0, 83:].eq(0).all()
    assert whole(model, random_tokens(1, 4), random_tokens(1, 3)).shape[-1] == 90
    assert model.model.encoder.embed_tokens.weight is model.lm_head.weight


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"position_embedding_type": "rotary"}, "position_embedding_type 'rotary' does not exist"),
        ({"position_offset": 2}, r"position_offset \(2\) is a row of learned positions; sinusoidal ones begin at 0"),
        ({"hidden_size": 45, "num_attention_heads": 3}, r"hidden_size \(45\) must be even: sinusoidal positions"),
        ({"decoder_layers": 0}, r"decoder_layers \(0\) must be at least 1"),
        ({"activation_dropout": 1.0}, r"activation_dropout \(1.0\) must be at least 0 and smaller than 1"),
        ({"attention_dropout": 0.1}, r"attention_dropout \(0.1\) must be 0 where heads are composed"),
    ],
    ids=str,
)
def test_bad_configurations_say_what_is_wrong(fields: dict[str, Any], message: str) -> None:
    with pytest.raises((ValueError, StrictDataclassError), match=message):
        DCBartConfig(**{**SMALL, **fields})


@pytest.mark.parametrize("place", ["encoder", "decoder", "cross"])
def test_heads_are_composed_as_long_as_one_place_composes_them(place: str) -> None:
    nowhere = {"compose_encoder": False, "compose_decoder": False, "compose_cross": False}
    assert DCBartConfig(**SMALL, **{**nowhere, f"compose_{place}": True}).composes
    plain = DCBartConfig(**SMALL, **nowhere, attention_dropout=0.1)
    assert not plain.composes and not plain.composes_in(place)


def test_the_decoder_may_have_another_depth() -> None:
    assert DCBartConfig(num_hidden_layers=4).decoder_layers == 4
    assert THEIRS["decoder_layers"] == 3 and len(make_model().model.decoder.layers) == 3


def test_the_published_shape_is_that_of_bart() -> None:
    ours, theirs = DCBartConfig.from_size("large"), BartConfig()
    names = {"hidden_size": "d_model", "num_hidden_layers": "encoder_layers", "decoder_layers": "decoder_layers"}
    names |= {"num_attention_heads": "encoder_attention_heads", "intermediate_size": "encoder_ffn_dim"}
    same = ("vocab_size", "max_position_embeddings", "pad_token_id", "bos_token_id", "eos_token_id")
    names |= {name: name for name in (*same, "decoder_start_token_id", "forced_eos_token_id", "scale_embedding")}
    assert [getattr(ours, name) for name in names] == [getattr(theirs, name) for name in names.values()]
    assert ours.position_offset == BartLearnedPositionalEmbedding(4, 8).offset
    assert ours.normalize_embedding and not ours.normalize_before and ours.position_embedding_type == "learned"


def test_each_dropout_of_the_configuration_is_in_its_place() -> None:
    model = make_model(hidden_dropout=0.1, activation_dropout=0.2).model
    for stack in (model.encoder, model.decoder):
        assert stack.dropout.p == 0.1
        assert {(layer.dropout.p, layer.mlp.dropout.p) for layer in stack.layers} == {(0.1, 0.2)}


def test_positions_in_single_precision_do_not_widen_half_precision() -> None:
    model = make_model().bfloat16()
    model.model.encoder.embed_positions.float()  # as FSDP2 leaves it, which casts parameters but not buffers
    assert model.model.encoder(random_tokens(1, 4)).last_hidden_state.dtype == torch.bfloat16


def test_heads_are_subtracted_only_where_they_are_composed() -> None:
    config = DCBartConfig.from_size("tiny", differential_heads=True, compose_encoder=False)
    model = DCBartForConditionalGeneration(config)
    assert model.model.encoder.layers[0].self_attn.differential is None
    assert model.model.decoder.layers[0].self_attn.differential is not None


def test_fewer_tokens_keep_their_bias() -> None:
    model = DCBartForConditionalGeneration(DCBartConfig.from_size("tiny"))
    model.final_logits_bias.normal_()
    kept = model.final_logits_bias[:, :2000].clone()
    model.resize_token_embeddings(2000)
    assert torch.equal(model.final_logits_bias, kept)


@pytest.mark.slow
@torch.no_grad()
def test_a_compiled_plain_model_gives_the_logits_of_one_that_is_not() -> None:
    model, source, target = make_model(**OFF), random_tokens(2, 5), random_tokens(2, 4)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(whole(compiled, source, target), whole(model, source, target), atol=1e-5, rtol=1e-5)
