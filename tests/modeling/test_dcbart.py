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
from transformers import DynamicCache, PreTrainedModel, StaticCache
from transformers.cache_utils import EncoderDecoderCache
from transformers.modeling_outputs import BaseModelOutput

from dynattn import DCBartConfig, DCBartForConditionalGeneration, DCBartModel
from dynattn.modeling.caches.composed_cache import ComposedLayerMixin
from dynattn.modeling.layers.head_composition import DynamicComposition

LENGTHS = [(9, 9), (11, 5), (5, 16)]  # of source and target
MULTIPLE = 4


def assert_same(ours: Tensor, theirs: Tensor) -> None:
    torch.testing.assert_close(ours, theirs, atol=1e-5 * float(theirs.abs().max()), rtol=0)


def assert_within_noise(logits: Tensor, plain: Tensor, exact: Tensor) -> None:
    """Errs against the logits in float64 by at most `MULTIPLE` times the plain pass."""
    noise = max((plain - exact).abs().max(), torch.finfo(plain.dtype).eps * exact.abs().max())
    assert (logits - exact).abs().max() <= MULTIPLE * noise


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


@pytest.mark.parametrize(("source_length", "target_length"), LENGTHS)
@pytest.mark.parametrize("fields", [{}, {"normalize_before": True, "use_qk_norm": True, "compose_static": True}])
@torch.no_grad()
def test_all_ways_of_running_agree(fields: dict[str, Any], source_length: int, target_length: int) -> None:
    model = make_model(**fields)
    source, target = random_tokens(3, source_length), random_tokens(3, target_length)
    plain = whole(model, source, target)
    exact = whole(copy.deepcopy(model).double(), source, target)
    static = EncoderDecoderCache(
        StaticCache(config=model.config, max_cache_len=target_length + 3),
        StaticCache(config=model.config, max_cache_len=source_length + 2),  # longer than the source
    )
    eager = DCBartForConditionalGeneration._from_config(model.config, attn_implementation="eager").eval()
    eager.load_state_dict(model.state_dict())
    padded = torch.cat([source, torch.full((3, 4), 1)], dim=1)
    mask = (torch.arange(padded.shape[1]) < source_length).long().expand(3, -1)
    for logits in (
        one_by_one(model, source, target),
        one_by_one(model, source, target, first=3),
        one_by_one(model, source, target, cache=static),
        whole(eager, source, target),
        whole(model, padded, target, mask),
        torch.cat([whole(model, *pair) for pair in zip(source.split(1), target.split(1), strict=True)]),
        whole(model, source, torch.cat([target, target], dim=1))[:, :target_length],
    ):
        assert_within_noise(logits, plain, exact)


@pytest.mark.parametrize("place", ["encoder", "decoder", "cross"])
@torch.no_grad()
def test_each_attention_may_be_composed_alone(place: str) -> None:
    model = make_model(**{f"compose_{other}": other == place for other in ("encoder", "decoder", "cross")})
    source, target = random_tokens(2, 7), random_tokens(2, 9)
    names = [name for name, module in model.named_modules() if isinstance(module, DynamicComposition)]
    parts = {"encoder": "encoder.layers", "decoder": ".self_attn.", "cross": ".cross_attn."}
    assert names and all(parts[place] in name for name in names)
    plain = whole(model, source, target)
    assert_within_noise(one_by_one(model, source, target), plain, whole(copy.deepcopy(model).double(), source, target))


def generated(model: PreTrainedModel, source: Tensor, **options: Any) -> Tensor:
    arguments = {"max_new_tokens": 14, "do_sample": False, "attention_mask": (source != 1).long()}
    torch.manual_seed(3)
    return model.generate(source, **{**arguments, **options})


@pytest.mark.parametrize(
    "options",
    [{}, {"num_beams": 4}, {"num_beams": 4, "num_return_sequences": 3}, {"do_sample": True, "top_k": 20}],
    ids=["greedy", "beams", "several", "sampled"],
)
@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_generation_agrees_with_the_model_without_a_cache(cache: str, options: dict[str, Any]) -> None:
    model = make_model(tie_word_embeddings=False)  # a tied head repeats what it reads
    source = random_tokens(2, 11)
    source[1, -4:] = 1
    expected = generated(model, source, use_cache=False, **options)
    assert torch.equal(generated(model, source, cache_implementation=cache, **options), expected)
    assert expected.unique().numel() > 3


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


@torch.no_grad()
def test_caches_are_reordered_with_their_factors() -> None:
    model, order = make_model(), torch.tensor([2, 0, 0])
    source, target = random_tokens(3, 7), random_tokens(3, 6)
    encoded = model.get_encoder()(input_ids=source)
    cache = model(encoder_outputs=encoded, decoder_input_ids=target[:, :4], use_cache=True).past_key_values
    cache.reorder_cache(order)
    rest = BaseModelOutput(last_hidden_state=encoded.last_hidden_state[order])
    logits = model(encoder_outputs=rest, decoder_input_ids=target[order, 4:], past_key_values=cache).logits
    torch.testing.assert_close(logits, whole(model, source, target)[order, 4:], atol=1e-4, rtol=0)


