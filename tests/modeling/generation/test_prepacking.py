"""Prompts of different lengths in one forward pass: the same logits and tokens as with padding, refusals."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from cases.models import make_model
from peft import LoraConfig, PromptTuningConfig, get_peft_model
from torch import Tensor
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM, StaticCache

from dynattn import DCPythiaConfig, DCPythiaForCausalLM, RCMHAConfig, RCMHAForCausalLM, prepack
from dynattn.modeling.caches.names import cache_in
from dynattn.modeling.generation.prepacking import first_fit

LENGTHS = (31, 1, 17, 2, 12, 30, 7)
PLAIN = {"compose_pre": False, "compose_post": False}
VARIANTS: list[dict[str, Any]] = [
    {},
    PLAIN,
    {"position_scheme": "none", "sliding_window": None, "layer_types": None},
    {"position_scheme": {"sliding_attention": "alibi", "full_attention": "t5"}, "position_gain": "bucket"},
    {"position_scheme": "learned"},
    {"position_scheme": "sinusoidal"},
    {"position_scheme": "carope"},
    {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 8}},
]


def make_prompts() -> list[Tensor]:
    torch.manual_seed(2)
    return [torch.randint(3, 97, (length,)) for length in LENGTHS]


def pad(prompts: list[Tensor]) -> dict[str, Tensor]:
    """The prompts with padding on the left."""
    longest = max(map(len, prompts))
    ids = torch.stack([torch.nn.functional.pad(prompt, (longest - len(prompt), 0)) for prompt in prompts])
    mask = torch.stack([(torch.arange(longest) >= longest - len(prompt)).long() for prompt in prompts])
    return {"input_ids": ids, "attention_mask": mask}


def generate(model: Any, inputs: dict[str, Any], **options: Any) -> tuple[Tensor, Tensor]:
    """Tokens `[B, T]` and the logits `[B, steps, V]` of what was generated."""
    settings = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    output = model.generate(
        **inputs, **{**settings, **options}, return_dict_in_generate=True, output_logits=True
    )  # fmt: skip
    return output.sequences, torch.stack(output.logits, dim=1)


@pytest.mark.parametrize("fields", VARIANTS, ids=lambda fields: str(next(iter(fields.items()), "rope")))
def test_packed_prompts_generate_what_padded_ones_do(fields: dict[str, Any]) -> None:
    model, prompts = make_model(**fields).double(), make_prompts()
    inputs = prepack(model, prompts)
    windows = [kind == "sliding_attention" for kind in model.config.layer_types]
    assert [layer.is_sliding for layer in cache_in(inputs).layers] == windows
    tokens, logits = generate(model, inputs)
    expected_tokens, expected = generate(model, pad(prompts))
    assert torch.equal(tokens, expected_tokens)
    torch.testing.assert_close(logits, expected, atol=1e-5, rtol=0)  # angles are float32


@pytest.mark.parametrize("implementation", ["chunked", "eager"])
def test_float32_differs_by_rounding_and_sequential_models_pack_too(implementation: str) -> None:
    torch.manual_seed(0)
    model = DCPythiaForCausalLM(DCPythiaConfig.from_size("tiny", vocab_size=97)).eval()
    model.set_attn_implementation(implementation)
    prompts = make_prompts()
    tokens, logits = generate(model, prepack(model, prompts))
    expected_tokens, expected = generate(model, pad(prompts))
    assert torch.equal(tokens, expected_tokens)
    torch.testing.assert_close(logits, expected, atol=2e-5 * float(expected.abs().max()), rtol=0)


@pytest.mark.parametrize("kind", ["full", "static", "beams"])
def test_every_kind_of_cache_can_be_filled(kind: str) -> None:
    model, prompts = make_model().double(), make_prompts()
    cache = StaticCache(model.config, max_cache_len=64) if kind == "static" else DynamicCache()
    inputs = prepack(model, prompts, cache)
    assert cache_in(inputs) is cache
    beams = {"num_beams": 3} if kind == "beams" else {}
    if beams:
        cache.batch_repeat_interleave(3)
    tokens, _ = generate(model, inputs, **beams)
    assert torch.equal(tokens, generate(model, pad(prompts), **beams)[0])


@pytest.mark.parametrize("fields", [{}, {"compose_pre": False, "compose_post": False}, {"position_scheme": "carope"}])
def test_beams_need_rows_for_each_of_them(fields: dict[str, Any]) -> None:
    model = make_model(**fields)
    with pytest.raises(ValueError, match=r"is of a batch of \d+ rows .* \(past_key_values.batch_repeat_interleave\)"):
        generate(model, prepack(model, make_prompts()), num_beams=3)


@pytest.mark.parametrize("longest", [1, 2])
def test_prompts_of_one_token_need_no_pass(longest: int) -> None:
    model, prompts = make_model().double(), [torch.tensor([5]), torch.tensor([9, 7][:longest])]
    inputs = prepack(model, prompts)
    assert cache_in(inputs).get_seq_length() == longest - 1
    assert torch.equal(generate(model, inputs)[0], generate(model, pad(prompts))[0])


def test_no_more_rows_are_run_than_the_prompts_need() -> None:
    model, shapes = make_model(), []
    handle = model.model.register_forward_pre_hook(lambda _, inputs: shapes.append(tuple(inputs[0].shape)))
    prepack(model, make_prompts())
    handle.remove()
    assert shapes == [(4, max(LENGTHS) - 1)]


def test_prompts_share_rows_as_long_as_the_longest() -> None:
    row, start = first_fit([9, 2, 7, 1, 0, 3, 9], 9)
    assert row.tolist() == [0, 2, 2, 3, 0, 3, 1]
    assert start.tolist() == [0, 7, 0, 3, 9, 0, 0]


def make_llama() -> LlamaForCausalLM:
    return LlamaForCausalLM(LlamaConfig(vocab_size=9, hidden_size=8, num_hidden_layers=1, num_attention_heads=1))


DYNAMIC = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}


@pytest.mark.parametrize(
    ("make", "prompts", "message"),
    [
        (lambda: RCMHAForCausalLM(RCMHAConfig.from_size("tiny")), [[1, 2]], "a rcmha cannot read packed prompts into"),
        (make_llama, [[1, 2]], "a llama cannot read packed prompts"),
        (lambda: make_model(rope_parameters=DYNAMIC), [[1]], "'dynamic'"),
        (lambda: make_model().model, [[1]], "a DCFormerModel has no language modeling head"),
        (make_model, [], "must be one or more tensors"),
        (make_model, [[1], []], r"shapes \[\(1,\), \(0,\)\] must be"),
        (make_model, [[[1, 2]]], r"shapes \[\(1, 2\)\] must be"),
    ],
)
def test_what_cannot_be_packed_is_refused(make: Callable[[], Any], prompts: list[Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        prepack(make(), [torch.tensor(prompt, dtype=torch.long) for prompt in prompts])


def test_prompts_that_are_no_tensors_are_refused() -> None:
    with pytest.raises(ValueError, match=r"prompts of shapes \[\[1, 2\], \[3\]\] must be one or more tensors"):
        prepack(make_model(), [[1, 2], [3]])  # type: ignore[list-item]


@pytest.mark.filterwarnings("ignore::UserWarning:peft")
def test_a_model_inside_of_adapters_is_found() -> None:
    adapted = get_peft_model(make_model(), LoraConfig(r=2, task_type="CAUSAL_LM", init_lora_weights=False)).eval()
    prompts = make_prompts()
    tokens, _ = generate(adapted, pad(prompts))
    assert torch.equal(generate(adapted, prepack(adapted, prompts))[0], tokens)
    trained = get_peft_model(make_model(), PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2))
    with pytest.raises(ValueError, match="a PEFT model with a trained prompt is not supported"):
        prepack(trained, prompts)


def test_a_cache_that_holds_tokens_is_refused() -> None:
    model, cache = make_model(), DynamicCache()
    model(torch.tensor([[1]]), past_key_values=cache)
    with pytest.raises(ValueError, match="the cache holds 1 tokens already"):
        prepack(model, make_prompts(), cache)


def test_a_static_cache_without_room_stays_empty() -> None:
    model = make_model()
    cache = StaticCache(config=model.config, max_cache_len=4)
    with pytest.raises(ValueError, match="past_key_values has room for max_cache_len=4 tokens, and 0 cached and 7 new"):
        prepack(model, [torch.arange(8), torch.arange(3)], cache)
    assert cache.get_seq_length() == 0
