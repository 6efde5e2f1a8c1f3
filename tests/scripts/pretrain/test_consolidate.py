"""Checkpoints in shards become models in Hugging Face format, and nothing is written that differs."""

import shutil
import warnings
from pathlib import Path

import pytest
import torch
from cases.checkpoints import assert_same_weights, weights_of
from cases.training import earlier_format, killed_run, run_forked
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from dynattn.scripts.cli import main
from dynattn.scripts.pretrain import Result
from dynattn.scripts.pretrain.outputs.run_folder import RunFolder


def test_the_last_checkpoint_becomes_the_final_model(
    finished: Result, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    words = ["--overwrite", str(finished.output), "--destination", str(tmp_path / "model")]
    with warnings.catch_warnings(record=True) as shown:
        warnings.simplefilter("always")
        assert main(["convert", "consolidate", *words]) == 0
    assert "verified" in capsys.readouterr().out
    assert not [str(warning.message) for warning in shown if "torch.distributed" in str(warning.message)]
    assert_same_weights(weights_of(tmp_path / "model"), weights_of(finished.model))
    for name in ("config.json", "generation_config.json", "tokenizer_config.json", "tokenizer.json"):
        assert (tmp_path / "model" / name).read_text() == (finished.model / name).read_text()
    ids = AutoTokenizer.from_pretrained(tmp_path / "model")("The number 3", return_tensors="pt").input_ids
    one, two = (
        AutoModelForCausalLM.from_pretrained(folder)(ids).logits for folder in (tmp_path / "model", finished.model)
    )
    assert torch.equal(one, two)


def test_shards_of_two_processes_become_one_model(corpus: Path, tmp_path: Path):
    model = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    run = {"model_type": "dcformer", "model_config": model, "batch_size": 2, "max_steps": 2, "warmup_steps": 0}
    run_forked(2, tmp_path / "run", corpus, **run, engine="fsdp2", save_in_background=True)
    (checkpoint,) = (tmp_path / "run" / "checkpoints").iterdir()
    assert len(list((checkpoint / "tensors").iterdir())) == 2
    assert main(["convert", "consolidate", str(checkpoint), str(tmp_path / "model")]) == 0
    expected = weights_of(tmp_path / "run" / "model")
    assert_same_weights(weights_of(tmp_path / "model"), expected)
    assert main(["convert", "consolidate", str(checkpoint), str(tmp_path / "half"), "--dtype", "bfloat16"]) == 0
    halved = {name: tensor.bfloat16() for name, tensor in expected.items()}
    assert_same_weights(weights_of(tmp_path / "half"), halved)


def test_a_checkpoint_of_an_earlier_version_is_consolidated_too(corpus: Path, tmp_path: Path):
    with earlier_format():
        killed_run(tmp_path / "run", corpus, 5)
    assert main(["convert", "consolidate", str(tmp_path / "run"), str(tmp_path / "model")]) == 0
    stored = load_file(tmp_path / "run" / "checkpoints" / "step-000004" / "model.safetensors")
    written = load_file(tmp_path / "model" / "model.safetensors")
    assert all(torch.equal(written[name], stored[name]) for name in written.keys() & stored.keys())


def test_a_checkpoint_that_a_run_has_left_behind_finds_its_tokenizer(interrupted: Path, tmp_path: Path):
    output = Path(shutil.copytree(interrupted, tmp_path / "run"))
    RunFolder(output).leave_later_checkpoints(4)
    left = output / "checkpoints" / "abandoned-1" / "step-000008"
    assert main(["convert", "consolidate", str(left), str(tmp_path / "model")]) == 0
    one, two = (AutoTokenizer.from_pretrained(folder) for folder in (output / "tokenizer", tmp_path / "model"))
    assert one.get_vocab() == two.get_vocab()


def test_what_cannot_be_consolidated_is_one_line(interrupted: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    output = Path(shutil.copytree(interrupted, tmp_path / "run"))
    (shard,) = (output / "checkpoints" / "step-000008" / "tensors").iterdir()
    shard.write_bytes(shard.read_bytes()[:-1])
    for source, message in ((tmp_path, "is neither a checkpoint"), (output, "step-000008 is damaged: tensors/shard")):
        assert main(["convert", "consolidate", str(source), str(tmp_path / "model")]) == 2
        error = capsys.readouterr().err
        assert message in error
        assert error.count("\n") == 1
    assert not (tmp_path / "model").exists()
    for destination, message in (("", "name of a folder"), ("/", "holds the current folder"), ("a\nb", "")):
        assert main(["convert", "consolidate", str(interrupted), destination]) == 2
        error = capsys.readouterr().err
        assert message in error and "Traceback" not in error