def test_plain_models_use_plain_caches() -> None:
    output = make_model(compose_key_wise=False)(
        input_ids=random_tokens(1, 5), decoder_input_ids=random_tokens(1, 2), use_cache=True
    )
    cache = output.past_key_values
    for part in (cache.self_attention_cache, cache.cross_attention_cache):
        assert not any(isinstance(layer, ComposedLayerMixin) for layer in part.layers)


def test_attention_maps_are_recorded_by_place() -> None:
    model = make_model()
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


def test_checkpointing_gives_the_same_gradients() -> None:
    source, labels = random_tokens(2, 7), random_tokens(2, 9)
    grads = []
    for checkpointing in (False, True):
        model = make_model().train()
        if checkpointing:
            model.gradient_checkpointing_enable()
        model(input_ids=source, labels=labels).loss.backward()
        grads.append({name: parameter.grad for name, parameter in model.named_parameters()})
    assert all(grad is not None for grad in grads[0].values())
    for name, grad in grads[0].items():
        torch.testing.assert_close(grads[1][name], grad, msg=lambda text, name=name: f"{name}: {text}")


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


def test_new_tokens_have_no_bias() -> None:
    model = make_model()
    model.final_logits_bias.fill_(1.0)
    model.resize_token_embeddings(90)
    assert model.final_logits_bias[0, :83].eq(1).all() and model.final_logits_bias[0, 83:].eq(0).all()
    assert whole(model, random_tokens(1, 4), random_tokens(1, 3)).shape[-1] == 90
    assert model.model.encoder.embed_tokens.weight is model.lm_head.weight


def arguments(**changes: Any) -> dict[str, Any]:
    """Of a call of the model; None leaves one out."""
    given = {"input_ids": random_tokens(2, 6), "decoder_input_ids": random_tokens(2, 5), **changes}
    return {name: value for name, value in given.items() if value is not None}


MISTAKES: list[tuple[dict[str, Any], str]] = [
    ({"decoder_input_ids": None}, "give decoder_input_ids or decoder_inputs_embeds; or labels"),
    ({"input_ids": None}, "give exactly one of input_ids and inputs_embeds"),
    ({"input_ids": random_tokens(2, 65)}, r"the source has 65 tokens, but there are max_position_embeddings \(64\)"),
    ({"decoder_input_ids": random_tokens(2, 65)}, "the target has 65 tokens"),
    ({"input_ids": random_tokens(3, 6)}, r"encoder output of shape \(3, 6, 48\) does not fit a target batch of 2 rows"),
    ({"encoder_outputs": (torch.zeros(2, 48),)}, r"encoder output of shape \(2, 48\) does not fit"),
    ({"past_key_values": DynamicCache()}, "past_key_values is a DynamicCache; an encoder-decoder keeps its own tokens"),
    ({"attention_mask": torch.zeros(2, 6)}, r"attention_mask hides every token of rows \[0, 1\]"),
    ({"attention_mask": torch.ones(2, 4)}, r"attention_mask of shape \(2, 4\) does not fit 2 rows of 6 tokens"),
    ({"labels": random_tokens(2, 4)}, r"labels of shape \(2, 4\) do not fit logits for \(2, 5\) positions"),
]


@pytest.mark.parametrize(("changes", "message"), MISTAKES, ids=[message for _, message in MISTAKES])
def test_bad_calls_say_what_is_wrong(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_model()(**arguments(**changes))


@pytest.mark.parametrize("name", ["decoder_start_token_id", "pad_token_id"])
def test_labels_cannot_be_shifted_without_their_tokens(name: str) -> None:
    with pytest.raises(ValueError, match=f"{name} is None, but labels are shifted with it"):
        make_model(**{name: None})(input_ids=random_tokens(1, 3), labels=random_tokens(1, 3))


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


def test_positions_come_back_when_a_model_is_loaded(tmp_path: Any) -> None:
    model = make_model()
    model.save_pretrained(tmp_path)
    loaded = DCBartForConditionalGeneration.from_pretrained(tmp_path)
    source, target = random_tokens(2, 5), random_tokens(2, 4)
    assert torch.equal(whole(loaded, source, target), whole(model, source, target))
    assert DCBartModel.from_pretrained(tmp_path).shared.weight.equal(model.model.shared.weight)


def test_the_decoder_may_have_another_depth() -> None:
    assert DCBartConfig(num_hidden_layers=4).decoder_layers == 4
    assert THEIRS["decoder_layers"] == 3 and len(make_model().model.decoder.layers) == 3
