"""DCModernBert: Transformers' ModernBERT with composition off, the definition with it on, windows and positions."""

from pathlib import Path
from typing import Any

import pytest
import torch
from cases.checkpoints import weights_of
from cases.encoder_parents import ENCODER_PARENTS, ROWS, SHAPE, make_encoder_parent
from huggingface_hub.errors import StrictDataclassError
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel, PreTrainedTokenizerFast, pipeline

import dynattn
from dynattn import (
    DCModernBertConfig,
    DCModernBertForMaskedLM,
    DCModernBertForMultipleChoice,
    DCModernBertForQuestionAnswering,
    DCModernBertForSequenceClassification,
    DCModernBertForTokenClassification,
    DCModernBertModel,
)
from dynattn.scripts.convert.common.weight_map import plan_import
from dynattn.scripts.convert.upcycle.parents.modernbert import MODERNBERT

OFF = {"compose_pre": False, "compose_post": False}
IDENTITY = {"compose_init_scale": 0.0, "compose_static": True}
STRONG = {"compose_init_scale": 30.0, "initializer_range": 0.2}
T, PADS = 40, 4  # a padded query that sees nothing has answers that mean nothing, in Transformers NaN


def make_pair(name: str, implementation: str, folder: Path, **fields: Any) -> tuple[PreTrainedModel, Any]:
    """The parent in float64, and ours with its weights."""
    theirs = make_encoder_parent(name).double()
    config = DCModernBertConfig(**MODERNBERT.fields(theirs.config), **fields, attn_implementation=implementation)
    theirs.save_pretrained(folder)
    written = weights_of(folder)
    steps, _ = plan_import(MODERNBERT.weight_map(config), written)
    weights = {
        key: tensor
        for step in steps
        for key, tensor in zip(step.writes, step.run([written[name] for name in step.reads]), strict=True)
    }
    ours: Any = getattr(dynattn, config.architectures[0])(config).double()
    if isinstance(ours, DCModernBertModel):
        weights = {key.removeprefix("model."): tensor for key, tensor in weights.items()}
    absent, unknown = ours.load_state_dict(weights, strict=False)
    assert not unknown and all(".composition." in key or key == "lm_head.weight" for key in absent)
    return theirs, ours.eval()


def inputs(padding: str | None) -> tuple[Tensor, Tensor]:
    ids, mask = torch.randint(3, ROWS, (2, T)), torch.ones(2, T, dtype=torch.long)
    if padding is not None:
        mask[1, slice(0, PADS) if padding == "left" else slice(-PADS, None)] = 0
    return ids, mask


@pytest.mark.parametrize("implementation", ["eager", "sdpa", "chunked", "identity-eager", "identity-chunked"])
@pytest.mark.parametrize("name", ENCODER_PARENTS)
def test_answers_and_gradients_are_the_parents(name: str, implementation: str, tmp_path: Path) -> None:
    fields = IDENTITY if implementation.startswith("identity") else OFF
    theirs, ours = make_pair(name, implementation.removeprefix("identity-"), tmp_path, **fields)
    ids, mask = inputs("right")
    if ENCODER_PARENTS[name][0] == "ForMultipleChoice":
        ids, mask = ids[None], mask[None]  # two choices of one row
    expected, observed = theirs(ids, attention_mask=mask)[0], ours(ids, attention_mask=mask)[0]
    real = mask.bool() if expected.shape[:2] == mask.shape else slice(None)
    # Transformers' eager softmax of this model is in float32.
    torch.testing.assert_close(observed[real], expected[real], atol=2e-6 * expected.abs().max().item(), rtol=0)

    weight = torch.randn_like(expected[real])
    (expected[real] * weight).sum().backward()
    (observed[real] * weight).sum().backward()
    body = ours if isinstance(ours, DCModernBertModel) else ours.model
    parent = theirs if isinstance(ours, DCModernBertModel) else theirs.model
    for layer, parent_layer in zip(body.layers, parent.layers, strict=True):
        joined = torch.cat([getattr(layer.self_attn, f"{part}_proj").weight.grad for part in "qkv"])
        both = torch.cat([layer.mlp.gate_proj.weight.grad, layer.mlp.up_proj.weight.grad])
        pairs = ((joined, parent_layer.attn.Wqkv), (both, parent_layer.mlp.Wi))
        for gradient, module in pairs:
            atol = 1e-5 * float(module.weight.grad.abs().max())
            torch.testing.assert_close(gradient, module.weight.grad, atol=atol, rtol=0)
    table, rows = parent.embeddings.tok_embeddings.weight.grad, body.embed_tokens.weight.grad
    torch.testing.assert_close(rows, table, atol=1e-5 * float(table.abs().max()), rtol=0)


