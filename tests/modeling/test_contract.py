"""What Transformers' users rely on: losses, slices, recorded outputs, saving, loading, clear errors."""

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from cases.models import make_model
from safetensors.torch import load_file, save_file
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForQuestionAnswering,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    DynamicCache,
    PreTrainedModel,
)
from transformers.masking_utils import AttentionMaskInterface
from transformers.modeling_utils import AttentionInterface

from dynattn import (
    DCBartConfig,
    DCBartForConditionalGeneration,
    DCFormerForCausalLM,
    DCModernBertConfig,
    DCModernBertForMaskedLM,
    RCMHAConfig,
    RCMHAForCausalLM,
)
from dynattn.modeling.caches.names import CACHE_NAME, NEW_NAME
from dynattn.modeling.layers.attention_interface import attention_function
from dynattn.modeling.layers.attention_masks import compact_mask
from dynattn.modeling.ops.dcmha.eager import dcmha_eager

TINY = {"vocab_size": 97, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
PLAIN = {"compose_pre": False, "compose_post": False}
IDS = torch.randint(0, 97, (2, 14), generator=torch.Generator().manual_seed(7))


def test_loss_is_the_mean_or_the_sum_over_the_given_count() -> None:
    model = make_model()
    labels = IDS.clone()
    labels[0, :5] = -100
    output = model(IDS, labels=labels)
    targets = labels[:, 1:].flatten()
    expected = F.cross_entropy(output.logits[:, :-1].flatten(0, 1), targets, ignore_index=-100)
    torch.testing.assert_close(output.loss, expected)
    count = int((targets != -100).sum())
    scaled = model(IDS, labels=labels, num_items_in_batch=torch.tensor(3 * count)).loss
    torch.testing.assert_close(scaled, expected / 3)


def test_the_padding_token_learns_where_it_is_also_the_end_of_text() -> None:
    model = make_model(pad_token_id=3, eos_token_id=3)
    ids = IDS.clone()
    ids[:, 5] = 3
    model(ids, labels=ids).loss.backward()
    assert model.get_input_embeddings().weight.grad[3].abs().max() > 0


def test_logits_to_keep() -> None:
    model = make_model()
    with torch.no_grad():
        logits = model(IDS).logits
        torch.testing.assert_close(model(IDS, logits_to_keep=3).logits, logits[:, -3:])
        chosen = torch.tensor([0, 4, 9])
        torch.testing.assert_close(model(IDS, logits_to_keep=chosen).logits, logits[:, chosen])


def test_recorded_outputs() -> None:
    model = make_model(attn_implementation="eager")
    with torch.no_grad():
        output = model(IDS, output_hidden_states=True, output_attentions=True)
    assert [tuple(state.shape) for state in output.hidden_states] == [(2, 14, 48)] * 4
    assert [tuple(weights.shape) for weights in output.attentions] == [(2, 6, 14, 14)] * 3
    future = torch.ones(14, 14, dtype=torch.bool).triu(1)
    outside_window = torch.ones(14, 14, dtype=torch.bool).tril(-9)
    for weights, layer_type in zip(output.attentions, model.config.layer_types, strict=True):
        assert weights[..., future].abs().max() == 0
        assert (weights[..., outside_window].abs().max() == 0) == (layer_type == "sliding_attention")
        assert (weights.sum(-1) - 1).abs().max() > 1e-3  # composed rows do not sum to one


def test_inputs_embeds_and_prepared_masks() -> None:
    model = make_model()
    with torch.no_grad():
        expected = model(IDS).logits
        torch.testing.assert_close(model(inputs_embeds=model.get_input_embeddings()(IDS)).logits, expected)
        distance = torch.arange(14)[:, None] - torch.arange(14)
        causal = (distance >= 0)[None, None].expand(2, 1, -1, -1)
        masks = {"full_attention": causal, "sliding_attention": causal & (distance < 9)}
        torch.testing.assert_close(model(IDS, attention_mask=masks).logits, expected)


def test_gradient_checkpointing_gives_the_same_gradients() -> None:
    gradients = []
    for checkpointing in (False, True):
        model = make_model().train()
        if checkpointing:
            model.gradient_checkpointing_enable()
        model(IDS, labels=IDS).loss.backward()
        gradients.append({name: p.grad for name, p in model.named_parameters()})
    for name, gradient in gradients[0].items():
        torch.testing.assert_close(gradients[1][name], gradient)


def test_tokens_in_a_cache_are_not_dropped_by_gradient_checkpointing_without_a_word() -> None:
    model, cache = make_model(), DynamicCache()
    with torch.no_grad():
        expected = model(IDS).logits[:, 8:]
        model(IDS[:, :8], past_key_values=cache)
    model.train().gradient_checkpointing_enable()
    with pytest.raises(ValueError, match=r"checkpointing drops caches in training; call model.eval\(\) first"):
        model(IDS[:, 8:], past_key_values=cache)
    model(IDS, past_key_values=DynamicCache())  # an empty one holds nothing that could be lost
    if CACHE_NAME == NEW_NAME:  # from this version on Transformers keeps caches where no gradient is computed
        with torch.no_grad():
            torch.testing.assert_close(model(IDS[:, 8:], past_key_values=cache).logits, expected)


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("static", [False, True])
def test_gradients_have_the_strides_of_their_weights(groups: int, static: bool) -> None:
    """DistributedDataParallel copies gradients that have others, and warns."""
    model = make_model(compose_groups=groups, compose_static=static)
    model(IDS, labels=IDS).loss.backward()
    weights = dict(model.named_parameters())
    assert {name for name, weight in weights.items() if weight.grad.stride() != weight.stride()} == set()


@pytest.mark.parametrize("tied", [False, True])
def test_save_and_load(tmp_path: Path, tied: bool) -> None:
    model = make_model(tie_word_embeddings=tied)
    model.save_pretrained(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} >= {"config.json", "model.safetensors"}
    assert "lm_head.weight" in load_file(tmp_path / "model.safetensors") or tied
    loaded, info = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert type(loaded) is DCFormerForCausalLM
    assert not any(info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    with torch.no_grad():
        assert torch.equal(loaded.eval()(IDS).logits, model(IDS).logits)
    for name, buffer in model.named_buffers():
        assert torch.equal(dict(loaded.named_buffers())[name], buffer)
    half = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    assert {p.dtype for p in half.parameters()} == {torch.bfloat16}
    assert half(IDS).logits.isfinite().all()


def test_every_auto_class_loads_the_checkpoint(tmp_path: Path) -> None:
    make_model(pad_token_id=0).save_pretrained(tmp_path)
    assert AutoConfig.from_pretrained(tmp_path).model_type == "dcformer"
    assert AutoModel.from_pretrained(tmp_path)(IDS).last_hidden_state.shape == (2, 14, 48)
    for auto, shape in (
        (AutoModelForSequenceClassification, (2, 2)),
        (AutoModelForTokenClassification, (2, 14, 2)),
    ):
        assert auto.from_pretrained(tmp_path)(IDS).logits.shape == shape
    assert AutoModelForQuestionAnswering.from_pretrained(tmp_path)(IDS).end_logits.shape == (2, 14)


def test_a_new_model_is_initialised_as_the_configuration_says() -> None:
    model = make_model(hidden_size=240, intermediate_size=480, initializer_range=0.05)
    for name, parameter in model.named_parameters():
        if name.endswith(("norm.weight", "layernorm.weight")):
            assert torch.equal(parameter, torch.ones_like(parameter))
        elif "composition" not in name:
            assert parameter.std().item() == pytest.approx(0.05, rel=0.1), name


def test_a_checkpoint_without_composition_weights_gets_fresh_ones(tmp_path: Path) -> None:
    make_model(**PLAIN).save_pretrained(tmp_path)
    config = AutoConfig.from_pretrained(tmp_path, compose_pre=True, compose_post=True, compose_init_scale=0)
    plain = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="eager")
    model = AutoModelForCausalLM.from_pretrained(tmp_path, config=config, attn_implementation="eager")
    assert torch.equal(model(IDS).logits, plain(IDS).logits)
    assert all(p.isfinite().all() for p in model.parameters())


def test_a_truncated_checkpoint_is_an_error(tmp_path: Path) -> None:
    make_model().save_pretrained(tmp_path)
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])
    with pytest.raises(Exception, match=r"(?i)incomplete|invalid|file not fully covered"):
        AutoModelForCausalLM.from_pretrained(tmp_path)


