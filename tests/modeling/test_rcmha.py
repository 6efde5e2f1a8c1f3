"""RCMHA models: what their two kinds of memory mean, what training with memory does, and clear errors."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from cases.versions import crops_static_caches
from huggingface_hub.errors import StrictDataclassError
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM, DynamicCache, PreTrainedModel, StaticCache

from dynattn import RCMHAConfig, RCMHAForCausalLM
from dynattn.modeling.caches.segment_memory import SegmentMemoryLayer
from dynattn.modeling.ops.relative.attention import RELATIVE_IMPLEMENTATIONS
from dynattn.modeling.ops.relative.eager import relative_eager
from dynattn.modeling.positions.learned_tables import t5_buckets

TYPES = ("rcmha", "rmha", "mdha", "mha")
IDS = torch.randint(0, 31, (2, 24), generator=torch.Generator().manual_seed(7))
SMALL: dict[str, Any] = {
    "vocab_size": 31,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "mem_len": 5,
    "max_position_embeddings": 64,
    "initializer_range": 0.3,
}


def make(**fields: Any) -> RCMHAForCausalLM:
    torch.manual_seed(1)
    return RCMHAForCausalLM(RCMHAConfig(**{**SMALL, **fields})).eval()


def over_segments(model: PreTrainedModel, lengths: list[int]) -> Tensor:
    memory = DynamicCache(config=model.config)
    return torch.cat([model(ids, past_key_values=memory).logits for ids in IDS.split(lengths, dim=1)], dim=1)


@pytest.mark.parametrize(
    ("attention_type", "scheme"), [*((kind, "none") for kind in TYPES), ("mha", "alibi"), ("mdha", "t5"), ("mha", "t5")]
)
@torch.no_grad()
def test_streaming_memory_makes_segmentation_invisible(attention_type: str, scheme: str) -> None:
    model = make(attention_type=attention_type, position_scheme=scheme).double()
    whole = model(IDS).logits
    for lengths in ([12, 12], [1] * 24, [7, 1, 1, 15], [23, 1]):
        torch.testing.assert_close(over_segments(model, lengths), whole, atol=1e-10, rtol=0)


@pytest.mark.parametrize("attention_type", TYPES)
@torch.no_grad()
def test_segment_memory_makes_segmentation_matter_where_the_official_code_does(attention_type: str) -> None:
    """Unbounded, so that only the convolutions tell the difference: their queries see zeros before a segment."""
    model = make(attention_type=attention_type, memory_type="segment", mem_len=None).double()
    difference = (over_segments(model, [12, 12]) - model(IDS).logits).abs().amax((0, 2))
    assert difference[:12].max() < 1e-10
    if model.config.convolves:
        assert difference[12:].max() > 1e-2
    else:
        assert difference.max() < 1e-10


@torch.no_grad()
def test_rotations_count_from_the_oldest_token_of_a_segment_memory() -> None:
    fields = {"memory_type": "segment", "mem_len": None, "position_scheme": "rope", "rope_theta": 100.0}
    model = make(attention_type="mha", **fields).double()
    # Angles are float32.
    torch.testing.assert_close(over_segments(model, [9, 1, 14]), model(IDS).logits, atol=1e-5, rtol=0)


def test_a_bias_by_distance_stays_in_single_precision(monkeypatch: pytest.MonkeyPatch) -> None:
    """In half precision the distances of long sequences would become equal."""
    model, biases = make(attention_type="mha", position_scheme="alibi").bfloat16(), []

    def attend(*arguments: Any, **options: Any) -> Any:
        biases.append(options["terms"].bias.dtype)
        return relative_eager(*arguments, **options)

    monkeypatch.setitem(RELATIVE_IMPLEMENTATIONS, "chunked", attend)
    assert model(IDS).logits.dtype == torch.bfloat16
    assert biases == [torch.float32] * model.config.num_hidden_layers


@pytest.mark.parametrize("implementation", ["eager", "sdpa", "chunked"])
@pytest.mark.parametrize("field", ["attention_dropout", "hidden_dropout"])
def test_dropout_acts_in_training_only(field: str, implementation: str) -> None:
    model = make(**{field: 0.5}, attn_implementation=implementation)
    assert torch.equal(model(IDS).logits, model(IDS).logits)
    model.train()
    assert not torch.equal(model(IDS).logits, model(IDS).logits)


@torch.no_grad()
def test_a_streaming_token_sees_itself_and_its_memory_in_every_layer() -> None:
    model = make(attention_type="mha", num_hidden_layers=2)
    changed = IDS.clone()
    changed[:, 3] = (changed[:, 3] + 1) % 31
    difference = (model(IDS).logits - model(changed).logits).abs().amax((0, 2))
    reach = 2 * model.config.mem_len
    assert difference[:3].max() == 0
    assert difference[3 : 3 + reach + 1].min() > 0
    assert difference[3 + reach + 1 :].max() == 0


@torch.no_grad()
def test_memory_that_was_reset_takes_another_batch_and_dtype() -> None:
    model = make()
    memory = DynamicCache(config=model.config)
    with torch.inference_mode():
        model(IDS[:1], past_key_values=memory)
    memory.reset()
    found = model.double()(IDS, past_key_values=memory).logits
    torch.testing.assert_close(found, model(IDS).logits)


def test_memory_of_inference_mode_goes_on_outside_of_it() -> None:
    model = make()
    expected = model(IDS).logits
    with torch.inference_mode():
        memory = model(IDS[:, :5], use_cache=True).past_key_values
    found = model(IDS[:, 5:], past_key_values=memory).logits
    torch.testing.assert_close(found, expected[:, 5:])


@torch.inference_mode()
def test_contexts_stay_where_they_are_in_inference_mode() -> None:
    """Compiled decoding reads them where they were."""
    model, memory = make(), DynamicCache()
    places = []
    for ids in IDS.split([5, *[1] * (IDS.shape[1] - 5)], dim=1):
        model(ids, past_key_values=memory)
        places.append([context.data_ptr() for context in memory.layers[0].contexts.values()])
    assert places[1:] == places[:-1] and places[0]


def test_segment_memory_holds_the_inputs_of_each_layer_and_no_more_than_asked() -> None:
    model = make(memory_type="segment")
    memory = DynamicCache(config=model.config)
    hidden = []
    for ids in IDS.split([4, 20], dim=1):
        hidden.append(model(ids, past_key_values=memory, output_hidden_states=True).hidden_states)
        kept = min(5, sum(states[0].shape[1] for states in hidden))
        for index, layer in enumerate(memory.layers):
            inputs = torch.cat([states[index] for states in hidden], dim=1)
            assert isinstance(layer, SegmentMemoryLayer)
            torch.testing.assert_close(layer.keys[:, 0], inputs[:, -kept:])
    assert memory.get_seq_length() == 24


@pytest.mark.parametrize("memory_type", ["streaming", "segment"])
@pytest.mark.parametrize("attention_type", TYPES)
def test_training_carries_memory_without_gradients_through_it(attention_type: str, memory_type: str) -> None:
    model = make(attention_type=attention_type, memory_type=memory_type).train()
    memory = DynamicCache(config=model.config)
    embeddings = [model.get_input_embeddings()(ids).detach().requires_grad_() for ids in IDS.split(8, dim=1)]
    for embedding in embeddings:
        loss = model(inputs_embeds=embedding, past_key_values=memory).logits.pow(2).mean()
        loss.backward()
    before = [embedding.grad.clone() for embedding in embeddings]
    model(inputs_embeds=embeddings[2], past_key_values=memory).logits.pow(2).mean().backward()
    assert all(grad.abs().max() > 0 for grad in before)
    assert torch.equal(embeddings[0].grad, before[0])
    assert torch.equal(embeddings[1].grad, before[1])


@torch.no_grad()
def test_the_memory_of_a_segment_changes_its_logits() -> None:
    for memory_type in ("streaming", "segment"):
        model = make(memory_type=memory_type)
        alone = model(IDS[:, 12:]).logits
        assert (over_segments(model, [12, 12])[:, 12:] - alone).abs().max() > 1e-2


@pytest.mark.parametrize("memory_type", ["streaming", "segment"])
@torch.no_grad()
def test_left_padding_changes_nothing_over_segments(memory_type: str) -> None:
    """Projections have biases, so that padding which reached a convolution would show."""
    model = make(attention_type="mdha", memory_type=memory_type).double()
    for bias in (model.model.layers[0].self_attn.q_proj.bias, model.model.layers[0].self_attn.k_conv.bias):
        bias.fill_(0.7)
    mask = torch.ones_like(IDS)
    mask[1, :6] = 0
    padded, alone = DynamicCache(config=model.config), DynamicCache(config=model.config)
    for start, stop in ((0, 10), (10, 11), (11, 24)):
        logits = model(IDS[:, start:stop], attention_mask=mask[:, :stop], past_key_values=padded).logits
        expected = model(IDS[1:, max(start, 6) : stop], past_key_values=alone).logits
        torch.testing.assert_close(logits[1:, max(6 - start, 0) :], expected, atol=1e-10, rtol=0)


@torch.no_grad()
def test_right_padding_does_not_leak_into_what_follows() -> None:
    """Padding between tokens is a hole: convolutions see nothing in it, whatever tokens it is made of."""
    model = make().double()
    mask = torch.ones_like(IDS)
    mask[1, 7:10] = 0
    logits = []
    for filler in (0, 5):
        ids = IDS.clone()
        ids[1, 7:10] = filler
        memory = DynamicCache(config=model.config)
        model(ids[:, :10], attention_mask=mask[:, :10], past_key_values=memory)
        logits.append(model(ids[:, 10:], attention_mask=mask, past_key_values=memory).logits)
    assert torch.equal(logits[0], logits[1])


@torch.no_grad()
def test_position_schemes_tell_positions_apart() -> None:
    """Without one, a plain decoder gives a token that only repeats itself the same logits everywhere."""
    repeated = torch.full((1, 12), 3)
    blinds = {"none": True, "rope": True, "alibi": True, "t5": True, "learned": False, "sinusoidal": False}
    for scheme, blind in blinds.items():
        model = make(attention_type="mha", position_scheme=scheme, mem_len=None)
        logits = model(repeated).logits[0]
        assert ((logits - logits[0]).abs().max() < 1e-4) == blind, scheme
        # In one layer: a second one would learn of the order from the causal mask of the first.
        model = make(attention_type="mha", position_scheme=scheme, mem_len=None, num_hidden_layers=1)
        swapped = IDS.clone()
        swapped[:, [2, 5]] = swapped[:, [5, 2]]
        order_matters = (model(IDS).logits[:, -1] - model(swapped).logits[:, -1]).abs().max() > 1e-4
        assert order_matters == (scheme != "none"), scheme


@pytest.mark.parametrize("scheme", ["alibi", "t5"])
@torch.no_grad()
def test_a_bias_by_distance_is_added_to_scaled_scores(scheme: str) -> None:
    model = make(attention_type="mha", position_scheme=scheme, mem_len=None, num_hidden_layers=1, t5_max_distance=20)
    layer = model.double().model.layers[0]
    states = layer.input_layernorm(model.model.embed_tokens(IDS))
    query, key = (
        project(states).unflatten(-1, (4, 8)).transpose(1, 2)
        for project in (layer.self_attn.q_proj, layer.self_attn.k_proj)
    )
    places = torch.arange(24)
    distance = (places[:, None] - places).clamp(min=0)
    bias = -distance * 2.0 ** -torch.arange(2, 9, 2)[:, None, None]
    if scheme == "t5":
        bias = model.model.position_bias.weight[t5_buckets(24, 32, 20, places.device)][distance].permute(2, 0, 1)
    scores = (query @ key.mT / 8**0.5 + bias).masked_fill(places[:, None] < places, -torch.inf)
    maps = model(IDS, output_attentions=True).attentions[0]
    torch.testing.assert_close(maps, scores.softmax(-1), atol=1e-12, rtol=0)


def test_a_learned_bias_is_trained_by_all_layers_and_starts_as_that_of_t5() -> None:
    model = make(attention_type="mha", position_scheme="t5")
    table = model.model.position_bias.weight
    assert table.shape == (32, 4) and 0.1 < table.std() < 0.25  # hidden_size ** -0.5 is 0.18
    model.train()(IDS, labels=IDS).loss.backward()
    expected = table.grad.clone()
    assert expected[:6].abs().min() > 0 and expected[6:].abs().max() == 0  # a token sees five before it
    model.zero_grad()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    model(IDS, labels=IDS).loss.backward()
    torch.testing.assert_close(table.grad, expected)
    model.gradient_checkpointing_enable({"use_reentrant": True})
    with pytest.raises(ValueError, match=r"use_reentrant=True, .* cannot differentiate"):
        model(IDS, labels=IDS)


@torch.no_grad()
def test_attention_maps_come_from_any_implementation() -> None:
    outputs = {}
    for name in ("eager", "chunked"):
        model = RCMHAForCausalLM._from_config(RCMHAConfig(**SMALL), attn_implementation=name)
        torch.manual_seed(2)
        model.init_weights()
        outputs[name] = model.eval()(IDS, output_attentions=True)
    for weights in outputs["chunked"].attentions:
        assert weights.shape == (2, 4, 24, 24)
        torch.testing.assert_close(weights.sum(-1), torch.ones(2, 4, 24))
        distance = torch.arange(24)[:, None] - torch.arange(24)
        assert weights[..., (distance < 0) | (distance > 5)].abs().max() == 0


def test_tables_are_as_long_as_queries_reach(tmp_path: Path) -> None:
    rows = {
        "streaming": make().model.layers[0].self_attn.position_embeddings.shape[0],
        "segment": make(memory_type="segment").model.layers[0].self_attn.position_embeddings.shape[0],
        "unbounded": make(mem_len=None).model.layers[0].self_attn.position_bias.shape[0],
    }
    assert rows == {"streaming": 6, "segment": 64, "unbounded": 64}
    # The official counts of this shape without tables, from the shapes: 811,841 and 812,993 parameters.
    counts = {kind: RCMHAForCausalLM(RCMHAConfig(attention_type=kind)).num_parameters() for kind in ("mha", "mdha")}
    assert counts == {"mha": 811_841, "mdha": 812_993}
    make().save_pretrained(tmp_path)
    assert load_file(tmp_path / "model.safetensors")["model.layers.0.self_attn.position_bias"].shape == (6, 4)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert torch.equal(loaded(IDS).logits, make()(IDS).logits)


def test_initial_convolutions_are_near_the_identity_and_not_at_it() -> None:
    conv = make(initializer_range=0.02).model.layers[0].self_attn.k_conv
    assert (conv.weight[0] - 1).abs().max() < 0.1
    assert 0 < conv.weight[1:].abs().max() < 0.1
    assert conv.bias.abs().max() == 0


def test_initial_tables_are_as_small_as_the_configuration_says() -> None:
    attention = make(initializer_range=0.02).model.layers[0].self_attn
    for table in (attention.position_embeddings, attention.position_bias, attention.content_bias):
        assert 0.01 < table.std() < 0.03


def continue_with(batch: int, **fields: Any) -> None:
    model = make(**fields)
    memory = model(IDS, use_cache=True).past_key_values
    model(IDS[:1].repeat(batch, 1), past_key_values=memory)


def with_cache(cache: Callable[[RCMHAConfig], Any], **fields: Any) -> None:
    model = make(**fields)
    model(IDS, past_key_values=cache(model.config))


def filled(config: RCMHAConfig) -> DynamicCache:
    cache = DynamicCache()
    for layer in range(config.num_hidden_layers):
        cache.update(torch.zeros(2, 4, 3, 8), torch.zeros(2, 4, 3, 8), layer)
    return cache


def checkpointed_with_memory() -> None:
    model = make().train()
    model.gradient_checkpointing_enable()
    model(IDS, past_key_values=DynamicCache(config=model.config))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: continue_with(3), "past_key_values is of a batch of 2 rows and the input of 3"),
        (lambda: continue_with(1, memory_type="segment"), "batch of 2 rows and the input of 1"),
        (lambda: make(mem_len=None)(IDS.repeat(1, 3)), r"reaches over 72 keys.*max_position_embeddings \(64\)"),
        (
            lambda: make(memory_type="segment", mem_len=50)(IDS.repeat(1, 3)),
            r"tables end at max_position_embeddings \(64\); use shorter segments",
        ),
        (
            lambda: make(attention_type="mha", position_scheme="learned")(IDS.repeat(1, 3)),
            r"needs 72 learned positions.*\(64\)",
        ),
        (
            lambda: with_cache(lambda config: StaticCache(config=config, max_cache_len=30), memory_type="segment"),
            "memory_type='segment' keeps layer inputs, which a StaticLayer cannot",
        ),
        (lambda: checkpointed_with_memory(), "memory cannot be carried through gradient checkpointing"),
        (lambda: with_cache(filled), "holds 3 tokens without the memory of this model"),
        (lambda: with_cache(filled, memory_type="segment"), "holds 3 tokens without the memory of this model"),
    ],
)
def test_what_does_not_fit_is_refused(call: Callable[[], None], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()


def test_tokens_can_be_taken_back_only_while_the_past_is_recorded() -> None:
    model = make().double()
    with torch.no_grad():
        memory = DynamicCache(config=model.config)
        model(IDS[:, :10], past_key_values=memory)
        with pytest.raises(RuntimeError, match="records the past"):
            memory.crop(-2)
        recording = DynamicCache(config=model.config)
        model(IDS[:, :10], past_key_values=recording)
        recording.activate_past_recording()
        model(IDS[:, 12:16], past_key_values=recording)  # tokens that were not wanted
        recording.crop(-4)
        again = model(IDS[:, 10:], past_key_values=recording).logits
        torch.testing.assert_close(again, model(IDS).logits[:, 10:], atol=1e-10, rtol=0)
        segments = make(memory_type="segment")
        with pytest.raises(RuntimeError, match="segment memory cannot take tokens back"):
            segments(IDS, use_cache=True).past_key_values.crop(-1)


MISTAKES: list[tuple[dict[str, Any], str]] = [
    ({"attention_type": "cmha"}, "attention_type 'cmha' does not exist; choose from"),
    ({"memory_type": "ring"}, "memory_type 'ring' does not exist"),
    ({"position_scheme": "sinus"}, "position_scheme 'sinus' does not exist"),
    ({"t5_num_buckets": 7}, r"t5_num_buckets \(7\) must be even"),
    ({"position_scheme": "rope"}, "'rcmha' has relative positions of its own"),
    ({"mem_len": -1}, r"mem_len \(-1\) must be at least 0"),
    ({"mem_len": 64}, r"mem_len \(64\) must be smaller than max_position_embeddings \(64\)"),
    ({"mem_len": 0}, "mem_len=0 would leave a streaming token nothing but itself"),
    ({"conv_is_causal": False}, "conv_is_causal=False would let a token see later ones"),
    ({"num_attention_heads": 5}, r"hidden_size \(32\) must be a multiple of num_attention_heads \(5\)"),
    ({"attention_type": "mha", "position_scheme": "rope", "num_attention_heads": 32}, r"head_dim \(1\) must be even"),
    ({"sliding_window": 9}, r"\['sliding_window'\] follow from memory_type and mem_len"),
    ({"max_position_embeddings": 0, "mem_len": None}, r"max_position_embeddings \(0\) must be at least 1"),
]


@pytest.mark.parametrize(("fields", "message"), MISTAKES, ids=[str(fields) for fields, _ in MISTAKES])
def test_each_mistake_in_a_configuration_has_a_clear_error(fields: dict[str, Any], message: str) -> None:
    with pytest.raises((StrictDataclassError, ValueError), match=message):
        RCMHAConfig(**{**SMALL, **fields})


def test_implementations_that_do_not_know_position_terms_are_refused() -> None:
    for name in ("flash_attention_2", "flex_attention"):
        with pytest.raises(ValueError, match=re.escape(f"{name!r} does not exist for relative attention")):
            RCMHAForCausalLM._from_config(RCMHAConfig(**SMALL), attn_implementation=name)
    assert make().config._attn_implementation == "chunked"
    assert make(attention_type="mha").config._attn_implementation == "sdpa"
    assert make(attention_type="mha", position_scheme="alibi").config._attn_implementation == "chunked"


@torch.no_grad()
def test_the_implementation_of_a_model_can_be_changed_and_nonsense_is_refused() -> None:
    model = make()
    expected = model(IDS).logits
    model.set_attn_implementation("eager")
    assert model.config._attn_implementation == "eager"
    torch.testing.assert_close(model(IDS).logits, expected, atol=1e-5, rtol=0)
    with pytest.raises(ValueError, match="implementation 'nonsense' does not exist for relative attention"):
        model.set_attn_implementation("nonsense")


@pytest.mark.parametrize("attention_type", TYPES)
def test_training_under_autocast_is_near_full_precision(attention_type: str) -> None:
    gradients = []
    for enabled in (False, True):
        model = make(attention_type=attention_type, initializer_range=0.1).train()
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            loss = model(IDS, labels=IDS).loss
        loss.backward()
        gradients.append(torch.cat([p.grad.flatten() for p in model.parameters()]))
    exact, rounded = gradients
    assert (exact - rounded).norm() < 0.03 * exact.norm()


@torch.no_grad()
def test_a_window_bounds_the_reach_and_not_the_segment() -> None:
    model = make(mem_len=4, max_position_embeddings=8)
    torch.testing.assert_close(over_segments(model, [6, 6, 6, 6]), model(IDS).logits, atol=1e-5, rtol=0)


def test_documents_may_be_as_long_as_the_tables() -> None:
    model = make(mem_len=None, max_position_embeddings=6)
    model(IDS[:1, :12], position_ids=torch.arange(6).repeat(2)[None])
    with pytest.raises(ValueError, match="reaches over 7 keys"):
        model(IDS[:1, :14], position_ids=torch.arange(7).repeat(2)[None])


@pytest.mark.parametrize("fields", [{}, {"mem_len": None}, {"attention_type": "rmha"}])
@torch.no_grad()
def test_repeated_and_selected_rows_of_a_memory_go_on(fields: dict[str, Any]) -> None:
    model = make(**fields)

    def fill(rows: list[int]) -> DynamicCache:
        cache = DynamicCache(config=model.config)
        model(IDS[rows, :7], past_key_values=cache)
        return cache

    cache = fill([0, 1])
    cache.batch_repeat_interleave(2)
    cache.batch_select_indices(torch.tensor([2]))
    found, expected = (model(IDS[1:, 7:12], past_key_values=filled).logits for filled in (cache, fill([1])))
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("kind", ["segment", "static"])
@torch.no_grad()
def test_memory_that_was_reset_is_like_new(kind: str) -> None:
    model = make(memory_type="segment" if kind == "segment" else "streaming")

    def new() -> Any:
        return StaticCache(model.config, max_cache_len=40) if kind == "static" else DynamicCache(config=model.config)

    memory, other = new(), IDS.flip(1)
    model(IDS, past_key_values=memory)
    memory.reset()
    assert memory.get_seq_length() == 0
    found, expected = (model(other, past_key_values=cache).logits for cache in (memory, new()))
    torch.testing.assert_close(found, expected)


@torch.no_grad()
def test_tokens_that_no_convolution_reads_can_be_taken_back() -> None:
    model = make(conv_kernel_size=1, mem_len=14)
    cache = DynamicCache(config=model.config)
    model(IDS[:, :8], past_key_values=cache)
    cache.crop(-3)
    found = model(IDS[:, 5:9], past_key_values=cache).logits
    torch.testing.assert_close(found, model(IDS[:, :9]).logits[:, 5:], atol=1e-5, rtol=0)


@crops_static_caches
@torch.no_grad()
def test_a_static_memory_that_has_moved_takes_no_tokens_back() -> None:
    model = make(attention_type="mha", mem_len=5)
    cache = StaticCache(config=model.config, max_cache_len=24)
    model(IDS[:, :6], past_key_values=cache)
    cache.crop(-1)
    model(IDS[:, 5:8], past_key_values=cache)
    with pytest.raises(RuntimeError, match="a static cache whose window has moved cannot take tokens back; use a Dyn"):
        cache.crop(-1)


def test_an_unknown_layer_of_a_cache_is_refused() -> None:
    model = make()
    cache = DynamicCache(config=model.config)
    cache.layers[0] = type("OddLayer", (type(cache.layers[0]),), {})(5)
    with pytest.raises(ValueError, match="a OddLayer cannot carry memory"):
        model(IDS, past_key_values=cache)
