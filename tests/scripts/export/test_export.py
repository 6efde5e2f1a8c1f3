"""`dynattn export`: graphs that generate what PyTorch generates, and clear refusals of what cannot be exported."""

import json
import re
import shutil
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import transformers
from cases.checkpoints import edit_config, save_tokenizer
from cases.models import make_model
from cases.versions import needs_transformers
from cases.vision_models import strengthen
from transformers import (
    AutoModelForCausalLM,
    BertConfig,
    BertLMHeadModel,
    DynamicCache,
    FalconH1Config,
    FalconH1ForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    PreTrainedModel,
)

from dynattn import DCPythiaConfig, DCPythiaForCausalLM, RCMHAConfig, RCMHAForCausalLM, with_composed_heads
from dynattn.modeling.caches.names import cache_in
from dynattn.scripts.cli import main
from dynattn.scripts.common.errors import UserError
from dynattn.scripts.export.formats import FORMATS
from dynattn.scripts.export.graphs import dynamic_shapes, exportable_attention, graph_inputs
from dynattn.scripts.export.job import quiet
from dynattn.scripts.export.proof import Generated, compare, exact_logits, load_written, make_prompt

NEEDED = {"onnx": ("onnx", "onnxscript", "onnxruntime"), "openvino": ("openvino",), "executorch": ("executorch",)}
SMALL = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4}
# Large weights: with small ones, greedy tokens repeat and the composition hardly matters.
LARGE = {"initializer_range": 0.3}
EXPERTS = {"num_key_value_heads": 2, "num_local_experts": 4}
ONE_LAYER = {"num_hidden_layers": 1, "layer_types": ["sliding_attention"]}


def composed_llama(**fields: Any) -> PreTrainedModel:
    """A model of Transformers with composed heads, and with experts if `fields` have them: then it is a Mixtral."""
    sizes: dict[str, Any] = {**SMALL, **LARGE, "intermediate_size": 48, "max_position_embeddings": 128, "head_dim": 8}
    has_experts = "num_local_experts" in fields
    plain = MixtralForCausalLM if has_experts else LlamaForCausalLM
    config = MixtralConfig if has_experts else LlamaConfig
    model = with_composed_heads(plain, compose_rank=2)(config(**sizes, **fields)).eval()
    strengthen(model)
    return model


def make(family: str) -> PreTrainedModel:
    if family == "composed-llama":
        return composed_llama()
    if family == "composed-mixtral":
        return composed_llama(**EXPERTS)
    if family == "dcformer":
        return make_model(**ONE_LAYER)
    if family == "dcpythia":
        fields = {**SMALL, **LARGE, "intermediate_size": 48, "compose_init_scale": 20.0}
        return DCPythiaForCausalLM(DCPythiaConfig(**fields, max_position_embeddings=128)).eval()
    memory = None if family == "rcmha-all" else 16
    return RCMHAForCausalLM(RCMHAConfig(**SMALL, **LARGE, mem_len=memory)).eval()


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("checkpoint") / "model"
    make_model(**ONE_LAYER, vocab_size=300).save_pretrained(folder)
    save_tokenizer(folder)
    return folder


def export(target: str, source: Path, destination: Path, *options: object) -> int:
    return main(["export", target, str(source), str(destination), *map(str, options)])


def refusal(capsys: pytest.CaptureFixture[str], *command: object) -> str:
    capsys.readouterr()
    assert export(*command) == 2  # type: ignore[arg-type]
    (line,) = capsys.readouterr().err.splitlines()
    return line


