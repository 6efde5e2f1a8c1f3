"""Checkpoint folders, and `dynattn convert` on them, for several test files."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from dynattn.scripts.cli import main


def write_checkpoint(folder: Path, config: dict[str, Any], weights: dict[str, Tensor]) -> None:
    """A checkpoint of any format: `config.json` and one file of weights."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(weights, folder / "model.safetensors")


def weights_of(folder: Path) -> dict[str, Tensor]:
    """All weights in a folder, whatever their files."""
    weights: dict[str, Tensor] = {}
    for path in folder.glob("*.safetensors"):
        weights |= load_file(path)
    return weights


def contents(folder: Path) -> dict[str, bytes]:
    """The bytes of each file of a folder, by name."""
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def edit_config(folder: Path, **changes: Any) -> None:
    """Sets fields of `config.json`; the value "ABSENT" removes one."""
    config = {**json.loads((folder / "config.json").read_text()), **changes}
    kept = {name: value for name, value in config.items() if value != "ABSENT"}
    (folder / "config.json").write_text(json.dumps(kept))


def edit_weights(folder: Path, change: Callable[[dict[str, Tensor]], object]) -> None:
    """Lets `change` alter the tensors by name."""
    weights = load_file(folder / "model.safetensors")
    change(weights)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def assert_same_checkpoint(first: Path, second: Path) -> None:
    """The same tensors bit for bit, and the same configuration."""
    assert_same_weights(weights_of(first), weights_of(second))
    assert (first / "config.json").read_text() == (second / "config.json").read_text()


def assert_same_weights(first: dict[str, Tensor], second: dict[str, Tensor]) -> None:
    """The same tensors bit for bit."""
    assert first.keys() == second.keys()
    assert not [key for key, tensor in first.items() if not torch.equal(tensor, second[key])]


def save_tokenizer(folder: Path, vocab_size: int = 300) -> None:
    """A byte-level tokenizer with exactly `vocab_size` tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=["<eos>"], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator([f"heads {number} are composed" for number in range(400)], trainer)
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>").save_pretrained(folder)


def convert(kind: str, source: Path, destination: Path, *options: object) -> int:
    """Runs `dynattn convert` and returns its exit status."""
    return main(["convert", kind, str(source), str(destination), *map(str, options)])


def convert_well(kind: str, source: Path, destination: Path, *options: object) -> None:
    """Runs `dynattn convert`, which must succeed."""
    assert convert(kind, source, destination, *options) == 0


def refusal(capsys: pytest.CaptureFixture[str], *command: object) -> str:
    """Runs `dynattn convert`, which must fail, and returns the one line that it prints on stderr."""
    capsys.readouterr()
    assert main(["convert", *map(str, command)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    return line


def refusal_leaving_nothing(
    capsys: pytest.CaptureFixture[str], work: Path, kind: str, source: Path, *options: str
) -> str:
    """`refusal` of a conversion into the folder `work`, in which nothing may have been written."""
    work.mkdir(exist_ok=True)
    line = refusal(capsys, kind, source, work / "made", *options)
    assert not list(work.iterdir())
    return line