def make_model(implementation: str = "chunked", **fields: Any) -> DCModernBertForTokenClassification:
    torch.manual_seed(0)
    config = DCModernBertConfig(**{**SHAPE, **STRONG, **fields}, num_labels=5, attn_implementation=implementation)
    return DCModernBertForTokenClassification(config).double().eval()


@torch.no_grad()
def test_every_way_of_running_gives_the_same_answers() -> None:
    ids, mask = inputs("right")
    expected = make_model("eager")(ids, attention_mask=mask).logits
    model, real = make_model(), mask.bool()
    torch.testing.assert_close(model(ids, attention_mask=mask).logits[real], expected[real], atol=1e-10, rtol=0)
    alone = model(ids[1:, : T - PADS]).logits
    torch.testing.assert_close(alone[0], expected[1, : T - PADS], atol=1e-10, rtol=0)
    left = torch.cat([ids[1:, T - PADS :], ids[1:, : T - PADS]], dim=1)
    shifted = model(left, attention_mask=mask[1:].flip(1)).logits
    # Rotary angles are in float32, and shifted tokens have other ones.
    torch.testing.assert_close(shifted[0, PADS:], expected[1, : T - PADS], atol=1e-6, rtol=0)


@pytest.mark.parametrize("implementation", ["eager", "chunked"])
def test_a_window_reaches_half_of_local_attention_to_either_side(implementation: str) -> None:
    model = make_model(implementation, num_hidden_layers=1, layer_types=["sliding_attention"])
    embeddings = torch.randn(1, T, SHAPE["hidden_size"], dtype=torch.float64, requires_grad=True)
    model(inputs_embeds=embeddings).logits[0, 20].sum().backward()
    seen = embeddings.grad[0].abs().sum(dim=-1).nonzero().flatten().tolist()
    assert seen == list(range(20 - 4, 20 + 5))


@torch.no_grad()
@pytest.mark.parametrize(
    ("implementation", "fields"), [("eager", {}), ("chunked", {}), ("sdpa", OFF)], ids=["eager", "chunked", "sdpa"]
)
def test_documents_packed_by_positions_do_not_see_each_other(implementation: str, fields: dict[str, Any]) -> None:
    model, (ids, _) = make_model(implementation, **fields), inputs(None)
    borders = [(0, 9), (9, 10), (10, 31), (31, T)]
    positions = torch.cat([torch.arange(end - start) for start, end in borders])[None]
    packed = model(ids, position_ids=positions).logits
    for start, end in borders:
        torch.testing.assert_close(packed[:, start:end], model(ids[:, start:end]).logits, atol=1e-10, rtol=0)
    beside_a_mask = model(ids, attention_mask=torch.ones_like(ids), position_ids=positions).logits
    assert (beside_a_mask - packed).abs().max() > 1e-3
    ends = torch.tensor([0, *(end for _, end in borders)], dtype=torch.int32)
    for mask in (None, torch.ones_like(ids[:1])):
        by_borders = model(ids[:1], attention_mask=mask, cu_seq_lens_q=ends, cu_seq_lens_k=ends).logits
        torch.testing.assert_close(by_borders, packed[:1], atol=1e-10, rtol=0)
    counted = model(ids[:1], position_ids=torch.arange(T)[None], cu_seq_lens_q=ends).logits  # positions mark nothing
    torch.testing.assert_close(counted, packed[:1], atol=1e-6, rtol=0)  # far positions have rounded angles
    with pytest.raises(ValueError, match="cu_seq_lens must rise from 0 to the length of a single packed row"):
        model(ids[:1], cu_seq_lens_q=ends[:-1])
    with pytest.raises(ValueError, match="cu_seq_lens_k is given without cu_seq_lens_q"):
        model(ids[:1], cu_seq_lens_k=ends)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"z_loss": 1e-4}, "z_loss=0.0001 is part of the loss of causal models"),
        ({"is_causal": True}, "is_causal=True"),
        ({"past_key_values": DynamicCache()}, "has no meaning for an encoder"),
    ],
)
def test_what_an_encoder_does_not_have_is_refused(options: dict[str, Any], message: str) -> None:
    model, (ids, _) = DCModernBertForMaskedLM(DCModernBertConfig(**SHAPE)), inputs(None)
    with pytest.raises(ValueError, match=message):
        model(ids, labels=ids, **options)


