"""RCMHA as an encoder-decoder: the official attention in both directions, convolutions, positions, bad fields."""

import copy
from typing import Any

import pytest
import torch
from cases.golden import read_case, tensors_under
from cases.rcmha import our_attention
from cases.seq2seq import SMALL, make_model, random_tokens, whole
from huggingface_hub.errors import StrictDataclassError

from dynattn import RCMHASeq2SeqConfig
from dynattn.modeling.layers.relative_attention import RCMHAAttention
from dynattn.modeling.layers.segment import Segment
from dynattn.modeling.ops.relative.attention import RELATIVE_IMPLEMENTATIONS


@pytest.mark.parametrize("implementation", ["eager", "sdpa", "chunked"])
@pytest.mark.parametrize("name", ["rcmha_bidirectional_q9", "rmha_bidirectional_q9"])
def test_the_encoders_attention_is_the_official_one_without_a_mask(name: str, implementation: str) -> None:
    meta, tensors = read_case(name)
    config = RCMHASeq2SeqConfig(
        attention_type=name.partition("_")[0],
        hidden_size=tensors["x"].shape[-1],
        num_attention_heads=meta["heads"],
        max_position_embeddings=meta["P"],
        encoder_conv_is_causal=True,
        attn_implementation=implementation,
    )
    attention = RCMHAAttention(config, layer_idx=0, is_causal=False).double()
    rows = config.max_position_embeddings * 2 - 1

    def ours(prefix: str) -> dict[str, torch.Tensor]:
        """The tensors under a prefix; the official tables have one more row, for a distance that is never reached."""
        named = (our_attention(*item, later=True) for item in tensors_under(tensors, prefix).items())
        return {key: value[:rows] if key.startswith("position_") else value for key, value in named}

    attention.load_state_dict(ours("sd."))
    x = tensors["x"].transpose(0, 1).requires_grad_()
    output, _ = attention(x, Segment(x.shape[1]))
    torch.testing.assert_close(output.transpose(0, 1), tensors["out"], atol=1e-13, rtol=0)
    (output.transpose(0, 1) * tensors["weight_of_output"]).sum().backward()
    torch.testing.assert_close(x.grad.transpose(0, 1), tensors["grad.x"], atol=1e-12, rtol=0)
    expected = ours("grad.sd.")
    for key, parameter in attention.named_parameters():
        torch.testing.assert_close(parameter.grad, expected[key], atol=1e-12, rtol=0)


@pytest.mark.parametrize("kind", ["rcmha", "rmha", "mdha", "mha"])
@torch.no_grad()
def test_the_encoder_reads_in_both_directions_and_in_order(kind: str) -> None:
    encoder = make_model(kind).get_encoder()
    source = random_tokens(1, 9)
    plain = encoder(input_ids=source).last_hidden_state
    changed = source.clone()
    changed[0, -1] = source[0, -1] % 80 + 3
    assert (encoder(input_ids=changed).last_hidden_state - plain)[0, 0].abs().max() > 1e-4
    turned = encoder(input_ids=source.flip(1)).last_hidden_state.flip(1)
    assert (turned - plain).abs().max() > 1e-3


@torch.no_grad()
def test_without_positions_and_convolutions_a_source_has_no_order() -> None:
    model = make_model("mha", position_scheme="none")
    source, target, order = random_tokens(2, 9), random_tokens(2, 5), torch.randperm(9)
    torch.testing.assert_close(whole(model, source[:, order], target), whole(model, source, target), atol=1e-4, rtol=0)


@pytest.mark.parametrize(("causal", "reach"), [(False, 1), (True, 0)])
@torch.no_grad()
def test_the_encoders_convolutions_are_centred(causal: bool, reach: int) -> None:
    """With zero queries every token attends to all alike; only its own projections tell which others it read."""
    attention = make_model("rcmha", encoder_conv_is_causal=causal).model.encoder.layers[0].self_attn
    x = torch.randn(1, 9, 48)
    changed = x.clone()
    changed[0, 4] += 1
    difference = (attention.project("k", changed) - attention.project("k", x)).abs().amax((0, 1, 3))
    assert difference.nonzero().flatten().tolist() == list(range(4 - reach, 4 - reach + 3))


@torch.no_grad()
def test_relative_tables_matter_in_both_directions() -> None:
    model = make_model("rmha")
    source, target = random_tokens(2, 9), random_tokens(2, 5)
    plain = whole(model, source, target)
    for rows in (slice(0, 63), slice(64, None)):  # later keys, and earlier ones
        changed = copy.deepcopy(model)
        changed.model.encoder.layers[0].self_attn.position_embeddings[rows] = 0
        assert (whole(changed, source, target) - plain).abs().max() > 1e-3


@torch.no_grad()
def test_only_encoders_without_convolutions_read_packed_documents() -> None:
    """A convolution reads the neighbors of a token, whatever document they belong to."""
    source, positions = random_tokens(1, 9), torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4]])
    with pytest.raises(ValueError, match="position_ids restart at token 4, where convolutions would read across"):
        make_model("rcmha").get_encoder()(input_ids=source, position_ids=positions)
    for kind in ("rmha", "mha"):
        encoder = make_model(kind).get_encoder()
        packed = encoder(input_ids=source, position_ids=positions).last_hidden_state
        alone = [encoder(input_ids=part).last_hidden_state for part in source.split([4, 5], dim=1)]
        torch.testing.assert_close(packed, torch.cat(alone, dim=1), atol=1e-4, rtol=0)


