"""The studies of a trained model: what they compare, what they write, and what they refuse."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cases.checkpoints import save_tokenizer
from cases.models import make_model
from transformers import LlamaConfig, LlamaForCausalLM

from dynattn import with_composed_heads
from dynattn.scripts.cli import main
from dynattn.scripts.common.atomic_file import write_json
from dynattn.scripts.common.errors import UserError
from dynattn.scripts.reproduce import speculation
from dynattn.scripts.reproduce.quantization import (
    SUMMED_AXES,
    load_variant,
    quantize_composition,
    rounded,
    window_losses,
)
from dynattn.scripts.reproduce.speculation import SpeculationArguments, compare_ways, load, make_ways
from dynattn.scripts.reproduce.study_files import TRAINED, claim_folder, describe_run, held_out_windows, write_study


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """What the studies read of a run of `dynattn pretrain`."""
    folder = tmp_path / "run"
    stream = folder / "data" / "validation"
    stream.mkdir(parents=True)
    np.arange(50, dtype=np.int32).tofile(stream / "tokens.bin")
    np.save(stream / "starts.npy", np.zeros(1, dtype=np.int64))
    (stream / "stream.json").write_text('{"text_bytes": 100}')
    make_model(num_hidden_layers=1, layer_types=["full_attention"], vocab_size=300).save_pretrained(folder / "model")
    save_tokenizer(folder / "model")
    arguments = dict.fromkeys(TRAINED, 1) | {"dataset": "/somewhere/text.txt"}
    write_json(folder / "result.json", {"arguments": arguments, "parameters": 7})
    return folder


def test_windows_are_the_held_out_tokens_of_the_run(run: Path) -> None:
    assert held_out_windows(str(run), 20).tolist() == [list(range(20)), list(range(20, 40))]
    assert describe_run(str(run))["dataset"] == "text.txt"
    with pytest.raises(UserError, match="holds out 50 tokens, too few for a window of 60"):
        held_out_windows(str(run), 60)
    with pytest.raises(UserError, match="is no finished run"):
        held_out_windows(str(run / "model"), 20)


@pytest.mark.parametrize(
    "foreign", [{"loss": 1}, {"arguments": None, "parameters": 7}, {"arguments": {}, "parameters": 7}]
)
def test_results_of_something_else_are_refused(foreign: dict[str, Any], run: Path) -> None:
    write_json(run / "result.json", foreign)
    with pytest.raises(UserError, match=r"does not hold the result of dynattn pretrain: .*; give another run"):
        describe_run(str(run))


def test_weights_are_rounded_to_steps_of_their_column() -> None:
    weight = torch.randn(40, 3)
    result = rounded(weight, 4, axis=0)
    steps = weight.abs().amax(0) / 7
    assert (result - weight).abs().le(steps / 2 * 1.0001).all()
    assert all(len(column.unique()) <= 15 for column in result.T)
    assert torch.equal(rounded(torch.zeros(2, 2), 8, axis=0), torch.zeros(2, 2))


def test_only_composition_is_quantized_and_the_loss_hears_of_it() -> None:
    model = make_model()
    before = {name: weight.clone() for name, weight in model.named_parameters()}
    windows = torch.randint(97, (3, 12))
    losses = window_losses(model, windows)
    plain = model(windows, labels=windows, use_cache=False).loss
    torch.testing.assert_close(losses.mean(), plain.detach())
    quantize_composition(model, 4)
    changed = {name for name, weight in model.named_parameters() if not torch.equal(weight, before[name])}
    assert changed == {name for name in before if name.rpartition(".")[2] in SUMMED_AXES}
    assert not torch.equal(window_losses(model, windows), losses)


def test_heads_that_are_composed_in_place_stay_composed_in_a_variant(tmp_path: Path) -> None:
    sizes: dict[str, Any] = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1}
    config = LlamaConfig(**sizes, vocab_size=97, num_attention_heads=2, num_key_value_heads=2)
    model = with_composed_heads(LlamaForCausalLM)(config).eval()
    for name, weight in model.named_parameters():
        if "composition." in name:
            torch.nn.init.normal_(weight)
    model.save_pretrained(tmp_path)
    ids = torch.randint(97, (1, 9))
    loaded, _ = load_variant(tmp_path, {}, bits=0)
    torch.testing.assert_close(loaded(ids).logits, model(ids).logits)


def test_drafts_with_heads_composed_in_place_are_called_composed(run: Path) -> None:
    sizes = {"vocab_size": 300, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4}
    with_composed_heads(LlamaForCausalLM)(LlamaConfig(**sizes, num_hidden_layers=1)).save_pretrained(run / "model")
    given = SpeculationArguments(run=str(run), drafts=[str(run)], output="unused")
    assert any(name.startswith("composed draft run, ") for name in make_ways(given, load(str(run))[1]))


def test_speculation_is_compared_on_its_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_model()
    model.generation_config.pad_token_id = 0
    prompts = torch.randint(1, 97, (2, 9))
    ways: dict = {"greedy": {}, "lookup": {"prompt_lookup_num_tokens": 3}}
    first, second = compare_ways(model, prompts, ways, tokens=5, rounds=1)
    assert first["passes_per_token"] == 1.0
    assert 0 < second["passes_per_token"] <= 1.0
    counted = iter([(torch.zeros(1), 5), (torch.ones(1), 5)])
    monkeypatch.setattr(speculation, "count_passes", lambda *_: next(counted))
    with pytest.raises(UserError, match="other tokens than by greedy decoding: lookup"):
        compare_ways(model, prompts, ways, tokens=5, rounds=1)


def test_record_and_table_hold_the_same_rows(tmp_path: Path) -> None:
    rows = [{"way_of_it": "a", "bytes": 1234}, {"way_of_it": "b", "bytes": 5}]
    settings = {"study": "lengths", "length": 3}
    folder = claim_folder(str(tmp_path / "study"), settings)
    table = write_study(folder, settings, rows)
    assert table.splitlines() == ["| way of it | bytes |", "| --- | --- |", "| a | 1,234 |", "| b | 5 |"]
    record = json.loads((folder / "record.json").read_text())
    assert record["rows"] == rows
    assert record["settings"] == settings


def test_a_study_replaces_no_record_of_another(tmp_path: Path) -> None:
    (tmp_path / "record.json").write_text("precious")
    with pytest.raises(UserError, match="holds something that is no study of speculation"):
        claim_folder(str(tmp_path), {"study": "speculation"})
    folder = claim_folder(str(tmp_path / "study"), {"study": "lengths", "length": 3})
    write_study(folder, {}, [{"bytes": 1}])
    with pytest.raises(UserError, match=r"a study with other length \(3 there, 4 now\)"):
        claim_folder(str(folder), {"study": "lengths", "length": 4})
    assert (tmp_path / "record.json").read_text() == "precious"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["speculation", "--drafts", "b", "--prompts", "0"], "prompts=0 must be a positive number"),
        (["speculation", "--drafts", "b", "--rounds", "-1"], "rounds=-1 must be a positive number"),
        (["quantization", "--length", "1"], "length=1 must be 2 or more"),
    ],
)
def test_numbers_out_of_range_are_told(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["reproduce", *words, "--run", "a", "--output", "o"]) == 2
    assert message in capsys.readouterr().err


def test_speculation_from_the_command_line(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--prompts", "1", "--prompt_length", "8", "--tokens", "4", "--rounds", "1"]
    folders = ["--run", str(run), "--drafts", str(run), "--output", str(tmp_path / "study")]
    assert main(["reproduce", "speculation", *folders, *options]) == 0
    assert "| composed draft run, " in capsys.readouterr().out
    assert str(tmp_path) not in (tmp_path / "study" / "record.json").read_text()


def test_drafts_that_do_not_fit_are_refused_before_anything_is_written(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other, masked = (Path(shutil.copytree(run, tmp_path / name)) for name in ("other", "masked"))
    save_tokenizer(other / "model", vocab_size=290)
    arguments = dict.fromkeys(TRAINED, 1) | {"dataset": "text.txt", "objective": "masked_lm"}
    write_json(masked / "result.json", {"arguments": arguments, "parameters": 7})
    command = ["reproduce", "speculation", "--run", str(run), "--output", str(tmp_path / "study"), "--tokens", "4"]
    for options, message in [
        (["--drafts", str(other), "--prompts", "1", "--prompt_length", "8"], "has another tokenizer than"),
        (
            ["--drafts", str(masked), "--prompts", "1", "--prompt_length", "8"],
            "with objective=masked_lm",
        ),
        (["--drafts", str(tmp_path / "nope"), "--prompts", "1", "--prompt_length", "8"], "is no finished run"),
        (
            ["--drafts", str(run), str(run), "--prompts", "1", "--prompt_length", "8"],
            "two drafts are a composed",
        ),
        (["--drafts", str(run), "--prompts", "9", "--prompt_length", "20"], "holds out 2 windows of 20 tokens; lower"),
    ]:
        assert main([*command, *options]) == 2
        assert message in capsys.readouterr().err
    assert not (tmp_path / "study").exists()
    assert main(["reproduce", "quantization", "--run", str(run), "--output", str(tmp_path), "--length", "40"]) == 2
    assert "one such window only" in capsys.readouterr().err


def test_texts_beyond_a_table_of_positions_are_refused(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    short = Path(shutil.copytree(run, tmp_path / "short"))
    learned = {"position_scheme": "learned", "max_position_embeddings": 30}
    make_model(num_hidden_layers=1, layer_types=["full_attention"], vocab_size=300, **learned).save_pretrained(
        short / "model"
    )
    output = str(tmp_path / "study")
    speculation = ["--run", str(run), "--drafts", str(short), "--prompts", "1", "--prompt_length", "20"]
    assert main(["reproduce", "speculation", *speculation, "--tokens", "11", "--output", output]) == 2
    assert "prompt_length=20 and tokens=11, but the model of" in capsys.readouterr().err
    assert main(["reproduce", "speculation", *speculation, "--tokens", "10", "--output", output]) == 0
    quantization = ["--run", str(short), "--length", "31", "--output", output]
    assert main(["reproduce", "quantization", *quantization]) == 2
    assert "length=31, but the model of" in capsys.readouterr().err
