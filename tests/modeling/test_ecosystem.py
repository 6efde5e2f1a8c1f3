"""Adapters, compiled training and replaced linear layers leave the composition as it is."""

import copy
import logging
from pathlib import Path

import pytest
import torch
from accelerate import cpu_offload
from cases.models import assert_same_gradients, make_model
from peft import LoraConfig, PrefixTuningConfig, VeraConfig, get_peft_model
from torch import nn
from torch.nn import functional as F
from transformers import PreTrainedModel, Trainer, TrainingArguments

from dynattn import mixer_fields
from dynattn.families import FAMILIES, Family
from dynattn.modeling.layers.head_composition import DynamicComposition
from dynattn.modeling.ops.sdpa import plain_attention

IDS = torch.randint(0, 97, (4, 14), generator=torch.Generator().manual_seed(7))


def composition_of(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in model.named_parameters() if "composition" in name}


def test_lora_trains_adapters_only_and_merges() -> None:
    model = make_model()
    before = composition_of(model)
    adapted = get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"))
    optimizer = torch.optim.SGD([p for p in adapted.parameters() if p.requires_grad], lr=0.5)
    losses = []
    for _ in range(4):
        loss = adapted(input_ids=IDS, labels=IDS).loss
        losses.append(loss.item())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert losses[-1] < losses[0]
    with torch.no_grad():
        expected = adapted(input_ids=IDS).logits
        merged = adapted.merge_and_unload()
        torch.testing.assert_close(merged(IDS).logits, expected, atol=1e-4, rtol=0)
    after = composition_of(merged)
    assert all(torch.equal(after[name], before[name]) for name in before)


@pytest.mark.parametrize("family", FAMILIES.values(), ids=FAMILIES)
def test_lora_knows_which_layers_to_adapt(family: Family) -> None:
    model = family.load_model_class(family.main_auto_class)(family.load_config_class().from_size("tiny"))
    adapted = get_peft_model(model, LoraConfig(r=2))
    targets = {name.split(".")[-4] for name, p in adapted.named_parameters() if p.requires_grad}
    assert targets == {"q_proj", "v_proj"}


def test_other_adapters_of_the_same_layers_know_them_too() -> None:
    adapted = get_peft_model(make_model(), VeraConfig(r=2))
    assert adapted.peft_config["default"].target_modules == {"q_proj", "v_proj"}


@pytest.mark.parametrize("name", ["dcformer", "rcmha"])
def test_a_prefix_of_keys_and_values_is_refused_and_what_replaces_it_is_named(name: str) -> None:
    family = FAMILIES[name]
    model = family.load_model_class(family.main_auto_class)(family.load_config_class().from_size("tiny"))
    adapted = get_peft_model(model, PrefixTuningConfig(num_virtual_tokens=4, task_type="CAUSAL_LM"))
    with pytest.raises(ValueError, match=r"the cache holds 4 tokens without .*; with PEFT, use prompt tuning"):
        adapted(input_ids=IDS)


@pytest.mark.parametrize("family", ["dcformer", "dcmodernbert"])
def test_layers_that_are_added_run_only_with_their_types(family: str) -> None:
    known = FAMILIES[family]
    config = known.load_config_class().from_size("tiny", num_hidden_layers=2, vocab_size=97, pad_token_id=None)
    model = known.load_model_class("AutoModel")(config).eval()
    before = model(IDS)[0]
    model.layers.extend(copy.deepcopy(list(model.layers)))
    model.config.num_hidden_layers = 4
    with pytest.raises(ValueError, match="layer_types in the configuration has 2 entries for 4 layers"):
        model(IDS)
    model.config.layer_types = [*model.config.layer_types, *model.config.layer_types]
    assert not torch.allclose(model(IDS)[0], before)


@pytest.mark.parametrize("name", ["dcformer", "dcbart", "dcvit"])
def test_backward_hooks_see_the_composition(name: str) -> None:
    family, seen = FAMILIES[name], set()
    model = family.load_model_class(family.main_auto_class)(family.load_config_class().from_size("tiny"))
    generators = {name: module for name, module in model.named_modules() if isinstance(module, DynamicComposition)}
    for path, generator in generators.items():
        generator.register_full_backward_hook(lambda *_, path=path: seen.add(path))
    given = {"input_ids": IDS[:1], "decoder_input_ids": IDS[1:2]} if name == "dcbart" else {"input_ids": IDS}
    if name == "dcvit":
        given = {"pixel_values": torch.randn(1, 3, *model.config.image_shape)}
    model(**given)[0].sum().backward()
    assert seen == set(generators)


