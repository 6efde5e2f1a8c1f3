"""Sources from anywhere: what is in them is refused in one line, and neither read nor written outside of the folder."""

import json
import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from cases.checkpoints import convert, edit_config, refusal
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, GPTNeoXConfig, LlamaConfig

import dynattn
from dynattn.scripts.common.errors import UserError
from dynattn.scripts.convert.common import hub
from dynattn.scripts.convert.common.arguments import parse_size

SMALL: dict[str, Any] = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
}
OURS = {**SMALL, "bos_token_id": None, "eos_token_id": None}
SECRET = "not of this checkpoint"
# The conversion that reads each kind of source.
KINDS = {"llama": "llama", "neox": "pythia", "official": "official", "rcmha": "rcmha", "ours": "official"}


@pytest.fixture(scope="module")
def originals(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small checkpoint of each format."""
    folder = tmp_path_factory.mktemp("originals")
    AutoModelForCausalLM.from_config(LlamaConfig(**SMALL)).save_pretrained(folder / "llama")
    AutoModelForCausalLM.from_config(GPTNeoXConfig(**SMALL)).save_pretrained(folder / "neox")
    dynattn.DCFormerForCausalLM(dynattn.DCFormerConfig(**OURS)).save_pretrained(folder / "ours")
    relative = dynattn.RCMHAConfig(**OURS, mem_len=8, memory_type="segment")
    dynattn.RCMHAForCausalLM(relative).save_pretrained(folder / "ours-rcmha")
    for kind, ours in (("official", "ours"), ("rcmha", "ours-rcmha")):
        assert convert(kind, folder / ours, folder / kind, "--reverse", "--no-verify") == 0
    return folder


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A folder with a file that belongs to nobody's checkpoint."""
    (tmp_path / "outside").write_text(SECRET)
    return tmp_path


@pytest.fixture
def refused(originals: Path, place: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Damages a copy of a source, converts it in vain, and returns the one line that says why."""

    def run(kind: str, damage: Callable[[Path], object], *options: object, destination: object = place / "made") -> str:
        source = Path(shutil.copytree(originals / kind, place / "source", dirs_exist_ok=True))
        damage(source)
        before = sorted(path.name for path in place.iterdir())
        line = refusal(capsys, KINDS[kind], source, destination, "--no-verify", *options)
        assert sorted(path.name for path in place.iterdir()) == before
        return line

    return run


@pytest.mark.parametrize(
    ("kind", "field", "value", "says"),
    [
        ("llama", "dtype", "float99", "dtype in config.json is 'float99'; it can be float32, bfloat16"),
        ("neox", "torch_dtype", 3, "torch_dtype in config.json is 3"),
        ("official", "torch_dtype", "int8", "torch_dtype in config.json is 'int8'"),
        ("llama", "hidden_act", "no-such", "no-such"),
        ("llama", "hidden_size", -32, "hidden_size in config.json is -32; with these weights it must be positive"),
        ("llama", "num_attention_heads", 0, "num_attention_heads in config.json is 0"),
        ("neox", "num_attention_heads", 0, "num_attention_heads in config.json is 0"),
        ("llama", "num_hidden_layers", 10**7, "num_hidden_layers in config.json is 10000000"),
        ("neox", "num_hidden_layers", 10**7, "at most 28 (tensors there are)"),
        ("official", "n_layer", 10**7, "n_layer in config.json is 10000000"),
        ("rcmha", "n_layers", 10**7, "n_layers in config.json is 10000000"),
        ("neox", "hidden_size", 10**9, "at most 96 (the longest dimension of a tensor)"),
        ("official", "dim", 10**12, "dim in config.json is 1000000000000"),
        ("rcmha", "d_model", 10**12, "d_model in config.json is 1000000000000"),
        ("rcmha", "P", 10**12, "P in config.json is 1000000000000, but the position tables have"),
        ("llama", "intermediate_size", 10**30, "integers go up to 9223372036854775807"),
        ("official", "rope_base", 10**400, "rope_base in config.json is 1000"),
        ("official", "norm_eps", float("nan"), "norm_eps in config.json is nan; it must be positive and finite"),
        ("llama", "quantization_config", {"quant_method": "gptq"}, "quantized weights are not supported"),
        ("official", "quantization_config", 3, "quantization_config in config.json is 3"),
        ("llama", "id2label", 3, "is not valid: AttributeError: 'int' object"),
        ("official", "architectures", 3, "architectures in config.json is 3; it must be a list"),
        ("official", "model_type", [], "model_type in config.json is []; it must be text"),
        ("rcmha", "kind", {}, "kind {} is unknown"),
    ],
)
def test_hostile_values(kind: str, field: str, value: Any, says: str, refused: Callable[..., str]) -> None:
    assert says in refused(kind, lambda source: edit_config(source, **{field: value}))


def test_hostile_values_of_our_format(refused: Callable[..., str]) -> None:
    for field, value in (("dtype", 3), ("hidden_size", -32), ("num_hidden_layers", 10**7), ("vocab_size", 10**12)):
        line = refused("ours", lambda source, change={field: value}: edit_config(source, **change), "--reverse")
        assert f"{field} in config.json is {value}" in line


def write_index(source: Path, text: str) -> None:
    """Writes the index of a source whose weights are in shards; beside a single file it would not be read."""
    (source / "model.safetensors").unlink()
    (source / "model.safetensors.index.json").write_text(text)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors.index.json", "generation_config.json"])
@pytest.mark.parametrize(
    "text", ["[" * 100_000 + "]" * 100_000, '{"a":' * 100 + "1" + "}" * 100], ids=["long", "short"]
)
def test_deep_json(name: str, text: str, refused: Callable[..., str]) -> None:
    def write(source: Path) -> None:
        write_index(source, text) if "index" in name else (source / name).write_text(text)

    assert "more than 64 levels deep" in refused("llama", write)


@pytest.mark.parametrize(
    "name", ["config.json", "model.safetensors", "generation_config.json", "LICENSE", "tokenizer.json", "odd.jinja"]
)
@pytest.mark.parametrize("target", ["outside", "../outside"])
def test_links_out_of_the_folder(name: str, target: str, place: Path, refused: Callable[..., str]) -> None:
    def link(source: Path) -> None:
        (source / name).unlink(missing_ok=True)
        (source / name).symlink_to(target if target.startswith("..") else place / target)

    line = refused("llama", link, destination=place / "parent" / "made")
    assert f"{name} is a link to {place / 'outside'}, outside the checkpoint's folder" in line


def test_links_inside_the_folder(originals: Path, place: Path) -> None:
    source = Path(shutil.copytree(originals / "llama", place / "source"))
    (source / "model.safetensors").rename(source / "weights.data")
    (source / "model.safetensors").symlink_to("weights.data")
    assert convert("llama", source, place / "made", "--no-verify") == 0
    assert not any(path.is_symlink() for path in (place / "made").iterdir())


def test_links_of_the_cache_of_the_hub(originals: Path, place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    blobs, snapshot = (place / "models--org--name" / part for part in ("blobs", "snapshots/0123abc"))
    shutil.copytree(originals / "llama", blobs)
    snapshot.mkdir(parents=True)
    for blob in blobs.iterdir():
        (snapshot / blob.name).symlink_to(os.path.relpath(blob, snapshot))
    assert convert("llama", snapshot, place / "made", "--no-verify") == 0
    (snapshot / "LICENSE").symlink_to(place / "outside")
    assert "LICENSE is a link to" in refusal(capsys, "llama", snapshot, place / "other", "--no-verify")


def index_with(name: object) -> Callable[[Path], object]:
    """Damages a source with an index of one weight file that is called so."""
    index = json.dumps({"weight_map": {"lm_head.weight": name}})
    return lambda source: write_index(source, index)


@pytest.mark.parametrize(
    "name", ["../outside", "/etc/passwd", "", ".", "..", "a\0b", "x" * 400, "a\nb", 3, None, ["a"]]
)
def test_an_index_that_names_files_elsewhere(name: object, refused: Callable[..., str]) -> None:
    assert "which is no file name in that folder" in refused("llama", index_with(name))


def header(shape: list[int], offsets: list[int], length: int | None = None) -> Callable[[Path], object]:
    """Damages a source with a safetensors file of one tensor and four bytes."""
    text = json.dumps({"lm_head.weight": {"dtype": "F32", "shape": shape, "data_offsets": offsets}}).encode()
    content = (len(text) if length is None else length).to_bytes(8, "little") + text + bytes(4)
    return lambda source: (source / "model.safetensors").write_bytes(content)


@pytest.mark.parametrize(
    "damage",
    [header([2**60], [0, 4]), header([1], [0, 2**60]), header([2**62, 2**62], [0, 4]), header([1], [0, 4], 2**63)],
    ids=["shape", "offsets", "overflow", "length"],
)
def test_absurd_headers(damage: Callable[[Path], object], refused: Callable[..., str]) -> None:
    assert "truncated or no safetensors file" in refused("llama", damage)


def test_flipped_bytes_of_a_header(refused: Callable[..., str]) -> None:
    def flip(source: Path, place: int) -> None:
        content = bytearray((source / "model.safetensors").read_bytes())
        content[place] ^= 1 << 4
        (source / "model.safetensors").write_bytes(content)

    for place in (0, 7, 8, 9):
        assert "truncated or no safetensors file" in refused("llama", lambda source, place=place: flip(source, place))


def test_names_of_tensors_that_would_break_a_line(refused: Callable[..., str]) -> None:
    def rename(source: Path) -> None:
        save_file({"a\nb": torch.ones(2), **load_file(source / "model.safetensors")}, source / "model.safetensors")

    assert r"names a tensor 'a\nb'" in refused("llama", rename)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ({"lm_head.weight": torch.ones(1).expand(10**12)}, "does not store all of its elements"),
        ({"lm_head.weight": torch.ones(3, 3).to_sparse()}, "does not store all of its elements"),
        ({3: torch.ones(2)}, "something else than tensors by name"),
        ({"lm_head.weight": shutil.rmtree}, "a pickle that runs code"),
    ],
    ids=["expanded", "sparse", "number", "code"],
)
def test_pickles_of_odd_content(content: dict[Any, Any], says: str, refused: Callable[..., str]) -> None:
    def write(source: Path) -> None:
        (source / "model.safetensors").unlink()
        torch.save(content, source / "pytorch_model.bin")

    assert says in refused("llama", write)


def test_a_pickle_of_another_protocol_is_refused_in_one_line(
    refused: Callable[..., str], recwarn: pytest.WarningsRecorder
) -> None:
    def write(source: Path) -> None:
        (source / "model.safetensors").unlink()
        (source / "pytorch_model.bin").write_bytes(pickle.dumps({"lm_head.weight": shutil.rmtree}))

    assert "a pickle that runs code" in refused("llama", write)
    assert not [warning for warning in recwarn if "pickle protocol" in str(warning.message)]


@pytest.mark.parametrize("alone", [True, False])
def test_an_adapter_that_names_another_model(place: Path, refused: Callable[..., str], alone: bool) -> None:
    """PEFT writes it into a folder of its own, or beside a model."""

    def write(source: Path) -> None:
        adapter = {"base_model_name_or_path": str(place), "peft_type": "LORA"}
        (source / "adapter_config.json").write_text(json.dumps(adapter))
        if alone:
            (source / "config.json").unlink()

    assert "holds an adapter (adapter_config.json)" in refused("llama", write)


@pytest.mark.parametrize(
    ("destination", "says"),
    [
        ("a\0b", "unprintable characters"),
        ("a\nb", "unprintable characters"),
        ("", "empty"),
        ("x" * 300, "File name too long"),
        ("x" * 240, "has 240 bytes; give one of at most 220"),
        ("/", "holds the current folder"),
        (".", "holds the current folder"),
        ("..", "holds the current folder"),
        ("source", "overlap"),
        ("source/inside", "overlap"),
        ("link", "overlap"),
        ("link/inside", "overlap"),
        ("outside", "is a file"),
        ("outside/inside", "outside is a file, so that no folder can be written in it"),
        ("circle", "Too many levels of symbolic links"),
        ("circle/inside", "Too many levels of symbolic links"),
    ],
)
def test_hostile_destinations(
    destination: str, says: str, place: Path, refused: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (place / "work").mkdir()
    monkeypatch.chdir(place / "work")
    (place / "link").symlink_to("source")
    (place / "circle").symlink_to("circle")
    is_beside = destination not in ("", "/", ".", "..")
    line = refused("llama", lambda _: None, destination=f"../{destination}" if is_beside else destination)
    assert says in line


def test_a_destination_that_may_not_be_written(place: Path, refused: Callable[..., str]) -> None:
    (place / "closed").mkdir(mode=0o500)
    if os.access(place / "closed", os.W_OK):
        pytest.skip("nothing is forbidden to root")
    assert "Permission denied" in refused("llama", lambda _: None, destination=place / "closed" / "made")


@pytest.mark.parametrize(
    ("source", "revision", "says"),
    [
        ("org/na\nme", None, "unprintable characters"),
        ("org/name\0", None, "unprintable characters"),
        ("x" * 300, None, "File name too long"),
        ("", None, "empty"),
        ("org/../name", None, "does not exist"),
        ("http://host/name", None, "does not exist"),
        ("org/name/more", "main", "does not exist"),
        ("org/name", "../../elsewhere", "is no branch, tag or commit"),
        ("org/name", "a\0b", "is no branch, tag or commit"),
        ("org/name", "", "is no branch, tag or commit"),
        ("org/name", "x" * 300, "is no branch, tag or commit"),
        (".", "main", "revision main only matters for a name on the Hub"),
    ],
)
def test_hostile_names_on_the_hub(
    source: str, revision: str | None, says: str, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hub, "snapshot_download", lambda *_, **__: pytest.fail("the Hub was asked"))
    monkeypatch.chdir(place)
    with pytest.raises(UserError) as error:
        hub.locate(source, revision)
    assert says in str(error.value)
    assert len(str(error.value).splitlines()) == 1


def test_a_size_that_no_number_holds() -> None:
    assert parse_size("9" * 400 + "GB") > 10**400
