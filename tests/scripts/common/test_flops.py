"""Operations of a model: by hand, by PyTorch's counter, and by the benchmark's shapes."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from dynattn import (
    DCBartConfig,
    DCBartForConditionalGeneration,
    DCFormerConfig,
    DCFormerForCausalLM,
    DCModernBertConfig,
    DCModernBertForMaskedLM,
    DCModernBertForSequenceClassification,
    DCModernBertForTokenClassification,
    DCModernBertModel,
    DCPythiaConfig,
    DCPythiaForCausalLM,
    DCViTConfig,
    DCViTForImageClassification,
    DCViTModel,
    RCMHAConfig,
    RCMHAForCausalLM,
    mixer_fields,
)
from dynattn.scripts.benchmark.harness.inputs import COMPOSED
from dynattn.scripts.benchmark.harness.shapes import Shape, visible_pairs
from dynattn.scripts.benchmark.subjects.op_flops import attention_flops
from dynattn.scripts.common.flops import ModelFlops

SIZES = {"vocab_size": 16, "hidden_size": 8, "intermediate_size": 12, "num_attention_heads": 2}
WINDOWS = {"num_hidden_layers": 2, "layer_types": ["sliding_attention", "full_attention"], "sliding_window": 3}
UNCOMPOSED = {"compose_pre": False, "compose_post": False}
T = 5


def dcformer(**options: Any) -> DCFormerForCausalLM:
    return DCFormerForCausalLM(DCFormerConfig(**SIZES | WINDOWS | options))


def dcpythia(**options: Any) -> DCPythiaForCausalLM:
    return DCPythiaForCausalLM(DCPythiaConfig(**SIZES | WINDOWS | options))


def rcmha(**options: Any) -> RCMHAForCausalLM:
    return RCMHAForCausalLM(RCMHAConfig(**SIZES, num_hidden_layers=1, mem_len=None, **options))


def test_a_composed_model_by_hand() -> None:
    flops = ModelFlops.of(dcformer(num_key_value_heads=1, compose_rank=1))
    projections = 8 * 8 + 8 * 4 + 8 * 4 + 8 * 8
    mlp = 3 * 8 * 12
    generator = 8 * 4 * 4 + 4 * 4 * 2 * 2 + 8 * 4 * 2  # 4 components of width 4; 2 factors and a gate of 2 heads
    token = 2 * (2 * (projections + mlp + generator) + 8 * 16)
    side = 2 + 2 + 2  # into one hidden map, back, gate
    pair = 2 * (2 * 4 + 2 * 4 + 2 * 2 * side)
    sliding, full = 1 + 2 + 3 + 3 + 3, 1 + 2 + 3 + 4 + 5
    assert flops.forward(torch.arange(T)) == T * token + (sliding + full) * pair == 18160
    assert flops.training(torch.arange(T)) == 3 * 18160


@pytest.mark.parametrize(
    ("options", "stage"),
    [
        ({"compose_gate": False}, 2 * 8),
        ({"compose_low_rank": False}, 2 * 2),
        ({"compose_key_wise": False}, 8 + 2),
        ({"compose_static": True}, 2 * (8 + 2) + 2 * 4),
        ({"compose_static": True, "compose_groups": 2}, 2 * (8 + 2) + 2 * 2),
        ({"compose_query_wise": False, "compose_key_wise": False, "compose_static": True}, 2 * 4),
    ],
)
def test_each_term_of_the_composition_counts(options: dict[str, Any], stage: int) -> None:
    config = {"hidden_size": 16, "num_attention_heads": 4, "compose_rank": 2}
    assert ModelFlops.of(dcformer(**config, **options)).pair == 4 * (4 * 4 + 2 * stage)
    assert ModelFlops.of(dcformer(**config, **options, compose_post=False)).pair == 4 * (4 * 4 + stage)


def test_differential_heads_are_a_matrix_of_all_heads() -> None:
    flops = ModelFlops.of(dcformer(hidden_size=16, num_attention_heads=4, **mixer_fields("differential")))
    assert flops.pair == 4 * (4 * 4 + 2 * 4)


def test_relative_attention_by_hand() -> None:
    linear = 4 * 8 * 8 + 2 * 8 * 12 + 8 * 16
    convolutions = 3 * 3 * 8
    pair = 2 * (3 * 2 * 4)  # content scores, position scores, values
    expected = T * 2 * (linear + convolutions) + (1 + 2 + 3 + 4 + 5) * pair
    assert ModelFlops.of(rcmha()).forward(torch.arange(T)) == expected == 7200


def test_documents_see_nothing_of_each_other() -> None:
    flops = ModelFlops.of(dcformer())
    apart = flops.forward(torch.arange(2)) + flops.forward(torch.arange(3))
    assert flops.forward(torch.tensor([[0, 1, 0, 1, 2]])) == apart < flops.forward(torch.arange(5))


def counted(model: PreTrainedModel, backward: bool) -> int:
    ids = torch.ones(1, T, dtype=torch.long)
    with FlopCounterMode(display=False) as counter:
        loss = model(ids, labels=ids, use_cache=False).loss
        if backward:
            loss.backward()
    return counter.get_total_flops()


@pytest.mark.parametrize(
    ("make", "options"),
    [
        (dcformer, UNCOMPOSED),
        (dcformer, UNCOMPOSED | {"num_key_value_heads": 1, "mgate_dim": 4}),
        (dcpythia, UNCOMPOSED | {"hidden_size": 16}),
        (rcmha, {"attention_type": "mha"}),
    ],
)
def test_without_composition_they_are_those_that_pytorch_counts(
    make: Callable[..., PreTrainedModel], options: dict[str, Any]
) -> None:
    model = make(**options, attn_implementation="eager")
    flops = ModelFlops.of(model)
    # The reference op computes hidden pairs, too.
    forward = T * (flops.token + flops.output) + len(flops.windows) * T**2 * flops.pair
    assert counted(model, backward=False) == forward
    # The embedding of a token learns without a product, and what it is made of has no gradient.
    assert counted(model, backward=True) == 3 * forward


def test_a_model_and_the_shape_of_its_attention_agree() -> None:
    model = dcformer(hidden_size=32, num_attention_heads=4)
    flops = ModelFlops.of(model)
    attention = sum(attention_flops(Shape(4, 8, 50), visible_pairs(50, window), COMPOSED) for window in (3, None))
    assert flops.forward(torch.arange(50)) == 50 * (flops.token + flops.output) + attention


def forward_of(model: PreTrainedModel, **inputs: Any) -> int:
    """What PyTorch counts of a forward pass."""
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(**inputs)
    return counter.get_total_flops()


ENCODER = {
    "vocab_size": 16,
    "hidden_size": 8,
    "intermediate_size": 12,
    "num_attention_heads": 2,
    "num_hidden_layers": 3,
}
IDS = torch.ones(2, T, dtype=torch.long)


@pytest.mark.parametrize(
    "make",
    [
        DCModernBertModel,
        DCModernBertForMaskedLM,
        DCModernBertForTokenClassification,
        DCModernBertForSequenceClassification,
    ],
)
def test_an_encoder_of_text_counts_as_pytorch_does(make: Callable[..., PreTrainedModel]) -> None:
    kinds = ["full_attention"] * 3
    config = DCModernBertConfig(**ENCODER, layer_types=kinds, pad_token_id=0, **UNCOMPOSED, attn_implementation="eager")
    model = make(config).eval()
    assert ModelFlops.of(model).forward(torch.arange(T).expand(2, T)) == forward_of(model, input_ids=IDS)


def test_targets_alone_get_logits() -> None:
    config = DCModernBertConfig(**ENCODER, layer_types=["full_attention"] * 3, pad_token_id=0, **UNCOMPOSED)
    model = DCModernBertForMaskedLM(config).eval()
    model.set_attn_implementation("eager")
    labels = torch.full((2, T), -100)
    labels[0, 1] = labels[1, 2:4] = 3
    expected = forward_of(model, input_ids=IDS, labels=labels, skip_logits=True)
    assert ModelFlops.of(model).forward(torch.arange(T).expand(2, T), outputs=3) == expected


def test_pairs_of_an_encoder_are_those_that_its_mask_shows() -> None:
    config = DCModernBertConfig(**ENCODER, local_attention=4, pad_token_id=0)
    flops = ModelFlops.of(DCModernBertModel(config))
    positions = torch.tensor([[0, 1, 2, 3, 4, 5, 0, 1, 2], [0, 0, 1, 2, 3, 4, 5, 6, 7]])
    document = (positions == 0).cumsum(-1)
    together = document[:, :, None] == document[:, None, :]
    near = (torch.arange(9)[:, None] - torch.arange(9)).abs() <= 2
    assert flops.windows == (None, 2, 2) and not flops.is_causal
    assert flops.pairs(positions, None) == together.sum()
    assert flops.pairs(positions, 2) == (together & near).sum()


@pytest.mark.parametrize("make", [DCViTModel, DCViTForImageClassification])
def test_a_vision_transformer_counts_as_pytorch_does(make: Callable[..., PreTrainedModel]) -> None:
    size = {"use_class_token": True, "num_register_tokens": 2, "position_embedding_type": "learned"}
    config = DCViTConfig.from_size("tiny", **size, **UNCOMPOSED, attn_implementation="eager")
    model = make(config).eval()
    tokens = config.num_prefix_tokens + 16
    counted_flops = forward_of(model, pixel_values=torch.zeros(2, 3, 16, 16))
    assert ModelFlops.of(model).forward(torch.arange(tokens).expand(2, tokens)) == counted_flops


def test_a_variant_counts_as_the_family_that_it_is_made_of() -> None:
    class VariantConfig(DCFormerConfig):
        model_type = "variant"

    class Variant(DCFormerForCausalLM):
        config_class = VariantConfig

    assert ModelFlops.of(Variant(VariantConfig(**SIZES | WINDOWS))) == ModelFlops.of(dcformer())


def test_other_families_are_not_known() -> None:
    with pytest.raises(TypeError, match="operations of 'dcbart' are not known; they are for dcformer, dcpythia, dcmod"):
        ModelFlops.of(DCBartForConditionalGeneration(DCBartConfig.from_size("tiny")))
    llama = LlamaForCausalLM(LlamaConfig(**SIZES, num_hidden_layers=1, layer_types=["full_attention"]))
    with pytest.raises(TypeError, match="operations of 'llama' are not known"):
        ModelFlops.of(llama)