@pytest.mark.parametrize("name", [name for name in FAMILIES if name != "dcvit"])
def test_gradients_of_each_example_alone_see_its_padding(name: str) -> None:
    """By transforms of functions, as for private training: they cannot read the values of a mask or of labels."""
    family, mask = FAMILIES[name], torch.ones_like(IDS)
    mask[0, :5] = 0
    config = family.load_config_class().from_size("tiny", vocab_size=97, pad_token_id=0, initializer_range=0.2)
    model = family.load_model_class(family.main_auto_class)(config).eval()
    model.set_attn_implementation("chunked")  # masks of `sdpa` are Transformers', which reads values
    weights = dict(model.named_parameters())

    def loss(weights: dict[str, torch.Tensor], *example: torch.Tensor) -> torch.Tensor:
        given = dict(zip(("input_ids", "attention_mask", "labels"), (one[None] for one in example), strict=True))
        return torch.func.functional_call(model, weights, (), given).loss

    found = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0, 0, 0))(weights, IDS[:2], mask[:2], IDS[2:])
    for index in range(2):
        alone = torch.autograd.grad(loss(weights, IDS[index], mask[index], IDS[index + 2]), list(weights.values()))
        assert_same_gradients([grads[index] for grads in found.values()], list(alone))


@pytest.mark.parametrize("name", [name for name in FAMILIES if name != "dcvit"])
def test_models_run_on_the_meta_device_with_a_mask(name: str) -> None:
    """As tools do that count operations or plan memory: there are no values to read."""
    family, ids = FAMILIES[name], IDS.to("meta")
    config = family.load_config_class().from_size("tiny", vocab_size=97, pad_token_id=0)
    model = family.load_model_class(family.main_auto_class)(config).to("meta")
    model.set_attn_implementation("chunked")  # masks of `sdpa` are Transformers', which reads values
    model(input_ids=ids, attention_mask=torch.ones_like(ids), labels=ids).loss.backward()
    assert all(p.grad is None or p.grad.is_meta for p in model.parameters())


def test_a_decoder_with_learned_positions_runs_on_the_meta_device() -> None:
    model, ids = make_model(position_scheme="learned").to("meta"), IDS.to("meta")
    assert model(ids, position_ids=torch.arange(14, device="meta")[None]).logits.shape == (4, 14, 97)


@pytest.mark.parametrize("auto_class", ["AutoModelForSequenceClassification", "AutoModelForTokenClassification"])
def test_the_trainer_divides_a_classifiers_loss_by_the_number_of_accumulated_batches(
    auto_class: str, tmp_path: Path
) -> None:
    known = FAMILIES["dcformer"]
    config = known.load_config_class().from_size("tiny", vocab_size=97, num_labels=3)
    trainer = Trainer(known.load_model_class(auto_class)(config), TrainingArguments(str(tmp_path), report_to=[]))
    assert not trainer.model_accepts_loss_kwargs


def test_a_push_without_code_is_told(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    pushed = []
    monkeypatch.setattr(PreTrainedModel, "push_to_hub", lambda self, repo_id: pushed.append(repo_id))
    monkeypatch.setattr(logging.getLogger("transformers"), "propagate", True)
    model = make_model()
    model.push_to_hub("me/model")
    assert "me/model gets weights and configuration but no code" in caplog.text
    assert "`dynattn publish FOLDER --repo NAME`" in caplog.text
    caplog.clear()
    model.config.auto_map = {"AutoConfig": "configuration_dcformer.DCFormerConfig"}
    model.push_to_hub("me/other")
    assert (pushed, caplog.text) == (["me/model", "me/other"], "")


def test_lora_can_target_the_whole_composition_as_saved_modules() -> None:
    config = LoraConfig(r=2, target_modules=["q_proj"], modules_to_save=["composition"], task_type="CAUSAL_LM")
    adapted = get_peft_model(make_model(), config)
    adapted(input_ids=IDS, labels=IDS).loss.backward()
    trained = [name for name, p in adapted.named_parameters() if p.requires_grad and p.grad is not None]
    assert any("composition" in name for name in trained)


@pytest.mark.parametrize("family", FAMILIES.values(), ids=FAMILIES)
def test_every_main_model_is_spread_over_devices_when_it_is_loaded(family: Family, tmp_path: Path) -> None:
    """Transformers finds the modules that tied weights belong to by parts of their names."""
    model_class = family.load_model_class(family.main_auto_class)
    model = model_class(family.load_config_class().from_size("tiny"))
    model.save_pretrained(tmp_path)
    loaded = model_class.from_pretrained(tmp_path, device_map="auto", max_memory={"cpu": 10**9})
    for name, weight in model.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], weight), name