def test_an_initializer_range_of_zero_makes_zeros_of_the_classifier_too() -> None:
    assert not make_model(initializer_range=0.0).classifier.bias.any()


@torch.no_grad()
def test_layers_have_the_rotary_base_of_their_type() -> None:
    ids, _ = inputs(None)
    expected = make_model()(ids).logits
    for kind in ("full_attention", "sliding_attention"):
        changed = make_model(rope_parameters={kind: {"rope_theta": 100.0}})(ids).logits
        assert (changed - expected).abs().max() > 1e-3


def test_recomputed_layers_give_the_same_gradients() -> None:
    ids, mask = inputs("left")
    labels, gradients = torch.randint(0, 5, ids.shape), []
    for recompute in (False, True):
        model = make_model().train()
        if recompute:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        model(ids, attention_mask=mask, labels=labels).loss.backward()
        gradients.append({name: parameter.grad for name, parameter in model.named_parameters()})
    for name, gradient in gradients[0].items():
        torch.testing.assert_close(gradients[1][name], gradient, atol=1e-12, rtol=0)


def test_initial_weights_are_those_of_modernbert() -> None:
    config = DCModernBertConfig(**{**SHAPE, "hidden_size": 256, "intermediate_size": 256, "initializer_range": 0.02})
    model = DCModernBertForTokenClassification(config)
    layer = model.model.layers[0]
    small = 0.02 / (2 * SHAPE["num_hidden_layers"]) ** 0.5
    for weight, std in (
        (layer.self_attn.q_proj.weight, 0.02),
        (layer.mlp.gate_proj.weight, 0.02),
        (layer.self_attn.o_proj.weight, small),
        (layer.mlp.down_proj.weight, small),
        (model.prediction_head.dense.weight, small),
        (model.classifier.weight, 256**-0.5),
    ):
        assert weight.abs().max() <= 2 * std
        assert weight.detach().std() == pytest.approx(0.88 * std, rel=0.06)


def test_the_loss_is_of_labelled_tokens_without_a_shift() -> None:
    model = DCModernBertForMaskedLM(DCModernBertConfig(**{**SHAPE, **STRONG})).eval()
    ids, _ = inputs(None)
    labels = torch.where(torch.rand(ids.shape) < 0.3, ids, -100)
    output = model(ids, labels=labels)
    chosen = labels != -100
    torch.testing.assert_close(output.loss, torch.nn.functional.cross_entropy(output.logits[chosen], labels[chosen]))
    doubled = model(ids, labels=labels, num_items_in_batch=2 * int(chosen.sum())).loss
    torch.testing.assert_close(2 * doubled, output.loss)
    with pytest.raises(ValueError, match=r"labels of shape \(2, 39\) do not fit 2 rows of 40 tokens"):
        model(ids, labels=labels[:, 1:])


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"layer_types": ["full_attention"] * 3}, "layer_types|num_hidden_layers"),
        ({"layer_types": ["chunked_attention"] * 4}, r"layer_types has \['chunked_attention'\]; only"),
        ({"classifier_pooling": "max"}, "classifier_pooling 'max' does not exist; choose from"),
        ({"rope_parameters": {"rope_theta": 1e4}}, r"rope_parameters has \['rope_theta'\]; it must have parameters"),
        ({"rope_parameters": {"full_attention": {"rope_theta": 0}}}, r"rope_theta \(0\) must be greater than 0"),
        ({"rope_parameters": {"full_attention": {"rope_type": "linear"}}}, r"of rope_type 'linear' lack \['factor'\]"),
        ({"classifier_activation": "gelo"}, "classifier_activation 'gelo' does not exist"),
    ],
    ids=str,
)
def test_configurations_that_cannot_be_are_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises((StrictDataclassError, ValueError), match=message):
        DCModernBertConfig(**{**SHAPE, **fields})


@pytest.mark.parametrize("pooling", ["cls", "mean"])
@torch.no_grad()
def test_classes_of_a_text_do_not_depend_on_padding(pooling: str) -> None:
    config = DCModernBertConfig(**{**SHAPE, **STRONG}, classifier_pooling=pooling)
    model, (ids, _) = DCModernBertForSequenceClassification(config).double().eval(), inputs(None)
    expected, mask = model(ids).logits, torch.ones_like(ids)
    for sides in ((PADS, 0), (0, PADS)):
        padded = torch.nn.functional.pad(ids, sides), torch.nn.functional.pad(mask, sides)
        # Rotary angles are in float32, and shifted tokens have other ones.
        torch.testing.assert_close(model(*padded).logits, expected, atol=1e-6, rtol=0)


