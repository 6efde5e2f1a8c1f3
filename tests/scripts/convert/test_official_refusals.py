"""What `dynattn convert official` refuses: one clear line each, and nothing written or lost."""

import dataclasses
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from cases.checkpoints import convert, edit_config, edit_weights, refusal, refusal_leaving_nothing
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedConfig

import dynattn
from dynattn.scripts.common.atomic_folder import MACHINE
from dynattn.scripts.convert import Conversion
from dynattn.scripts.convert.common import model_loading, shards
from dynattn.scripts.convert.common.transforms import Select
from dynattn.scripts.convert.common.weight_map import Rule
from dynattn.scripts.convert.official import layout as official_layout
from dynattn.scripts.convert.official import plan, verify
from dynattn.scripts.convert.official.merged_copies import merged_difference

SMALL = {
    "vocab_size": 61,
    "hidden_size": 64,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "sliding_window": 7,
    "max_position_embeddings": 64,
    # Large weights: with small ones a wrong conversion would still look right.
    "initializer_range": 0.2,
    "compose_init_scale": 40.0,
    "bos_token_id": None,
    "eos_token_id": None,
}
FAMILIES = {"dcformer": dynattn.DCFormerForCausalLM, "dcpythia": dynattn.DCPythiaForCausalLM}


def save_ours(folder: Path, family: str = "dcformer", **overrides: Any) -> None:
    config_class: type[PreTrainedConfig] = FAMILIES[family].config_class
    torch.manual_seed(1)
    FAMILIES[family](config_class(**{**SMALL, **overrides})).save_pretrained(folder)


def run(source: Path, destination: Path, *options: str) -> int:
    return convert("official", source, destination, *options)


BOTH_FAMILIES = pytest.mark.parametrize("original", FAMILIES, indirect=True)


@pytest.fixture(scope="module")
def original(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An official checkpoint folder, of a DCFormer if nothing else is asked for."""
    folder = tmp_path_factory.mktemp("original")
    save_ours(folder / "made", getattr(request, "param", "dcformer"))
    assert run(folder / "made", folder / "official", "--reverse") == 0
    return folder / "official"


@pytest.fixture
def official(original: Path, tmp_path: Path) -> Path:
    """A copy that a test may damage."""
    return Path(shutil.copytree(original, tmp_path / "official"))


@pytest.fixture
def refused(official: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Converts, and returns the one line that explains why it did not; nothing may have been written."""
    return lambda *options, source=official: refusal_leaving_nothing(
        capsys, tmp_path / "work", "official", source, *options
    )


@BOTH_FAMILIES
@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"n_local_heads": 2}, "grouped-query"),
        ({"n_head": 5, "n_local_heads": 5}, "n_head (5) must be even"),
        ({"n_head": 1, "n_local_heads": 1}, "n_head (1) must be even"),
        ({"n_head": 0, "n_local_heads": 0}, "n_head in config.json is 0"),
        ({"n_head": 8, "n_local_heads": 8}, "has shape"),
        ({"n_layer": 1}, "layers.1."),
        ({"n_layer": 3}, "the weights lack layers.2."),
        ({"n_layer": "2"}, "n_layer"),
        ({"vocab_size": 60}, "tok_embeddings.weight has shape (61, 64), but config.json asks for (60, 64)"),
        ({"dim": 128}, "has shape"),
        ({"intermediate_size": 47}, "has shape"),
        ({"window_type": "LLG"}, "window_type 'LLG' is unknown"),
        ({"window_size": 0}, "sliding_window"),
        ({"use_dcmha": False}, "use_dcmha is false"),
        ({"tie_word_embeddings": True}, "tie_word_embeddings"),
        ({"model_type": "gpt2"}, "not of an official"),
        ({"dim": "ABSENT"}, "not of an official"),
        ({"hidden_size": 32, "dim": "ABSENT"}, "--reverse"),
    ],
    ids=str,
)
def test_impossible_configurations(
    changes: dict[str, Any], says: str, official: Path, refused: Callable[..., str]
) -> None:
    edit_config(official, **changes)
    assert says in refused()