@torch.no_grad()
@pytest.mark.parametrize("mixer", ["dcmha", "talking_heads", "differential"])
def test_offloaded_weights_are_read_where_they_are_on_the_device(mixer: str) -> None:
    """A module whose weights are offloaded, as with `device_map="auto"`, has them only while it is called."""
    model = make_model(**{"num_key_value_heads": 2, **mixer_fields(mixer), "compose_init_scale": 40.0}).double()
    expected = model(IDS).logits
    offloaded = cpu_offload(model, execution_device=torch.device("cpu"))
    assert all(p.is_meta for p in model.parameters())
    torch.testing.assert_close(offloaded(IDS).logits, expected, atol=1e-12, rtol=1e-9)


def test_tools_that_run_a_layer_by_itself_know_its_arguments() -> None:
    """AutoRound records the arguments of layers, and joins all but those it knows as tensors of a batch."""
    model, seen = make_model(), []
    for layer in model.model.layers:
        layer.register_forward_pre_hook(lambda _, args, kwargs: seen.append(kwargs), with_kwargs=True)
    model(IDS, use_cache=False)
    assert len(seen) == len(model.model.layers)
    assert {name for given in seen for name, value in given.items() if isinstance(value, tuple)} == {
        "position_embeddings"
    }


def test_replacing_linear_layers_leaves_the_composition() -> None:
    """As quantization does: int8 weights for every nn.Linear, nothing else touched."""
    model = make_model(initializer_range=0.05)
    before = composition_of(model)
    with torch.no_grad():
        expected = model(IDS).logits
        quantized = torch.ao.quantization.quantize_dynamic(model, {nn.Linear}, dtype=torch.qint8)
        logits = quantized(IDS).logits
    assert not [name for name, module in quantized.named_modules() if type(module) is nn.Linear]
    assert all(torch.equal(value, before[name]) for name, value in composition_of(quantized).items())
    assert (logits - expected).abs().mean() < 0.1 * expected.abs().mean()


def test_transformers_trainer_trains_it(tmp_path: object) -> None:
    model = make_model(initializer_range=0.02, compose_init_scale=1.0)
    examples = [{"input_ids": row, "labels": row} for row in IDS]
    arguments = TrainingArguments(
        output_dir=str(tmp_path),
        max_steps=6,
        per_device_train_batch_size=4,
        learning_rate=1e-2,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        logging_steps=1,
        save_strategy="no",
    )
    trainer = Trainer(model=model, args=arguments, train_dataset=examples)
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert losses[-1] < losses[0]


@pytest.mark.parametrize("family", ["dcformer", "dcpythia", "rcmha"])
def test_label_smoothing_of_the_trainer_predicts_the_next_token(family: str, tmp_path: object) -> None:
    known = FAMILIES[family]
    model = known.load_model_class(known.main_auto_class)(known.load_config_class().from_size("tiny")).eval()
    arguments = TrainingArguments(output_dir=str(tmp_path), label_smoothing_factor=0.1, report_to=[], use_cpu=True)
    loss = Trainer(model=model, args=arguments).compute_loss(model, {"input_ids": IDS, "labels": IDS})
    logits = model(IDS).logits[:, :-1].flatten(0, 1)
    torch.testing.assert_close(loss, F.cross_entropy(logits, IDS[:, 1:].flatten(), label_smoothing=0.1))


@pytest.mark.parametrize("name", ["dcbart", "rcmha_seq2seq"])
def test_label_smoothing_of_encoder_decoders_needs_the_inputs_of_the_decoder(name: str, tmp_path: Path) -> None:
    """The Trainer takes the labels away; Transformers' collator makes the inputs from them, if it has the model."""
    known = FAMILIES[name]
    model = known.load_model_class(known.main_auto_class)(known.load_config_class().from_size("tiny")).eval()
    trainer = Trainer(model, TrainingArguments(str(tmp_path), label_smoothing_factor=0.1, report_to=[], use_cpu=True))
    with pytest.raises(ValueError, match=r"label_smoothing_factor .* use DataCollatorForSeq2Seq\(tokenizer, model\)"):
        trainer.compute_loss(model, {"input_ids": IDS, "labels": IDS})
    shifted = model.prepare_decoder_input_ids_from_labels(IDS)
    loss = trainer.compute_loss(model, {"input_ids": IDS, "labels": IDS, "decoder_input_ids": shifted})
    logits = model(input_ids=IDS, labels=IDS).logits.flatten(0, 1)
    torch.testing.assert_close(loss, F.cross_entropy(logits, IDS.flatten(), label_smoothing=0.1))


def test_plain_attention_can_be_traced() -> None:
    """While tracing, sizes are tensors, which PyTorch does not take for switches."""
    states, longer = (torch.randn(1, 2, length, 4) for length in (5, 7))

    def attend(query: torch.Tensor) -> torch.Tensor:
        return plain_attention(
            query, query, query, scaling=0.5, attention_mask=None, is_causal=False, sliding_window=None
        )[0]

    torch.testing.assert_close(torch.jit.trace(attend, states)(longer), attend(longer))