@torch.no_grad()
def test_encoders_take_one_prepared_mask_for_each_layer_type() -> None:
    source, seen = random_tokens(2, 9), torch.ones(2, 9, dtype=torch.bool)
    seen[0, 7:] = False
    complete = (seen[:, None, :, None] & seen[:, None, None, :]) | torch.eye(9, dtype=torch.bool)
    complete[0, :, 7:] = False
    for kind in ("rcmha", "rmha"):
        encoder = make_model(kind).get_encoder()
        expected = encoder(input_ids=source, attention_mask=seen.long()).last_hidden_state
        prepared = encoder(input_ids=source, attention_mask={"full_attention": complete}).last_hidden_state
        torch.testing.assert_close(prepared[seen], expected[seen])
        whole = encoder(input_ids=source, attention_mask={"full_attention": None}).last_hidden_state
        torch.testing.assert_close(whole, encoder(input_ids=source).last_hidden_state)


def test_an_encoder_with_position_tables_runs_in_chunks_and_gives_what_the_definition_gives() -> None:
    """The source is long enough for chunks. Attention without tables leaves the work to PyTorch's kernels."""
    model = make_model("rcmha", num_hidden_layers=1, max_position_embeddings=256).double()
    encoder, source = model.get_encoder(), random_tokens(2, 200)
    mask = torch.ones_like(source)
    mask[0, 150:] = 0
    weight_of_output = torch.randn(2, 200, 48, dtype=torch.float64) * mask[..., None]
    results = {}
    for implementation in ("eager", "chunked"):
        model.set_attn_implementation(implementation)
        model.zero_grad()
        output = encoder(input_ids=source, attention_mask=mask).last_hidden_state
        (output * weight_of_output).sum().backward()
        gradients = [parameter.grad for parameter in encoder.parameters() if parameter.grad is not None]
        results[implementation] = [output.detach() * mask[..., None], *gradients]
    # Some gradients are zero but for rounding, as that of the keys' bias, so the largest one sets the tolerance.
    noise = 1e-14 * max(float(truth.abs().max()) for truth in results["eager"])
    for ours, truth in zip(results["chunked"], results["eager"], strict=True):
        torch.testing.assert_close(ours, truth, atol=noise, rtol=0)
    assert encoder.layers[0].self_attn.attention_op(None) is RELATIVE_IMPLEMENTATIONS["chunked"]
    assert model.model.decoder.layers[0].cross_attn.attention_op(None) is RELATIVE_IMPLEMENTATIONS["sdpa"]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"max_position_embeddings": 1},
            r"max_position_embeddings \(1\) must be at least 2 where attention is relative",
        ),
        ({"conv_kernel_size": 4}, r"conv_kernel_size \(4\) must be odd: the encoder's convolutions are centred"),
        ({"attention_type": "xl"}, "attention_type 'xl' does not exist"),
        ({"attention_type": "mha", "position_scheme": "rope"}, "position_scheme 'rope' does not exist"),
        ({"position_scheme": "learned"}, "'rcmha' has relative positions of its own"),
    ],
    ids=str,
)
def test_bad_configurations_say_what_is_wrong(fields: dict[str, Any], message: str) -> None:
    shared = {name: value for name, value in SMALL.items() if name != "forced_eos_token_id"}
    with pytest.raises((ValueError, StrictDataclassError), match=message):
        RCMHASeq2SeqConfig(**{**shared, **fields})


def test_even_kernels_are_fine_where_nothing_is_centred() -> None:
    assert RCMHASeq2SeqConfig(conv_kernel_size=4, attention_type="mha", position_scheme="none").decoder_layers == 4
    assert RCMHASeq2SeqConfig(conv_kernel_size=4, encoder_conv_is_causal=True).later_conv_tokens == 0


@pytest.mark.parametrize("attention_type", ["rcmha", "mha"])
@pytest.mark.parametrize("qk_bias", [True, False])
def test_given_sizes_and_biases_take_the_place_of_those_that_follow_from_others(
    attention_type: str, qk_bias: bool
) -> None:
    model = make_model(attention_type, head_dim=10, decoder_layers=1, qk_bias=qk_bias).model
    attention = model.encoder.layers[0].self_attn
    assert attention.q_proj.out_features == 10 * model.config.num_attention_heads
    assert (attention.q_proj.bias is not None) == qk_bias
    assert len(model.decoder.layers) == 1 < len(model.encoder.layers)


@pytest.mark.parametrize("kind", ["rcmha", "rmha", "mdha", "mha"])
def test_queries_and_keys_of_cross_attention_always_have_biases(kind: str) -> None:
    """It has no position tables, whose biases take the place of those."""
    names = {name for name, _ in make_model(kind).named_parameters() if name.endswith(("q_proj.bias", "k_proj.bias"))}
    assert {f"model.decoder.layers.0.cross_attn.{part}_proj.bias" for part in "qk"} <= names
    assert ("model.decoder.layers.0.self_attn.q_proj.bias" in names) == (kind in ("mdha", "mha"))


@torch.no_grad()
def test_positions_of_a_source_count_from_its_start_unless_a_mask_is_given() -> None:
    encoder, source = make_model("rcmha").get_encoder(), random_tokens(1, 6)
    expected, count = encoder(input_ids=source).last_hidden_state, torch.arange(6)[None]
    torch.testing.assert_close(encoder(input_ids=source, position_ids=count).last_hidden_state, expected)
    masked = {"position_ids": count % 3, "attention_mask": torch.ones_like(source)}
    torch.testing.assert_close(encoder(input_ids=source, **masked).last_hidden_state, expected)
    with pytest.raises(ValueError, match="position_ids reach from -1"):
        encoder(input_ids=source, position_ids=count - 1)