@BOTH_FAMILIES
def test_families_that_disagree(official: Path, refused: Callable[..., str]) -> None:
    family = json.loads((official / "config.json").read_text())["model_type"]
    other = next(name for name in FAMILIES if name != family)
    assert f"--family says {other}" in refused("--family", other)
    edit_config(official, model_type=other, architectures=[other])
    assert f"config.json says {other}" in refused()
    assert run(official, official.with_name("forced"), "--family", family, "--no-verify") == 0
    edit_config(official, model_type="ABSENT", architectures="ABSENT", mgate=False, rotary_pct=0.25)
    assert "config.json says dcformer and dcpythia, but the weights are of" in refused()


def duplicate_projection(weights: dict[str, Tensor]) -> None:
    weights |= {f"layers.0.attention.w{name}.weight": torch.zeros(32, 32) for name in "qkv"}


@BOTH_FAMILIES
@pytest.mark.parametrize(
    ("change", "says"),
    [
        (
            lambda w: w.update({"layers.0.attention.wz.weight": torch.zeros(2)}),
            "layers.0.attention.wz.weight which is no part of this format; leave it out",
        ),
        (lambda w: [w.update({f"module.{key}": w.pop(key)}) for key in list(w)], "begin with module.; save the state"),
        (
            lambda w: w.update({"layers.1.attention.dyn_w_proj.sw": 3 * torch.eye(4).repeat(2, 1, 1)}),
            "layers.1.attention.dyn_w_proj.sw (1 such tensors) is neither an identity nor made from pre_proj.w",
        ),
        (
            lambda w: w.update(
                {
                    "layers.0.attention.dyn_w_proj.dd": w["layers.0.attention.dyn_w_proj.dd"].to(torch.float8_e4m3fn),
                    "layers.0.attention.dyn_w_proj.dw_m": torch.zeros(64, 16 * 4 + 4 * 4),
                }
            ),
            "dd in model.safetensors is",
        ),
        (lambda w: w["output.weight"].fill_(3e38), "overflow in float32"),
        (lambda w: w.pop("layers.1.attention.wo.weight"), "the weights lack layers.1.attention.wo.weight"),
        (lambda w: w.pop("layers.1.attention.dyn_w_proj.dd"), "the weights lack layers.1.attention.dyn_w_proj.dd"),
        (duplicate_projection, "leave one out"),
        (lambda w: w.update({"norm.weight": torch.ones(64, dtype=torch.int8)}), "norm.weight in model.safetensors"),
        (lambda w: w["output.weight"].fill_(float("nan")), "not finite"),
    ],
)
def test_weights_that_do_not_fit_are_refused(
    change: Callable[[dict[str, Tensor]], object], says: str, official: Path, refused: Callable[..., str]
) -> None:
    edit_weights(official, change)
    assert says in refused()


@BOTH_FAMILIES
def test_a_merged_static_matrix_that_says_nothing_new_is_dropped(official: Path, tmp_path: Path) -> None:
    static = {"pre_proj.w": 0.5 * torch.eye(4)[None], "post_proj.w": torch.zeros(1, 4, 4)}
    merged = torch.eye(4) + torch.cat(list(static.values()))
    prefix = "layers.0.attention.dyn_w_proj."
    edit_weights(official, lambda w: w.update({prefix + name: tensor for name, tensor in static.items()}))
    edit_weights(official, lambda w: w.update({prefix + "sw": merged}))
    assert run(official, tmp_path / "ours", "--static", "drop") == 0
    edit_weights(official, lambda w: w.update({prefix + name: torch.eye(4)[None] for name in static}))
    edit_weights(official, lambda w: w.update({prefix + "sw": torch.eye(4).repeat(2, 1, 1)}))
    assert run(official, tmp_path / "again") == 0


def test_a_merged_copy_may_be_stored_in_another_dtype_than_its_original() -> None:
    original = torch.randn(3, 4)
    assert merged_difference(original.half(), original) == merged_difference(original, original.half()) == 0
    assert merged_difference(original.half() + 1, original) == pytest.approx(1, abs=0.01)