def test_weights_that_do_not_fit_the_configuration_are_an_error(tmp_path: Path) -> None:
    make_model().save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    weights["model.norm.weight"] = torch.ones(7)
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(RuntimeError, match="mismatch"):
        AutoModelForCausalLM.from_pretrained(tmp_path)


def test_config_survives_json(tmp_path: Path) -> None:
    config = make_model(mgate_dim=5, compose_groups=2, compose_static=True).config
    config.save_pretrained(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["model_type"] == "dcformer"
    assert AutoConfig.from_pretrained(tmp_path).to_json_string() == config.to_json_string()


BAD_CALLS = [
    ({}, "give exactly one of input_ids and inputs_embeds"),
    ({"input_ids": IDS, "inputs_embeds": torch.zeros(2, 14, 48)}, "exactly one"),
    ({"input_ids": IDS[0]}, r"input_ids must be \[batch, length\] with at least one token, not of shape \(14,\)"),
    ({"input_ids": IDS[:, :0]}, r"at least one token, not of shape \(2, 0\)"),
    ({"inputs_embeds": torch.zeros(14, 48)}, r"inputs_embeds must be \[batch, length, hidden_size\]"),
    ({"input_ids": IDS, "attention_mask": torch.ones(3, 14)}, r"\(3, 14\) does not fit 2 rows of 14 tokens"),
    ({"input_ids": IDS, "attention_mask": torch.ones(2, 13)}, r"\(2, 13\) does not fit 2 rows of 14 tokens"),
    ({"input_ids": IDS, "attention_mask": torch.tensor([[1] * 14, [0] * 14])}, r"hides every token of rows \[1\]"),
    ({"input_ids": IDS, "cu_seq_lens_q": torch.tensor([0, 14])}, "single packed row; it goes from 0 to 14 for 2 rows"),
    ({"input_ids": IDS[:1], "cu_seq_lens_q": torch.tensor([0, 9])}, "it goes from 0 to 9 for 1 rows of 14 tokens"),
    (
        {"input_ids": IDS, "attention_mask": torch.ones(2, 1, 14, 14, dtype=torch.long)},
        "mask is torch.int64; use a bool",
    ),
    ({"input_ids": IDS, "labels": IDS[:, :5]}, r"labels of shape \(2, 5\) do not fit 2 rows of 14 tokens"),
]


@pytest.mark.parametrize(("arguments", "message"), BAD_CALLS, ids=range(len(BAD_CALLS)))
def test_bad_calls_say_what_is_wrong(arguments: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_model()(**arguments)


def test_attention_implementations_that_cannot_serve_are_refused() -> None:
    with pytest.raises(ValueError, match="'sdpa' cannot compose heads; use 'eager'"):
        make_model(attn_implementation="sdpa")
    for name in ("nonsense", "flash_attention_2", "flex_attention", "paged|eager"):
        with pytest.raises(ValueError, match=re.escape(f"{name!r} cannot compose heads; use 'eager'")):
            make_model(attn_implementation=name)
    with pytest.raises(ValueError, match="nonsense"):
        make_model(attn_implementation="nonsense", **PLAIN)
    assert make_model().config._attn_implementation == "chunked"


@pytest.mark.parametrize(
    ("make", "name", "message"),
    [
        (make_model, "sdpa", "'sdpa' cannot compose heads"),
        (lambda: make_model(**PLAIN, position_scheme="alibi"), "sdpa", "would ignore the tables"),
        (lambda: RCMHAForCausalLM(RCMHAConfig(**TINY)), "flex_attention", "'flex_attention' does not exist for"),
        (lambda: DCModernBertForMaskedLM(DCModernBertConfig(**TINY, pad_token_id=0)), "sdpa", "'sdpa' cannot compose"),
        (lambda: DCBartForConditionalGeneration(DCBartConfig(**TINY)), "sdpa", "'sdpa' cannot compose heads"),
    ],
    ids=["dcformer", "alibi", "rcmha", "dcmodernbert", "dcbart"],
)
def test_an_implementation_that_is_set_in_the_configuration_of_a_finished_model_is_checked(
    make: Callable[[], PreTrainedModel], name: str, message: str
) -> None:
    model = make()
    model.config._attn_implementation = name
    with pytest.raises(ValueError, match=message):
        model(input_ids=IDS, labels=IDS)


def test_a_function_that_others_register_with_transformers_may_compose_heads() -> None:
    AttentionInterface.register("of_others", attention_function(dcmha_eager))
    AttentionMaskInterface.register("of_others", compact_mask)
    model = make_model(attn_implementation="eager")
    with torch.no_grad():
        expected = model(IDS).logits
        model.config._attn_implementation = "of_others"
        assert torch.equal(model(IDS).logits, expected)


def test_attention_maps_come_from_any_implementation() -> None:
    mask = torch.ones_like(IDS)
    mask[1, :4] = 0
    for switches in ({}, PLAIN):
        with torch.no_grad():
            expected = make_model(attn_implementation="eager", **switches)(IDS, mask, output_attentions=True)
            model = make_model(**switches)
            output = model(IDS, mask, output_attentions=True)
            from_config = make_model(**switches, output_attentions=True)(IDS, mask)
        assert len(from_config.attentions) == model.config.num_hidden_layers
        assert model.config._attn_implementation in ("chunked", "sdpa")
        for weights, eager_weights in zip(output.attentions, expected.attentions, strict=True):
            torch.testing.assert_close(weights, eager_weights, atol=1e-5, rtol=0)
