"""What every encoder-decoder does: ways of running that agree, generation, caches, losses, refusals."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from cases.models import assert_within_noise
from cases.seq2seq import KINDS, in_steps, make_model, random_tokens, whole
from torch import Tensor
from transformers import AutoModel, AutoModelForSeq2SeqLM, DynamicCache, PreTrainedModel, StaticCache
from transformers.cache_utils import EncoderDecoderCache
from transformers.modeling_outputs import BaseModelOutput, BaseModelOutputWithPooling

from dynattn.modeling.caches.names import cache_in
from dynattn.modeling.layers.head_composition import DynamicComposition

LENGTHS = [(11, 5), pytest.param(8, 8, marks=pytest.mark.slow), (5, 13)]  # of source and target
PLACES = ["encoder", "decoder", "cross"]


@pytest.mark.parametrize(("source_length", "target_length"), LENGTHS)
@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_all_ways_of_running_agree(kind: str, source_length: int, target_length: int) -> None:
    model = make_model(kind)
    source, target = random_tokens(3, source_length), random_tokens(3, target_length)
    plain = whole(model, source, target)
    exact = whole(copy.deepcopy(model).double(), source, target)
    static = EncoderDecoderCache(
        StaticCache(config=model.config, max_cache_len=target_length + 3),
        StaticCache(config=model.config, max_cache_len=source_length + 2),  # longer than the source
    )
    eager = type(model)._from_config(model.config, attn_implementation="eager").eval()
    eager.load_state_dict(model.state_dict())
    padded = torch.cat([source, torch.full((3, 4), 1)], dim=1)
    mask = (torch.arange(padded.shape[1]) < source_length).long().expand(3, -1)
    for logits in (
        in_steps(model, source, target),
        in_steps(model, source, target, first=3),
        in_steps(model, source, target, cache=static),
        whole(eager, source, target),
        whole(model, padded, target, mask),
        torch.cat([whole(model, *pair) for pair in zip(source.split(1), target.split(1), strict=True)]),
        whole(model, source, torch.cat([target, target], dim=1))[:, :target_length],
    ):
        assert_within_noise(logits, plain, exact)


@pytest.mark.parametrize("place", PLACES)
@torch.no_grad()
def test_each_attention_may_be_composed_alone(place: str) -> None:
    model = make_model(**{f"compose_{other}": other == place for other in ("encoder", "decoder", "cross")})
    source, target = random_tokens(2, 7), random_tokens(2, 9)
    names = [name for name, module in model.named_modules() if isinstance(module, DynamicComposition)]
    parts = {"encoder": "encoder.layers", "decoder": ".self_attn.", "cross": ".cross_attn."}
    assert names and all(parts[place] in name for name in names)
    plain = whole(model, source, target)
    assert_within_noise(in_steps(model, source, target), plain, whole(copy.deepcopy(model).double(), source, target))


def generated(model: PreTrainedModel, source: Tensor, **options: Any) -> Tensor:
    arguments = {"max_new_tokens": 14, "do_sample": False, "attention_mask": (source != 1).long()}
    torch.manual_seed(3)
    return model.generate(source, **{**arguments, **options})


@pytest.mark.parametrize(
    "options",
    [{}, {"num_beams": 4, "num_return_sequences": 3}, {"do_sample": True, "top_k": 20}],
    ids=["greedy", "beams", "sampled"],
)
@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("kind", ["dcbart", "rcmha", "mha"])
def test_generation_agrees_with_the_model_without_a_cache(kind: str, cache: str, options: dict[str, Any]) -> None:
    model = make_model(kind, tie_word_embeddings=False)  # a tied head repeats what it reads
    source = random_tokens(2, 11)
    source[1, -4:] = 1
    expected = generated(model, source, use_cache=False, **options)
    assert torch.equal(generated(model, source, cache_implementation=cache, **options), expected)
    assert expected.unique().numel() >= 3


@torch.no_grad()
def test_the_source_is_read_once() -> None:
    """After the first call keys, values and factors of the source come from the cache, whatever the encoder gives."""
    model = make_model()
    source, target = random_tokens(2, 7), random_tokens(2, 3)
    encoded = model.get_encoder()(input_ids=source)
    first = model(encoder_outputs=encoded, decoder_input_ids=target[:, :2], use_cache=True)
    cache = first.past_key_values
    heads, width = model.config.num_attention_heads, 48 // 4
    for layer in cache.cross_attention_cache.layers:
        assert layer.keys.shape == (2, heads, 7, width) and layer.factors.keys.shape == (2, 2 * 5, 7, heads)
    nothing = BaseModelOutput(last_hidden_state=torch.zeros_like(encoded.last_hidden_state))
    second = model(encoder_outputs=nothing, decoder_input_ids=target[:, 2:], past_key_values=cache)
    torch.testing.assert_close(second.logits[:, 0], whole(model, source, target)[:, 2], atol=1e-4, rtol=0)


@torch.no_grad()
def test_any_output_of_an_encoder_serves() -> None:
    model = make_model()
    source, target = random_tokens(2, 7), random_tokens(2, 3)
    states = model.get_encoder()(input_ids=source).last_hidden_state
    expected = whole(model, source, target)
    for encoded in ((states,), BaseModelOutputWithPooling(last_hidden_state=states)):
        output = model(encoder_outputs=encoded, decoder_input_ids=target)
        torch.testing.assert_close(output.logits, expected, atol=1e-5, rtol=0)
        assert output.encoder_last_hidden_state is states


@pytest.mark.parametrize("kind", ["dcbart", "rcmha", "rmha"])
@torch.no_grad()
def test_caches_are_reordered_with_what_they_keep(kind: str) -> None:
    model, order = make_model(kind), torch.tensor([2, 0, 0])
    source, target = random_tokens(3, 7), random_tokens(3, 6)
    encoded = model.get_encoder()(input_ids=source)
    cache = model(encoder_outputs=encoded, decoder_input_ids=target[:, :4], use_cache=True).past_key_values
    cache.reorder_cache(order)
    rest = BaseModelOutput(last_hidden_state=encoded.last_hidden_state[order])
    logits = model(encoder_outputs=rest, decoder_input_ids=target[order, 4:], past_key_values=cache).logits
    torch.testing.assert_close(logits, whole(model, source, target)[order, 4:], atol=1e-4, rtol=0)


@pytest.mark.parametrize("kind", ["dcbart", "rcmha"])
def test_attention_maps_are_recorded_by_place(kind: str) -> None:
    model = make_model(kind)
    output = model(
        input_ids=random_tokens(2, 7),
        decoder_input_ids=random_tokens(2, 9),
        output_attentions=True,
        output_hidden_states=True,
    )
    assert [maps.shape for maps in output.encoder_attentions] == [(2, 4, 7, 7)] * 2
    assert [maps.shape for maps in output.decoder_attentions] == [(2, 4, 9, 9)] * 3
    assert [maps.shape for maps in output.cross_attentions] == [(2, 4, 9, 7)] * 3
    assert len(output.encoder_hidden_states) == 3 and len(output.decoder_hidden_states) == 4


@pytest.mark.parametrize("kind", ["dcbart", "rcmha"])
def test_checkpointing_gives_the_same_gradients(kind: str) -> None:
    source, labels = random_tokens(2, 7), random_tokens(2, 9)
    grads = []
    for checkpointing in (False, True):
        model = make_model(kind).train()
        if checkpointing:
            model.gradient_checkpointing_enable()
        model(input_ids=source, labels=labels).loss.backward()
        grads.append({name: parameter.grad for name, parameter in model.named_parameters()})
    assert all(grad is not None for grad in grads[0].values())
    for name, grad in grads[0].items():
        torch.testing.assert_close(grads[1][name], grad, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize("kind", ["dcbart", "rcmha"])
def test_tokens_in_a_cache_are_not_dropped_by_checkpointing_without_a_word(kind: str) -> None:
    model, source, target = make_model(kind), random_tokens(2, 7), random_tokens(2, 9)
    cache = EncoderDecoderCache(DynamicCache(), DynamicCache())
    with torch.no_grad():
        model(input_ids=source, decoder_input_ids=target[:, :5], past_key_values=cache)
    model.train().gradient_checkpointing_enable()
    with pytest.raises(ValueError, match=r"checkpointing drops caches in training; call model.eval\(\) first"):
        model(input_ids=source, decoder_input_ids=target[:, 5:], past_key_values=cache)


def test_labels_are_shifted_once_and_ignored_where_padded() -> None:
    model = make_model()
    source, labels = random_tokens(2, 6), random_tokens(2, 5)
    labels[0, 3:] = -100
    inputs = model.prepare_decoder_input_ids_from_labels(labels)
    assert inputs.tolist() == [[2, *labels[0, :3].tolist(), 1], [2, *labels[1, :4].tolist()]]
    loss = model(input_ids=source, labels=labels).loss
    logits = whole(model, source, inputs)
    torch.testing.assert_close(loss, torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()))
    total = model(input_ids=source, labels=labels, num_items_in_batch=torch.tensor(4)).loss
    torch.testing.assert_close(total, loss * 8 / 4)


def arguments(**changes: Any) -> dict[str, Any]:
    """Of a call of the model; None leaves one out."""
    given = {"input_ids": random_tokens(2, 6), "decoder_input_ids": random_tokens(2, 5), **changes}
    return {name: value for name, value in given.items() if value is not None}


PACKED = torch.tensor([[0, 1, 2, 0, 1, 2]])
MISTAKES: list[tuple[dict[str, Any], str]] = [
    ({"decoder_input_ids": None}, "give decoder_input_ids or decoder_inputs_embeds; or labels"),
    ({"input_ids": None}, "give exactly one of input_ids and inputs_embeds"),
    ({"input_ids": random_tokens(2, 65)}, r"the source has 65 tokens, but there are max_position_embeddings \(64\)"),
    ({"decoder_input_ids": random_tokens(2, 65)}, "the target has 65 tokens"),
    ({"input_ids": random_tokens(3, 6)}, r"encoder output of shape \(3, 6, 48\) does not fit a target batch of 2 rows"),
    ({"encoder_outputs": (torch.zeros(2, 48),)}, r"encoder output of shape \(2, 48\) does not fit"),
    ({"encoder_outputs": torch.zeros(2, 6, 48)}, "encoder_outputs is a Tensor; give what the encoder returned, or a"),
    ({"encoder_outputs": {"last_hidden_state": torch.zeros(2, 6, 48)}}, "encoder_outputs is a dict; give what"),
    ({"encoder_outputs": ()}, "encoder_outputs is empty; give what the encoder returned"),
    (
        {"decoder_attention_mask": {"full_attention": None}},
        r"a mask of the decoder is a dictionary by layer type \['full_attention'\], but its layers are all alike",
    ),
    ({"past_key_values": DynamicCache()}, "past_key_values is a DynamicCache; an encoder-decoder keeps its own tokens"),
    ({"attention_mask": torch.zeros(2, 6)}, r"attention_mask hides every token of rows \[0, 1\]"),
    ({"attention_mask": torch.ones(2, 4)}, r"attention_mask of shape \(2, 4\) does not fit 2 rows of 6 tokens"),
    ({"attention_mask": torch.ones(2, 9)}, r"does not fit 2 rows of 6 tokens; give one value for each token"),
    (
        {"input_ids": None, "encoder_outputs": (torch.zeros(2, 6, 48),), "attention_mask": torch.ones(2, 7)},
        r"attention_mask of shape \(2, 7\) does not fit 2 rows of 6 tokens; give one value for each token",
    ),
    ({"decoder_attention_mask": torch.ones(2, 9)}, r"does not fit 2 rows of 5 tokens; give one value for each token"),
    (
        {"attention_mask": torch.ones(2, 1, 6, 6)},
        r"attention_mask of shape \(2, 1, 6, 6\) cannot serve both",
    ),
    ({"encoder_outputs": (torch.zeros(2, 6, 47),)}, r"shape \(2, 6, 47\) does not fit .* hidden_size \(48\)"),
    (
        {"labels": random_tokens(2, 4)},
        r"labels of shape \(2, 4\) do not fit 2 rows of 5 tokens; give one label for each",
    ),
    ({"position_ids": PACKED}, r"position_ids of shape \(1, 6\) are given, but an encoder-decoder counts positions"),
    ({"decoder_position_ids": PACKED}, r"decoder_position_ids of shape \(1, 6\) are given"),
]


@pytest.mark.parametrize("kind", ["dcbart", "rcmha"])
@pytest.mark.parametrize(("changes", "message"), MISTAKES, ids=[message for _, message in MISTAKES])
def test_bad_calls_say_what_is_wrong(kind: str, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_model(kind)(**arguments(**changes))


UNFIT_MASKS: list[tuple[Any, str]] = [
    (torch.ones(6), r"shape \(6,\) does not fit 2 rows of 6 tokens"),
    (torch.ones(2, 6, 6), r"shape \(2, 6, 6\) does not fit 2 rows of 6 tokens"),
    (torch.ones(2, 1, 6, 6, dtype=torch.long), r"is torch\.int64; use a boolean one"),
    (torch.ones(3, 1, 6, 6, dtype=torch.bool), r"shape \(3, 1, 6, 6\) does not fit 2 rows"),
    (torch.ones(2, 1, 6, 9, dtype=torch.bool), "does not broadcast to"),
    (torch.ones(2, 1, 4, 6, dtype=torch.bool), "does not broadcast to"),
    ({}, r"no mask for the layer types \['full_attention'\]"),
]


@pytest.mark.parametrize(("mask", "message"), UNFIT_MASKS, ids=[message for _, message in UNFIT_MASKS])
@pytest.mark.parametrize("kind", ["dcbart", "rcmha"])
def test_masks_that_do_not_fit_a_source_are_named(kind: str, mask: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_model(kind).get_encoder()(input_ids=random_tokens(2, 6), attention_mask=mask)


@pytest.mark.parametrize("kind", ["dcbart", "mha"])
def test_positions_that_the_model_does_not_have_are_refused(kind: str) -> None:
    model = make_model(kind)
    message = r"position_ids reach from 3 to 64, but must be at least 0 and smaller than max_position_embeddings \(64\)"
    with pytest.raises(ValueError, match=message):
        model.get_encoder()(input_ids=random_tokens(1, 2), position_ids=torch.tensor([[3, 64]]))
    nothing = torch.ones(0, 2, dtype=torch.long)
    assert model.get_encoder()(input_ids=nothing, position_ids=nothing).last_hidden_state.shape[:2] == (0, 2)
    with pytest.raises(ValueError, match=r"position_ids of shape .* are given"):
        encoded = torch.zeros(2, 6, model.config.hidden_size)
        model.get_decoder()(random_tokens(2, 6), encoder_hidden_states=encoded, position_ids=PACKED)


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("kind", ["dcbart", "mha"])
def test_a_target_that_outgrows_the_positions_is_refused(kind: str, cache: str) -> None:
    model, source = make_model(kind, max_position_embeddings=8, eos_token_id=None), random_tokens(1, 4)
    with pytest.raises(ValueError, match=r"the target has 9 tokens, but there are max_position_embeddings \(8\)"):
        generated(model, source, max_new_tokens=12, cache_implementation=cache)
    assert generated(model, source, max_new_tokens=8, cache_implementation=cache).shape == (1, 9)


@pytest.mark.parametrize("kind", ["dcbart", "rcmha"])
def test_a_static_cache_without_room_for_the_source_is_refused(kind: str) -> None:
    model = make_model(kind)
    rooms = [StaticCache(config=model.config, max_cache_len=room) for room in (8, 4)]
    message = "has room for max_cache_len=4 tokens of the source, which has 6"
    with pytest.raises(ValueError, match=message):
        model(**arguments(past_key_values=EncoderDecoderCache(*rooms)))
    assert rooms[0].get_seq_length() == 0


@pytest.mark.parametrize("cache_class", [DynamicCache, StaticCache])
@pytest.mark.parametrize("kind", ["dcbart", "rcmha"])
def test_a_cache_of_another_batch_is_refused(kind: str, cache_class: Any) -> None:
    model = make_model(kind)
    options = {"max_cache_len": 8} if cache_class is StaticCache else {}
    cache = EncoderDecoderCache(*(cache_class(config=model.config, **options) for _ in range(2)))
    model(**arguments(past_key_values=cache))
    given = {"input_ids": random_tokens(4, 6), "decoder_input_ids": random_tokens(4, 1), "past_key_values": cache}
    with pytest.raises(ValueError, match="past_key_values is of a batch of 2 rows and the input of 4"):
        model(**given)


@pytest.mark.parametrize("cache_class", [DynamicCache, StaticCache])
@pytest.mark.parametrize("kind", ["dcbart", "rcmha"])
def test_a_cache_of_another_source_is_refused(kind: str, cache_class: Any) -> None:
    model = make_model(kind)
    options = {"max_cache_len": 8} if cache_class is StaticCache else {}
    of_target, of_source = (cache_class(config=model.config, **options) for _ in range(2))
    model(**arguments(past_key_values=EncoderDecoderCache(cache_class(config=model.config, **options), of_source)))
    with pytest.raises(ValueError, match=r"holds a source of 6 tokens, but the encoder's output has 4; give the"):
        model(**arguments(input_ids=random_tokens(2, 4), past_key_values=EncoderDecoderCache(of_target, of_source)))
    given = {"input_ids": random_tokens(3, 6), "decoder_input_ids": random_tokens(3, 1)}
    with pytest.raises(ValueError, match="past_key_values is of a batch of 2 rows and the input of 3"):
        model(**given, past_key_values=EncoderDecoderCache(of_target, of_source))


@pytest.mark.parametrize("kind", ["dcbart", "rcmha"])
def test_a_mask_of_the_new_target_tokens_alone_is_refused_beside_a_cache(kind: str) -> None:
    model, source, target = make_model(kind), random_tokens(2, 6), random_tokens(2, 4)
    cache = model(input_ids=source, decoder_input_ids=target[:, :3], use_cache=True).past_key_values
    given = {"input_ids": source, "decoder_input_ids": target[:, 3:], "past_key_values": cache}
    with pytest.raises(ValueError, match="attention_mask has 1 columns for 3 cached and 1 new tokens; give 4"):
        model(**given, decoder_attention_mask=torch.ones(2, 1, dtype=torch.long))


@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_a_source_padded_on_the_left_is_as_one_alone(kind: str) -> None:
    model = make_model(kind).double()
    source, target = random_tokens(2, 9), random_tokens(2, 5)
    mask = torch.ones_like(source)
    mask[1, :4] = 0
    alone = whole(model, source[1:, 4:], target[1:])
    torch.testing.assert_close(whole(model, source, target, mask)[1:], alone, atol=1e-10, rtol=0)
    tokens = model.generate(source[1:, 4:], max_new_tokens=6, do_sample=False)
    assert torch.equal(model.generate(source, attention_mask=mask, max_new_tokens=6, do_sample=False)[1:, :7], tokens)


@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_a_target_padded_on_the_left_is_as_one_alone(kind: str) -> None:
    model = make_model(kind).double()
    source, target = random_tokens(2, 6), random_tokens(2, 9)
    mask = torch.ones_like(target)
    mask[1, :3] = 0
    other = torch.where(mask.bool(), target, random_tokens(2, 9))
    given = {"input_ids": source, "decoder_attention_mask": mask}
    logits = model(**given, decoder_input_ids=target).logits
    torch.testing.assert_close(
        model(**given, decoder_input_ids=other).logits[mask.bool()], logits[mask.bool()], atol=1e-10, rtol=0
    )
    alone = whole(model, source[1:], target[1:, 3:])
    torch.testing.assert_close(logits[1:, 3:], alone, atol=1e-10, rtol=0)
    start = model(**{**given, "decoder_attention_mask": mask[:, :6]}, decoder_input_ids=target[:, :6], use_cache=True)
    rest = model(**given, decoder_input_ids=target[:, 6:], past_key_values=start.past_key_values).logits
    torch.testing.assert_close(rest[1:], alone[:, 3:], atol=1e-10, rtol=0)


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_target_that_begins_with_padding_is_continued_as_one_alone(kind: str, cache: str) -> None:
    model = make_model(kind, tie_word_embeddings=False).double()
    model.generation_config.eos_token_id = None
    source, target, start = random_tokens(2, 6), random_tokens(2, 9), model.config.decoder_start_token_id
    target[0, 0] = target[1, 3] = start
    mask = torch.ones_like(target)
    mask[1, :3] = 0
    options = {"max_new_tokens": 8, "do_sample": False, "cache_implementation": cache}
    alone = model.generate(source[1:], decoder_input_ids=target[1:, 3:], **options)
    found = model.generate(source, decoder_input_ids=target, decoder_attention_mask=mask, **options)
    assert torch.equal(found[1, 9:], alone[0, 6:])


@pytest.mark.parametrize(
    ("kind", "fields"), [("dcbart", {}), ("dcbart", {"compose_pre": False, "compose_post": False}), ("mha", {})]
)
@torch.no_grad()
def test_that_a_target_sees_no_later_tokens_is_not_said_of_the_source(kind: str, fields: dict[str, Any]) -> None:
    model, source, target = make_model(kind, **fields), random_tokens(2, 7), random_tokens(2, 5)
    logits = model(input_ids=source, decoder_input_ids=target, is_causal=True).logits
    assert torch.equal(logits, whole(model, source, target))
    with pytest.raises(ValueError, match="is_causal=True is not supported: tokens of an encoder see later ones"):
        model.get_encoder()(input_ids=source, is_causal=True)


@pytest.mark.parametrize("options", [{}, {"num_items_in_batch": torch.tensor(3)}])
@pytest.mark.parametrize("fields", [{}, {"final_logits_bias": True}])
def test_a_loss_may_be_computed_without_logits(fields: dict[str, Any], options: dict[str, Any]) -> None:
    """The Trainer asks for this in evaluation, of any model, where `use_liger_kernel` is set."""
    model, source, labels = make_model(**fields), random_tokens(2, 6), random_tokens(2, 4)
    if model.final_logits_bias is not None:
        model.final_logits_bias.normal_()
    labels[0, 2:] = -100
    bare = model(input_ids=source, labels=labels, skip_logits=True, **options)
    assert bare.logits is None
    torch.testing.assert_close(bare.loss, model(input_ids=source, labels=labels, **options).loss)
    with pytest.raises(ValueError, match="skip_logits=True leaves nothing but the loss, which needs labels"):
        model(input_ids=source, decoder_input_ids=source, skip_logits=True)


@pytest.mark.parametrize("options", [{"z_loss": 1e-4}, {"cu_seq_lens_q": torch.tensor([0, 4, 6])}])
def test_what_would_change_nothing_is_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=rf"{next(iter(options))} .*leave (it|them) out"):
        make_model()(input_ids=random_tokens(1, 6), labels=random_tokens(1, 4), **options)


@pytest.mark.parametrize("kind", ["dcbart", "rcmha"])
def test_training_makes_no_cache_unless_it_is_asked_for(kind: str) -> None:
    model, source, labels = make_model(kind), random_tokens(2, 6), random_tokens(2, 4)
    assert model.config.use_cache
    assert model(input_ids=source, labels=labels).past_key_values is None
    assert model(input_ids=source, labels=labels, use_cache=True).past_key_values.get_seq_length() == 4


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("kind", ["dcbart", "dcbart-before", "rcmha", "mha"])
def test_every_attention_drops_probabilities_in_training_only(kind: str, place: str) -> None:
    off = {"compose_pre": False, "compose_post": False} if kind.startswith("dcbart") else {}
    model = make_model(kind, attention_dropout=0.5, **off)
    given = {"input_ids": random_tokens(2, 6), "decoder_input_ids": random_tokens(2, 5)}
    stack = model.get_encoder() if place == "encoder" else model.get_decoder()
    for layer in stack.layers:
        (layer.cross_attn if place == "cross" else layer.self_attn).train()
    assert not torch.equal(model(**given).logits, model(**given).logits)
    model.eval()
    assert torch.equal(model(**given).logits, model(**given).logits)


@pytest.mark.parametrize("place", ["embeddings", "self_attn", "cross_attn", "mlp"])
@pytest.mark.parametrize("kind", ["dcbart", "dcbart-before", "rcmha", "mha"])
def test_dropout_acts_on_embeddings_and_on_every_sublayer(kind: str, place: str) -> None:
    """All sublayers but one are silent, so that only its dropout can show."""
    model = make_model(kind, hidden_dropout=0.5)
    decoder = model.get_decoder()
    for layer in decoder.layers:
        for name in {"self_attn", "cross_attn", "mlp"} - {place}:
            part = getattr(layer, name)
            last = part.down_proj if name == "mlp" else part.o_proj
            for weight in last.parameters():
                torch.nn.init.zeros_(weight)
        layer.dropout.train(place != "embeddings")
    decoder.dropout.train(place == "embeddings")
    given = {"input_ids": random_tokens(2, 6), "decoder_input_ids": random_tokens(2, 5)}
    assert not torch.equal(model(**given).logits, model(**given).logits)


@pytest.mark.parametrize("kind", ["dcbart", "rcmha"])
def test_the_padding_token_does_not_learn(kind: str) -> None:
    model = make_model(kind, tie_word_embeddings=False)
    source, target = random_tokens(2, 6), random_tokens(2, 5)
    source[1, -2:] = target[1, -2:] = 1
    model(input_ids=source, decoder_input_ids=target).logits.square().sum().backward()
    learned = model.model.shared.weight.grad.abs().sum(-1) > 0
    assert not learned[1] and learned[source[0, 0]] and learned[target[0, 0]]


@pytest.mark.parametrize("kind", ["dcbart", "rcmha"])
def test_a_new_embedding_is_that_of_source_and_target(kind: str) -> None:
    model = make_model(kind)
    new = torch.nn.Embedding(model.config.vocab_size, 48)
    model.set_input_embeddings(new)
    assert model.get_encoder().embed_tokens is new and model.get_decoder().embed_tokens is new
    assert model.get_input_embeddings() is new


@pytest.mark.parametrize("name", ["decoder_start_token_id", "pad_token_id"])
def test_labels_cannot_be_shifted_without_their_tokens(name: str) -> None:
    with pytest.raises(ValueError, match=f"{name} is None, but labels are shifted with it"):
        make_model(**{name: None})(input_ids=random_tokens(1, 3), labels=random_tokens(1, 3))


@pytest.mark.parametrize(
    ("kind", "name", "given"),
    [
        ("dcbart", "pad_token_id", 83),
        ("rcmha", "pad_token_id", -1),
        ("dcbart", "decoder_start_token_id", -1),
        ("rcmha", "decoder_start_token_id", 83),
        ("dcbart", "forced_eos_token_id", 83),
        ("dcbart", "forced_eos_token_id", [2, 83]),
    ],
)
def test_special_tokens_outside_the_vocabulary_are_refused(kind: str, name: str, given: int | list[int]) -> None:
    outside = given[1] if isinstance(given, list) else given
    with pytest.raises(ValueError, match=rf"{name} \({outside}\) must be at least 0 and smaller than vocab_size"):
        make_model(kind, **{name: given})


@pytest.mark.parametrize("kind", ["dcbart", "mdha"])
def test_a_saved_model_is_loaded(kind: str, tmp_path: Path) -> None:
    model = make_model(kind)
    model.save_pretrained(tmp_path)
    loaded = AutoModelForSeq2SeqLM.from_pretrained(tmp_path)
    source, target = random_tokens(2, 5), random_tokens(2, 4)
    assert torch.equal(whole(loaded, source, target), whole(model, source, target))
    assert AutoModel.from_pretrained(tmp_path).shared.weight.equal(model.model.shared.weight)


def test_a_head_without_parameters_of_its_own_is_not_missed_in_a_base_model(tmp_path: Path) -> None:
    make_model("dcbart").model.save_pretrained(tmp_path)
    loaded, info = AutoModelForSeq2SeqLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(info.values())
    assert torch.equal(loaded.final_logits_bias, torch.zeros(1, loaded.config.vocab_size))


@pytest.mark.parametrize("kind", KINDS)
def test_without_tied_words_only_the_head_has_weights_of_its_own(kind: str, tmp_path: Path) -> None:
    config = copy.deepcopy(make_model(kind).config)
    config.tie_word_embeddings = False
    model = type(make_model(kind))(config).eval()
    source, target = random_tokens(2, 7), random_tokens(2, 5)
    before = whole(model, source, target)
    assert model.lm_head.weight is not model.model.shared.weight
    model.resize_token_embeddings(before.shape[-1] + 5, mean_resizing=False)
    torch.testing.assert_close(whole(model, source, target)[..., :-5], before)
    model.save_pretrained(tmp_path)
    again = type(model).from_pretrained(tmp_path).eval()
    assert again.model.encoder.embed_tokens.weight is again.model.decoder.embed_tokens.weight
    assert torch.equal(whole(again, source, target), whole(model, source, target))


@pytest.mark.parametrize("kind", ["dcbart", "rcmha"])
@torch.no_grad()
def test_a_given_cache_is_read_without_use_cache(kind: str) -> None:
    model, source, target = make_model(kind), random_tokens(2, 7), random_tokens(2, 6)
    cache = cache_in(model(source, decoder_input_ids=target[:, :4], use_cache=True))
    found = model(source, decoder_input_ids=target[:, 4:], past_key_values=cache, use_cache=False).logits
    torch.testing.assert_close(found, whole(model, source, target)[:, 4:], atol=1e-4, rtol=0)


@pytest.mark.parametrize("kind", ["dcbart", "rcmha"])
@torch.no_grad()
def test_embeddings_take_the_place_of_tokens(kind: str) -> None:
    model, source, target = make_model(kind), random_tokens(2, 7), random_tokens(2, 6)
    embed = model.get_input_embeddings()
    found = model(inputs_embeds=embed(source), decoder_inputs_embeds=embed(target), labels=target).logits
    torch.testing.assert_close(found, model(source, decoder_input_ids=target, labels=target).logits)
    with pytest.raises(ValueError, match="encoder_hidden_states is None"):
        model.get_decoder()(target)