def test_folders_that_were_made_for_a_refused_conversion_vanish(
    official: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    edit_weights(official, lambda w: w["output.weight"].fill_(float("nan")))
    refusal(capsys, "official", official, tmp_path / "new" / "folder" / "ours")
    assert not (tmp_path / "new").exists()


def test_a_model_too_short_for_official_masks_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_ours(tmp_path / "made", max_position_embeddings=20)
    assert run(tmp_path / "made", tmp_path / "official", "--reverse") == 0
    assert "cannot decode with 20 positions and windows of 7: it needs three" in capsys.readouterr().err


@BOTH_FAMILIES
def test_whole_numbers_serve_as_official_epsilons(official: Path, tmp_path: Path) -> None:
    edit_config(official, norm_eps=1)
    assert run(official, tmp_path / "ours") == 0


def test_a_source_without_folder_config_or_weights_is_refused(
    tmp_path: Path, official: Path, refused: Callable[..., str]
) -> None:
    assert "does not exist" in refused(source=tmp_path / "absent")
    (tmp_path / "empty").mkdir()
    assert "is empty" in refused(source=tmp_path / "empty")
    (tmp_path / "empty" / "notes.txt").touch()
    assert "has no config.json" in refused(source=tmp_path / "empty")
    (tmp_path / "empty" / "config.json").write_text("{")
    assert "is not JSON" in refused(source=tmp_path / "empty")
    assert "is a file" in refused(source=official / "config.json")
    (official / "model.safetensors").unlink()
    assert "has no weights (*.safetensors or *.bin); give another folder" in refused()
    (official / "model.pth").touch()
    assert "if model.pth is a state dict, call it pytorch_model.bin" in refused()


@pytest.mark.parametrize("kept", [0, 4, 100, 20_000])
def test_truncated_safetensors_are_refused(kept: int, official: Path, refused: Callable[..., str]) -> None:
    content = (official / "model.safetensors").read_bytes()
    (official / "model.safetensors").write_bytes(content[:kept])
    assert "truncated or no safetensors file" in refused()


@pytest.mark.parametrize("legacy", [False, True])
@pytest.mark.parametrize("kept", [0, 100, 20_000])
def test_truncated_pickles_are_refused(kept: int, legacy: bool, official: Path, refused: Callable[..., str]) -> None:
    weights = load_file(official / "model.safetensors")
    (official / "model.safetensors").unlink()
    path = official / "pytorch_model.bin"
    torch.save(weights, path, _use_new_zipfile_serialization=not legacy)
    path.write_bytes(path.read_bytes()[:kept])
    assert "truncated" in (line := refused()) or "damaged" in line


class Payload:
    """A pickle that would write a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return (Path.touch, (self.path,))


def test_pickles_that_need_code_or_hold_no_tensors(tmp_path: Path, official: Path, refused: Callable[..., str]) -> None:
    (official / "model.safetensors").unlink()
    torch.save({"norm.weight": Payload(tmp_path / "executed")}, official / "pytorch_model.bin")
    assert "a pickle that runs code" in refused()
    assert not (tmp_path / "executed").exists()
    torch.save({"model": {"norm.weight": torch.ones(2)}}, official / "pytorch_model.bin")
    assert "something else than tensors" in refused()


def test_missing_shards(official: Path, refused: Callable[..., str]) -> None:
    weights = load_file(official / "model.safetensors")
    (official / "model.safetensors").unlink()
    save_file(weights, official / "model-00001-of-00002.safetensors")
    assert "model-00002-of-00002.safetensors is missing" in refused()
    (official / "model-00001-of-00002.safetensors").rename(official / "model-00001-of-00001.safetensors")
    index = official / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"norm.weight": "other.safetensors"}}))
    assert "other.safetensors is missing" in refused()
    index.write_text(json.dumps({"weight_map": {"surplus": "model-00001-of-00001.safetensors"}}))
    assert "the index places surplus" in refused()
    index.write_text("[]")
    assert "no index of shards" in refused()
    index.unlink()
    save_file({"norm.weight": torch.ones(32)}, official / "more.safetensors")
    assert "norm.weight is in" in refused()


def test_options_without_meaning(official: Path, refused: Callable[..., str]) -> None:
    assert "no size" in refused("--max-shard-size", "big")
    assert "holds nothing" in refused("--max-shard-size", "0GB")
    assert "from 2, a token and one before it, to 2147483647, not 1" in refused("--window", "1")
    assert "not 2147483648" in refused("--window", "2147483648")
    assert "no static matrix" in refused("--static", "keep")
    assert "only matter for reading" in refused("--reverse", "--prefer-merged")
    assert "only matter for reading" in refused("--reverse", "--window", "2")  # the smallest window
    assert "not in our format" in refused("--reverse")
    assert "dw_m" in refused("--prefer-merged")
    edit_config(official, window_size=None)
    assert "no layer is local" in refused("--window", "5")


def test_values_too_large_for_the_asked_dtype(official: Path, refused: Callable[..., str]) -> None:
    edit_weights(official, lambda weights: weights["output.weight"].mul_(1e6))
    assert "too large for torch.float16" in refused("--dtype", "float16")
    assert run(official, official.with_name("bf16"), "--dtype", "bfloat16") == 0


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        ({"num_key_value_heads": 2}, "num_key_value_heads is 2"),
        ({"compose_groups": 2}, "compose_groups is 2"),
        ({"compose_rank": 1}, "compose_rank is 1"),
        ({"compose_static": True}, "compose_static is True"),
        ({"compose_gate": False}, "compose_gate is False"),
        ({"compose_pre": False}, "compose_pre is False"),
        ({"compose_query_wise": False}, "compose_query_wise is False"),
        ({"compose_hidden_size": 8}, "compose_hidden_size is 8"),
        ({"compose_act": "gelu_pytorch_tanh"}, "compose_act"),
        ({"qk_norm_eps": 1e-5}, "qk_norm_eps"),
        ({"qk_norm_type": "layer_norm"}, "qk_norm_type is 'layer_norm'"),
        ({"norm_placement": "output"}, "norm_placement is 'output'"),
        ({"no_rope_layers": [1, 0]}, "no_rope_layers is [1, 0]"),
        ({"attention_scaling": 0.5}, "attention_scaling is 0.5"),
        ({"attention_output_bias": True}, "attention_output_bias is True"),
        ({"head_dim": 32}, "head_dim is 32"),
        ({"num_attention_heads": 5, "hidden_size": 40}, "num_attention_heads is 5"),
        ({"tie_word_embeddings": True}, "tie_word_embeddings is True"),
        ({"attention_bias": True}, "attention_bias"),
        ({"family": "dcpythia", "mlp_bias": False}, "mlp_bias is False"),
        ({"layer_types": ["sliding_attention"] * 2}, "layer_types fit none"),
        ({"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}}, "rope_parameters"),
    ],
    ids=str,
)
def test_models_that_the_official_code_cannot_run(
    overrides: dict[str, Any], says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save_ours(tmp_path / "ours", **overrides)
    assert says in refusal(capsys, "official", tmp_path / "ours", tmp_path / "official", "--reverse")
    assert not (tmp_path / "official").exists()


def test_a_norm_that_is_off_refuses_nothing_and_dropout_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save_ours(tmp_path / "ours", use_qk_norm=False, qk_norm_eps=1e-5, compose_dropout=0.2)
    assert run(tmp_path / "ours", tmp_path / "official", "--reverse") == 0
    assert "compose_dropout 0.2 is not kept" in capsys.readouterr().err


def test_destinations_are_not_overwritten_by_accident(
    tmp_path: Path, official: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "taken").mkdir()
    assert run(official, tmp_path / "taken") == 0
    before = (tmp_path / "taken" / "model.safetensors").read_bytes()
    for destination, says in (("taken", "--overwrite"), ("official", "overlap"), ("official/inside", "overlap")):
        assert says in refusal(capsys, "official", official, tmp_path / destination)
    (tmp_path / "notes").mkdir()
    thesis = tmp_path / "notes" / "thesis.tex"
    thesis.touch()
    assert "thesis.tex is a file; give another folder" in refusal(capsys, "official", official, thesis, "--overwrite")
    assert "holds no checkpoint" in refusal(capsys, "official", official, tmp_path / "notes", "--overwrite")
    assert (tmp_path / "taken" / "model.safetensors").read_bytes() == before
    assert run(official, tmp_path / "taken", "--overwrite", "--dtype", "bfloat16") == 0
    assert (tmp_path / "taken" / "model.safetensors").stat().st_size < len(before)


def test_a_full_disk_leaves_nothing(
    official: Path, refused: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def save(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(shards, "save_file", save)
    assert "No space left" in refused()


def test_memory_that_verification_lacks_is_told(
    official: Path, refused: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model_loading.os, "sysconf", lambda name: 1)
    assert "--no-verify" in refused()


def killed_in_verification(official: Path, destination: Path) -> int:
    """The status of a process that converts and is killed when all is written, but not checked."""
    process = os.fork()
    if not process:
        try:
            Conversion.verify = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
            run(official, destination, "--overwrite")
        finally:
            os._exit(1)
    return os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])


def test_what_a_killed_conversion_left_is_cleared_away(tmp_path: Path, official: Path) -> None:
    destination = tmp_path / "work" / "ours"
    assert killed_in_verification(official, destination) == -signal.SIGKILL
    (leftover,) = destination.parent.iterdir()
    assert leftover.name.startswith(".ours.partial-")
    assert run(official, destination) == 0
    assert [path.name for path in destination.parent.iterdir()] == ["ours"]
    # Killed between the two last renames: the old folder is set aside.
    destination.rename(destination.with_name(leftover.name.replace("partial", "replaced")))
    assert run(official, destination) == 2
    assert [path.name for path in destination.parent.iterdir()] == ["ours"]


def test_two_conversions_do_not_share_a_destination(official: Path, tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]) as other:
        (tmp_path / f".ours.partial-{MACHINE}-{other.pid}").mkdir()
        assert run(official, tmp_path / "ours") == 2
        other.kill()
    deadline = time.monotonic() + 10
    while Path(f"/proc/{other.pid}").exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert run(official, tmp_path / "ours", "--no-verify") == 0
    assert not list(tmp_path.glob(f".ours.*-{os.getpid()}"))


@pytest.mark.parametrize("machine", [MACHINE, "00c0ffee"])
def test_nobody_is_told_to_remove_the_only_copy(
    official: Path, machine: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The number of a killed process is that of another one after a restart of the machine."""
    only_copy = tmp_path / f".ours.replaced-{machine}-1"
    only_copy.mkdir()
    said = refusal(capsys, "official", official, tmp_path / "ours")
    assert f"or rename {only_copy} to ours if" in said and "or remove" not in said


def test_what_appears_meanwhile_is_not_replaced(
    official: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    other = tmp_path / "ours" / "config.json"

    def write_there(*_: object) -> str:
        other.parent.mkdir()
        other.write_text("{}")
        return "checked"

    monkeypatch.setattr(Conversion, "verify", write_there)
    assert "exists; give another folder" in refusal(capsys, "official", official, other.parent)
    assert [path.name for path in tmp_path.iterdir() if "ours" in path.name] == ["ours"]
    assert list(other.parent.iterdir()) == [other]


def test_processes_of_other_machines_are_not_taken_for_dead(
    official: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    theirs = tmp_path / ".ours.partial-00c0ffee-4194305"  # no process has so large a number
    theirs.mkdir()
    assert "process 4194305 of another machine" in refusal(capsys, "official", official, tmp_path / "ours")
    assert theirs.exists()


def swapped(rules: Callable[..., list[Rule]], first: str, second: str) -> Callable[..., list[Rule]]:
    """The same rules with two of our names exchanged."""

    def swap(name: str) -> str:
        return name.replace(first, "?").replace(second, first).replace("?", second)

    return lambda config: [Rule(rule.theirs, tuple(map(swap, rule.ours)), rule.transform) for rule in rules(config)]


def wrong_components(_: Any, dim: int) -> Any:
    """As if post-key came before post-query."""
    return Select(dim, (0, 1, 3, 2), 4)


@BOTH_FAMILIES
@pytest.mark.parametrize(
    ("module", "name", "mutate"),
    [
        (official_layout, "attention_rules", lambda rules: swapped(rules, "q_proj", "k_proj")),
        (official_layout, "attention_rules", lambda rules: swapped(rules, "q_norm", "k_norm")),
        (official_layout, "block_rules", lambda rules: swapped(rules, "input_layernorm", "post_attention_layernorm")),
        (official_layout, "used_components", lambda _: wrong_components),
        (plan, "local_window", lambda window: lambda *arguments: window(*arguments) + 1),
    ],
    ids=["q and k", "norms of q and k", "layer norms", "components", "window"],
)
def test_verification_finds_a_wrong_conversion(
    module: Any, name: str, mutate: Any, official: Path, refused: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def vary_norms(weights: dict[str, Tensor]) -> None:
        for key, value in weights.items():
            if "norm" in key:
                value.mul_(torch.rand_like(value) + 0.5)

    edit_weights(official, vary_norms)
    if module is plan:  # the reference must not learn of it
        original = verify.OfficialModel.logits
        monkeypatch.setattr(
            verify.OfficialModel, "logits", lambda self, *a: original(dataclasses.replace(self, window=7), *a)
        )
    monkeypatch.setattr(module, name, mutate(getattr(module, name)))
    assert "differ from the official formulas" in refused()