@pytest.mark.slow
@torch.no_grad()
def test_graphs_of_torch_take_any_batch_and_length(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Loading them, for the proof and here, must run no code that the file could hold."""
    load = torch.load

    def load_weights_only(*arguments: Any, weights_only: bool, **options: Any) -> Any:
        assert weights_only
        return load(*arguments, weights_only=weights_only, **options)

    monkeypatch.setattr(torch, "load", load_weights_only)
    pytest.importorskip("transformers.exporters")
    destination = tmp_path / "graphs"
    assert export("torch", checkpoint, destination, "--tokens", 6) == 0
    report = capsys.readouterr().out
    assert "verified    6 tokens after each of 2 prompts of 32, one padded: identical to PyTorch's" in report
    assert {"prefill.pt2", "decode.pt2", "config.json", "tokenizer.json"} <= {
        path.name for path in destination.iterdir()
    }
    assert [path.name for path in tmp_path.iterdir()] == ["graphs"]
    model = AutoModelForCausalLM.from_pretrained(checkpoint)
    graphs = load_written(destination, FORMATS["torch"])
    for rows, length in ((1, 3), (3, 21)):
        ids = torch.randint(97, (rows, length + 1))
        mask = torch.ones_like(ids)
        mask[-1, :1] = 0
        first = graphs["prefill"](**graph_inputs(ids[:, :-1], mask[:, :-1], DynamicCache()))
        second = graphs["decode"](**graph_inputs(ids[:, -1:], mask, cache_in(first)))
        positions = (mask.cumsum(-1) - 1).clamp(min=0)
        expected = model(ids, attention_mask=mask, position_ids=positions).logits
        torch.testing.assert_close(second.logits[:, -1], expected[:, -1], atol=1e-3, rtol=1e-4)
        assert cache_in(second).get_seq_length() >= length


@torch.no_grad()
@pytest.mark.slow
def test_graphs_of_executorch_take_one_row_or_two_and_as_many_tokens_as_there_are_positions(tmp_path: Path) -> None:
    pytest.importorskip("executorch")
    exporters = pytest.importorskip("transformers.exporters")
    model = make_model(**ONE_LAYER, max_position_embeddings=64)
    model.save_pretrained(tmp_path / "model")
    assert export("executorch", tmp_path / "model", tmp_path / "graphs", "--tokens", 16) == 0
    graphs = exporters.ExportedModel.from_pretrained(tmp_path / "graphs", device="cpu").runners
    for rows, length in ((1, 2), (2, 21), (1, 63)):
        ids = torch.randint(97, (rows, length + 1))
        mask = torch.ones_like(ids)
        first = graphs["prefill"](**graph_inputs(ids[:, :-1], mask[:, :-1], DynamicCache()))
        second = graphs["decode"](**graph_inputs(ids[:, -1:], mask, cache_in(first)))
        expected = model(ids).logits
        torch.testing.assert_close(second.logits[:, -1], expected[:, -1], atol=1e-3, rtol=1e-4)


def test_axes_vary_up_to_the_limits_of_a_format() -> None:
    pytest.importorskip("transformers.exporters")
    tokens = torch.zeros(2, 8, dtype=torch.long)
    shapes = dynamic_shapes({"input_ids": tokens, "token": tokens[:, :1]}, largest=(2, 64))
    assert [(axis, dim.min, dim.max) for axis, dim in shapes["input_ids"].items()] == [(0, 1, 2), (1, 1, 64)]
    assert list(shapes["token"]) == [0]
    assert all(dim.max is None for dim in dynamic_shapes({"input_ids": tokens})["input_ids"].values())


@pytest.mark.slow
@pytest.mark.parametrize("family", ["dcformer", "dcpythia", "rcmha", "rcmha-all", "composed-llama", "composed-mixtral"])
@pytest.mark.parametrize("target", ["torch", *NEEDED])
def test_every_format_generates_what_pytorch_generates(target: str, family: str, tmp_path: Path) -> None:
    for package in ("transformers.exporters", *NEEDED.get(target, ())):
        pytest.importorskip(package)
    make(family).save_pretrained(tmp_path / "model")
    assert export(target, tmp_path / "model", tmp_path / "graphs") == 0


@pytest.mark.slow
def test_settings_that_training_may_leave_do_not_keep_it_from_export(checkpoint: Path, tmp_path: Path) -> None:
    trained = Path(shutil.copytree(checkpoint, tmp_path / "trained"))
    edit_config(trained, use_cache=False, output_attentions=True)
    assert export("torch", trained, tmp_path / "exported", "--tokens", 2) == 0


def test_the_implementation_comes_back() -> None:
    model = make_model(**ONE_LAYER)
    with pytest.raises(RuntimeError), exportable_attention(model):
        assert model.config._attn_implementation == "eager"
        raise RuntimeError
    assert model.config._attn_implementation == "chunked"
    model = composed_llama()
    attention = model.model.layers[0].self_attn
    with pytest.raises(RuntimeError), exportable_attention(model):
        assert attention.choices.implementation == "eager"
        raise RuntimeError
    assert attention.choices.implementation is None


def test_other_tokens_and_other_logits_are_refused() -> None:
    exact = torch.randn(2, 5, 7, dtype=torch.float64)
    rounded = exact.float()
    right = Generated(rounded.argmax(-1), rounded)
    difference, noise, limit = map(float, re.findall(r"\d\.\de-\d+", compare(right, right, exact, prompt=3)))
    assert difference <= noise < limit
    wrong = right.tokens.clone()
    wrong[1, 2] += 1
    with pytest.raises(UserError, match="other tokens than PyTorch from token 3 on"):
        compare(Generated(wrong, rounded), right, exact, prompt=3)
    with pytest.raises(UserError, match="logits differ"):
        compare(Generated(right.tokens, rounded + 1e-4), right, exact, prompt=3)
    with pytest.raises(UserError, match="logits differ"):
        compare(Generated(right.tokens, rounded * torch.nan), right, exact, prompt=3)


@torch.no_grad()
def test_exact_logits_of_experts_are_those_of_the_model() -> None:
    """Whose implementation by default computes in no float64."""
    model, (prompt, mask) = composed_llama(**EXPERTS), make_prompt(make("composed-llama").config, tokens=3, seed=0)
    tokens = torch.tensor([[1, 2, 3], [4, 5, 6]])
    expected = model(torch.cat([prompt, tokens[:, :-1]], dim=1)[:1]).logits[:, -3:]
    exact = exact_logits(model, prompt, mask, tokens)[:1]
    torch.testing.assert_close(exact.float(), expected, atol=1e-4, rtol=1e-4)
    assert exact.dtype == torch.float64


def test_padding_has_no_position() -> None:
    mask = torch.tensor([[1, 1, 1], [0, 1, 1]])
    for tokens, positions in ((3, [[0, 1, 2], [0, 0, 1]]), (1, [[2], [1]])):
        inputs = graph_inputs(torch.zeros(2, tokens, dtype=torch.long), mask, DynamicCache())
        assert inputs["position_ids"].tolist() == positions


def test_prompts_reach_beyond_the_window_and_fit_the_positions() -> None:
    config = make_model().config
    assert [make_prompt(config, tokens, 0)[0].shape[1] for tokens in (4, 500)] == [32, 12]
    assert make_prompt(config, 4, 0)[1].sum(dim=1).tolist() == [32, 24]  # the last one is padded
    config.sliding_window = 100
    assert make_prompt(config, 4, 0)[0].shape[1] == 108
    with pytest.raises(UserError, match=r"512 positions.*give --tokens 510 or fewer"):
        make_prompt(config, 511, 0)


@needs_transformers("5.23")
def test_what_cannot_be_exported_is_refused(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    destination = tmp_path / "graphs"
    assert "--tokens 0 would compare nothing" in refusal(capsys, "torch", checkpoint, destination, "--tokens", 0)
    assert "does not exist" in refusal(capsys, "torch", tmp_path / "none", destination)
    other = tmp_path / "other"
    other.mkdir()
    (other / "config.json").write_text(json.dumps({"model_type": "llama", "architectures": ["LlamaForCausalLM"]}))
    assert "model of type 'llama'" in refusal(capsys, "torch", other, destination)
    edit_config(other, model_type="dcformer", architectures=["DCFormerModel"])
    assert "no causal language model" in refusal(capsys, "torch", other, destination)
    edit_config(other, model_type="rcmha", architectures=["RCMHAForCausalLM"], memory_type="segment")
    assert "memory_type='segment', whose cache cannot be exported" in refusal(capsys, "torch", other, destination)
    fewer = tmp_path / "fewer"
    make_model().save_pretrained(fewer)
    edit_config(fewer, **ONE_LAYER)
    assert "weights that its config.json does not ask for, such as model.layers.1." in refusal(
        capsys, "torch", fewer, destination
    )
    monkeypatch.setitem(sys.modules, "transformers.exporters", ModuleType("exporters"))
    line = refusal(capsys, "onnx", checkpoint, destination)
    assert f"transformers {transformers.__version__} has no exporters" in line
    assert "install transformers 5.23 or newer" in line
    assert not destination.exists()


@needs_transformers("5.23")
def test_a_tokenizer_with_more_tokens_than_the_model_is_refused(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = Path(shutil.copytree(checkpoint, tmp_path / "source"))
    save_tokenizer(source, vocab_size=310)
    line = refusal(capsys, "torch", source, tmp_path / "graphs")
    assert "ids up to 309 but the model embeds 300 (0 ... 299); give the tokenizer" in line
    assert not (tmp_path / "graphs").exists()


LONGROPE = {"factor": 2.0, "short_factor": [1.0] * 4, "long_factor": [2.0] * 4, "original_max_position_embeddings": 64}


@needs_transformers("5.23")
def test_layers_with_states_of_linear_attention_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    states = {"mamba_d_ssm": 32, "mamba_n_heads": 4, "mamba_d_state": 8, "mamba_d_head": 8}
    config = FalconH1Config(**SMALL, **states, intermediate_size=48, num_key_value_heads=2)
    with_composed_heads(FalconH1ForCausalLM)(config).save_pretrained(tmp_path / "model")
    assert main(["export", "torch", str(tmp_path / "model"), str(tmp_path / "graphs")]) == 2
    assert "has layers of linear attention or convolutions" in capsys.readouterr().err


@needs_transformers("5.23")
def test_a_language_model_that_reads_both_ways_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It keeps no cache, which the decoding graph needs; exporters only say that they find none."""
    config = BertConfig(**SMALL, intermediate_size=48, is_decoder=False)
    with_composed_heads(BertLMHeadModel, dropout=0.0)(config).save_pretrained(tmp_path / "model")
    told = refusal(capsys, "torch", tmp_path / "model", tmp_path / "graphs")
    assert "is a bert that reads each token with those after it" in told


@needs_transformers("5.23")
@pytest.mark.parametrize("rope", [{"rope_type": "dynamic", "factor": 2.0}, {"rope_type": "longrope", **LONGROPE}])
def test_angles_that_depend_on_the_batch_are_refused(
    rope: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    parameters = {"rope_theta": 1e4, **rope}
    make_model(**ONE_LAYER, head_dim=8, rope_parameters=parameters).save_pretrained(tmp_path / "ours")
    composed_llama(rope_parameters=parameters).save_pretrained(tmp_path / "theirs")
    for folder in ("ours", "theirs"):
        told = refusal(capsys, "torch", tmp_path / folder, tmp_path / "graphs")
        assert f"has rope_type '{rope['rope_type']}'" in told


@needs_transformers("5.23")
def test_a_missing_package_is_named(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    exporters = pytest.importorskip("transformers.exporters")
    monkeypatch.setattr(exporters.OnnxExporter, "required_packages", ["torch", "no_such_package"])
    line = refusal(capsys, "onnx", checkpoint, tmp_path / "graphs")
    assert "no_such_package" in line
    assert "pip install 'dynattn[export]'" in line
    monkeypatch.setattr(exporters.ExecutorchExporter, "required_packages", ["torch", "no_such_package"])
    assert "pip install 'dynattn[executorch]'" in refusal(capsys, "executorch", checkpoint, tmp_path / "graphs")


@needs_transformers("5.23")
def test_wrong_graphs_leave_what_was_there(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("transformers.exporters")
    destination = tmp_path / "graphs"
    destination.mkdir()
    (destination / "config.json").write_text("{}")

    def fail(*_: object) -> None:
        raise ValueError("this is step 3/3") from RuntimeError("no such operator")

    monkeypatch.setattr("dynattn.scripts.export.job.export_graphs", fail)
    line = refusal(capsys, "torch", checkpoint, destination, "--overwrite")
    assert "the exporter fails on this model: RuntimeError: no such operator" in line

    def fill_disk(*_: object) -> None:
        raise RuntimeError("[enforce fail at inline_container.cc:672] . unexpected pos 64 vs 0")

    monkeypatch.setattr("dynattn.scripts.export.job.export_graphs", fill_disk)
    line = refusal(capsys, "torch", checkpoint, destination, "--overwrite")
    assert "a file could not be written to its end; is the disk full?" in line
    assert [path.name for path in tmp_path.iterdir()] == ["graphs"]
    assert (destination / "config.json").read_text() == "{}"


@pytest.mark.parametrize("shown", [True, False])
def test_progress_bars_are_as_before_after_an_export(shown: bool) -> None:
    logging = transformers.utils.logging
    (logging.enable_progress_bar if shown else logging.disable_progress_bar)()
    try:
        with quiet():
            assert not logging.is_progress_bar_enabled()
        assert logging.is_progress_bar_enabled() == shown
    finally:
        logging.enable_progress_bar()