def test_questions_are_answered_by_starts_and_ends() -> None:
    with pytest.raises(ValueError, match=r"num_labels \(3\) must be 2, for starts and ends; pass num_labels=2"):
        DCModernBertForQuestionAnswering(DCModernBertConfig(**{**SHAPE, "num_labels": 3}))
    model, (ids, _) = DCModernBertForQuestionAnswering(DCModernBertConfig(**SHAPE)), inputs(None)
    with pytest.raises(ValueError, match="end_positions is None, but the loss needs starts and ends"):
        model(ids, start_positions=torch.tensor([1, 2]))


def test_the_loss_of_an_answer_is_that_of_its_start_and_of_its_end() -> None:
    model, (ids, _) = DCModernBertForQuestionAnswering(DCModernBertConfig(**{**SHAPE, **STRONG})).eval(), inputs(None)
    starts, ends = torch.tensor([1, 30]), torch.tensor([17, 35])
    output = model(ids, start_positions=starts, end_positions=ends)
    pairs = ((output.start_logits, starts), (output.end_logits, ends))
    expected = sum(torch.nn.functional.cross_entropy(logits, places) for logits, places in pairs) / 2
    torch.testing.assert_close(output.loss, expected)


@pytest.mark.parametrize("pooling", ["cls", "mean"])
def test_choices_are_scored_alone_and_learned_against_each_other(pooling: str) -> None:
    config = DCModernBertConfig(**{**SHAPE, **STRONG}, classifier_pooling=pooling)
    model, labels = DCModernBertForMultipleChoice(config).double().eval(), torch.tensor([2, 0])
    ids, mask = torch.randint(3, ROWS, (2, 3, T)), torch.ones(2, 3, T, dtype=torch.long)
    mask[1, 2, -PADS:] = 0
    output = model(ids, attention_mask=mask, labels=labels)
    assert output.logits.shape == (2, 3)
    for row, choice in ((0, 1), (1, 2)):
        alone = model(ids[row, choice, : mask[row, choice].sum()][None, None]).logits
        torch.testing.assert_close(alone, output.logits[row : row + 1, choice : choice + 1], atol=1e-9, rtol=0)
    torch.testing.assert_close(output.loss, torch.nn.functional.cross_entropy(output.logits, labels))
    part = model(ids, attention_mask=mask, labels=labels, num_items_in_batch=torch.tensor(8)).loss
    torch.testing.assert_close(part, output.loss * 2 / 8)
    embeddings = model.model.embed_tokens(ids)
    again = model(inputs_embeds=embeddings, attention_mask=mask, position_ids=torch.arange(T).expand(2, 3, T)).logits
    torch.testing.assert_close(again, output.logits)


def test_choices_that_do_not_fit_are_refused() -> None:
    model, ids = DCModernBertForMultipleChoice(DCModernBertConfig(**SHAPE)), torch.randint(3, ROWS, (2, 3, T))
    for given, message in (
        ({"input_ids": ids[0]}, r"input_ids must be a tensor \[batch, choices, length, ...\]"),
        ({"input_ids": ids, "attention_mask": {}}, "attention_mask must be a tensor"),
        ({"input_ids": ids, "attention_mask": torch.ones(2, 4, T)}, "inputs must agree in rows and choices"),
        ({}, "exactly one of input_ids and inputs_embeds"),
        ({"input_ids": ids, "labels": torch.tensor([1, 3])}, "labels hold the choice 3, but each row has 3"),
        ({"input_ids": ids, "labels": torch.tensor([1, 2, 0])}, r"labels of shape \(3,\) must be \[2\]"),
    ):
        with pytest.raises(ValueError, match=message):
            model(**given)


def test_labels_of_tokens_in_another_order_are_refused() -> None:
    """As many labels as tokens, but `[T, B]`: a loss of the flattened labels would not notice."""
    ids, _ = inputs(None)
    with pytest.raises(ValueError, match=r"labels of shape \(40, 2\) do not fit 2 rows of 40 tokens"):
        make_model()(ids, labels=torch.zeros_like(ids).T)


def test_each_dropout_of_the_configuration_is_in_its_place() -> None:
    model = make_model(embedding_dropout=0.5, mlp_dropout=0.2, classifier_dropout=0.3)
    assert {layer.mlp.dropout.p for layer in model.model.layers} == {0.2} and model.dropout.p == 0.3
    embedded = model.model.train().embed(torch.randn(2, T, SHAPE["hidden_size"], dtype=torch.float64), None)
    assert float((embedded == 0).double().mean()) == pytest.approx(0.5, abs=0.05)


