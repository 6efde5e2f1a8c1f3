"""What vLLM is asked that models with composed heads cannot do is refused before it starts anything."""

import logging
from typing import Any

import pytest
import vllm
from cases.models import make_model
from vllm.engine.arg_utils import EngineArgs

from dynattn import RCMHAConfig, RCMHAForCausalLM
from dynattn.modeling.serving.vllm import plugin

REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "two kinds of parallelism": (
        {"tensor_parallel_size": 2, "data_parallel_size": 2},
        "data_parallel_size=2 beside tensor_parallel_size=2 is not supported",
    ),
    "tokens divided among processes": (
        {"tensor_parallel_size": 2, "decode_context_parallel_size": 2, "hf_overrides": {"num_key_value_heads": 1}},
        "decode_context_parallel_size=2 would give each process the pages of a part of the tokens",
    ),
    "weights to be quantized": (
        {"quantization": "fp8", "dtype": "bfloat16"},
        "quantization='fp8' would not be applied.* serve a checkpoint that Transformers saved",
    ),
    "weights that vLLM quantized": (
        {"hf_overrides": {"quantization_config": {"quant_method": "gptq", "bits": 4, "group_size": 32}}},
        "quantization='[a-z_]*gptq[a-z_]*' would not be applied",
    ),
    "quantized weights for two processes": (
        {"hf_overrides": {"quantization_config": {"quant_method": "torchao"}}, "tensor_parallel_size": 2},
        "tensor_parallel_size=2 is not supported for quantized weights",
    ),
    "quantized factors": ({"kv_cache_dtype": "fp8"}, "kv_cache_dtype='fp8' would round the composition factors"),
    "rounded factors": ({"kv_cache_dtype": "bfloat16"}, "of a float32 model; use 'auto'"),
    "transferred pages": (
        {"kv_transfer_config": {"kv_connector": "ExampleConnector", "kv_role": "kv_both"}},
        "kv_transfer_config",
    ),
    "offloaded pages": ({"kv_offloading_size": 1.0}, "kv_offloading_size is set, but pages"),
    "more positions": ({"max_model_len": 1024}, r"max_model_len \(1024\) is greater"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_options_that_cannot_be_served(name: str, tmp_path: Any) -> None:
    options, message = REFUSED[name]
    make_model().save_pretrained(tmp_path)
    given = {"dtype": "float32", "enforce_eager": True, "skip_tokenizer_init": True, **options}
    with pytest.raises(ValueError, match=message):
        EngineArgs(str(tmp_path), **given).create_engine_config()


def test_models_do_not_draft(tmp_path: Any) -> None:
    make_model().save_pretrained(tmp_path)
    drafts = {"method": "draft_model", "model": str(tmp_path), "num_speculative_tokens": 2}
    given = {"dtype": "float32", "enforce_eager": True, "skip_tokenizer_init": True}
    with pytest.raises(ValueError, match=r"method='draft_model' lets a model draft tokens.* use one of the methods"):
        EngineArgs(str(tmp_path), speculative_config=drafts, **given).create_engine_config()


@pytest.mark.parametrize("rope_type", ["dynamic", "linear"])
def test_requests_are_no_longer_than_the_positions(rope_type: str, tmp_path: Any) -> None:
    """vLLM itself would take four times as many tokens."""
    parameters = {"rope_type": rope_type, "rope_theta": 10000.0, "factor": 4.0}
    model = make_model(rope_parameters=parameters)
    model.save_pretrained(tmp_path)
    positions = model.config.max_position_embeddings
    given = {"dtype": "float32", "enforce_eager": True, "skip_tokenizer_init": True}
    made = EngineArgs(str(tmp_path), **given).create_engine_config()
    assert made.model_config.max_model_len == positions
    shorter = EngineArgs(str(tmp_path), max_model_len=positions // 2, **given).create_engine_config()
    assert shorter.model_config.max_model_len == positions // 2
    with pytest.raises(ValueError, match=f"max_model_len={positions + 1} is more than the {positions} positions"):
        EngineArgs(str(tmp_path), max_model_len=positions + 1, **given).create_engine_config()


@pytest.mark.parametrize("runner", ["pooling", "auto"])
def test_models_that_do_not_generate(runner: str, tmp_path: Any) -> None:
    model = make_model()
    (model if runner == "pooling" else model.model).save_pretrained(tmp_path)
    given = {"dtype": "float32", "enforce_eager": True, "skip_tokenizer_init": True}
    with pytest.raises(ValueError, match="only models that generate text are served"):
        EngineArgs(str(tmp_path), runner=runner, **given).create_engine_config()


def test_a_family_whose_layers_read_more_than_pages_hold(tmp_path: Any) -> None:
    config = RCMHAConfig(
        vocab_size=97, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4
    )
    RCMHAForCausalLM(config).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="RCMHAForCausalLM"):
        EngineArgs(str(tmp_path), skip_tokenizer_init=True).create_engine_config()


def test_other_versions_of_vllm_get_a_warning_that_names_both(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(vllm, "__version__", "0.99.1")
    monkeypatch.setattr(plugin, "_register_models", lambda: pytest.fail("registered"))
    with caplog.at_level(logging.WARNING):
        plugin.register()
    assert "with vllm 0.99.1; install vllm 0.32.* or 0.33.*" in caplog.text