def test_the_padding_token_does_not_learn() -> None:
    model, (ids, _) = make_model(), inputs(None)
    ids[:, -PADS:] = SHAPE["pad_token_id"]
    model(ids).logits.square().sum().backward()
    learned = model.model.embed_tokens.weight.grad.abs().sum(-1) > 0
    assert not learned[SHAPE["pad_token_id"]] and learned[ids[0, 0]]


def test_classifiers_drop_what_they_read() -> None:
    model, (ids, _), read = make_model(classifier_dropout=0.5).train(), inputs(None), []
    model.classifier.register_forward_pre_hook(lambda _, given: read.append(given[0]))
    model(ids)
    assert float((read[0] == 0).double().mean()) == pytest.approx(0.5, abs=0.05)


def test_a_loss_without_logits_counts_the_first_token_of_the_vocabulary() -> None:
    model = DCModernBertForMaskedLM(DCModernBertConfig(**{**SHAPE, **STRONG})).eval()
    ids, _ = inputs(None)
    labels = torch.full_like(ids, -100)
    labels[:, :8] = torch.arange(8)
    bare = model(ids, labels=labels, skip_logits=True)
    assert bare.logits is None
    torch.testing.assert_close(bare.loss, model(ids, labels=labels).loss)


def test_inputs_that_do_not_fit_are_refused() -> None:
    for padding in (97, -1):
        message = rf"pad_token_id \({padding}\) must be at least 0 and smaller than vocab_size \(97\)"
        with pytest.raises(ValueError, match=message):
            make_model(pad_token_id=padding)
    model, (ids, mask) = make_model(), inputs(None)
    mask[1] = 0
    with pytest.raises(ValueError, match=r"hides every token of rows \[1\]"):
        model(ids, attention_mask=mask)
    with pytest.raises(
        ValueError, match=r"shape \(2, 44\) does not fit 2 rows of 40 tokens; give one value for each token"
    ):
        model(ids, attention_mask=torch.ones(2, T + 4))
    with pytest.raises(ValueError, match="exactly one of input_ids and inputs_embeds"):
        model()


def test_pipelines_read_it(tmp_path: Path) -> None:
    words = ["[PAD]", "[CLS]", "[SEP]", "[MASK]", "[UNK]", "heads", "are", "composed"]
    core = Tokenizer(models.WordLevel({word: index for index, word in enumerate(words)}, unk_token="[UNK]"))
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    special = {f"{name}_token": f"[{name.upper()}]" for name in ("pad", "cls", "sep", "mask", "unk")}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, **special)
    tokenizer.save_pretrained(tmp_path)
    DCModernBertForMaskedLM(DCModernBertConfig(**{**SHAPE, **STRONG, "vocab_size": len(words)})).save_pretrained(
        tmp_path
    )
    filled = pipeline("fill-mask", model=str(tmp_path), top_k=3)("heads are [MASK]")
    assert len(filled) == 3 and {answer["token_str"] for answer in filled} <= set(words)
    classify = pipeline("text-classification", model=str(tmp_path))
    assert type(classify.model).__name__ == "DCModernBertForSequenceClassification"
    scores = [answer["score"] for answer in classify(["heads are composed", "heads"], batch_size=2)]
    alone = [classify(text)[0]["score"] for text in ("heads are composed", "heads")]
    assert scores == pytest.approx(alone, abs=1e-5)


def test_classes_of_texts_are_learned_and_checked() -> None:
    model = DCModernBertForSequenceClassification(DCModernBertConfig.from_size("tiny", num_labels=3)).eval()
    ids = torch.randint(3, 99, (2, 8))
    output = model(ids, labels=torch.tensor([0, 2]))
    torch.testing.assert_close(output.loss, torch.nn.functional.cross_entropy(output.logits, torch.tensor([0, 2])))
    with pytest.raises(ValueError, match="labels hold the class 3"):
        model(ids, labels=torch.tensor([0, 3]))
    complete = torch.ones(2, 1, 8, 8, dtype=torch.bool)  # which tells no padding
    torch.testing.assert_close(model(ids, attention_mask=complete).logits, output.logits)


def test_a_loss_needs_all_its_labels() -> None:
    config, ids = DCModernBertConfig.from_size("tiny"), torch.randint(3, 99, (2, 8))
    with pytest.raises(ValueError, match="needs labels"):
        DCModernBertForMaskedLM(config)(ids, skip_logits=True)
    with pytest.raises(ValueError, match="start_positions is None"):
        DCModernBertForQuestionAnswering(config)(ids, end_positions=torch.tensor([1, 2]))
