"""`dynattn convert official` on the official code's own results, in every form that a checkpoint is stored in."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from cases.checkpoints import (
    assert_same_checkpoint,
    assert_same_weights,
    convert_well,
    refusal,
    weights_of,
    write_checkpoint,
)
from cases.golden import case_names, read_case, read_meta, tensors_under
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from dynattn.scripts.convert.official.config import OfficialConfig
from dynattn.scripts.convert.official.reference import OfficialModel

CASES = case_names("dcformer_*", "dcpythia_*")
RUNS = [
    (case, run["tag"])
    for case in CASES
    for run in read_meta(case)["runs"]
    if "generate" not in run["tag"] and "greedy" not in run["tag"]
]
# One run of each case, with windows where it has them.
TYPICAL = {
    "dcformer_head_mgate": "step_LG_noqk_rope10000",
    "dcformer_head_plain": "step_alt_qknorm_rope10000",
    "dcformer_v1_h8": "step_alt_qknorm",
    "dcpythia_h4_sequential_nobias": "step_LG_noqk",
    "dcpythia_h8": "step_alt_qknorm",
}
SETTINGS = ("use_qk_norm", "window_size", "window_type", "rope_base")


def read_run(case: str, tag: str) -> tuple[dict[str, Any], dict[str, Tensor], Tensor, Tensor]:
    """One run: official config.json, official tensors, token ids, logits."""
    meta, tensors = read_case(case)
    run = next(run for run in meta["runs"] if run["tag"] == tag)
    config = {**meta["base_config"], **{name: run[name] for name in SETTINGS if name in run}}
    return config, tensors_under(tensors, "sd."), tensors["input_ids"], tensors[f"{tag}.logits"]


def window_options(config: dict[str, Any], tag: str) -> list[str]:
    """Whole-prompt and training runs of the official code see one key more."""
    one_more = tag.startswith(("prefill", "train")) and config["window_size"] is not None
    return ["--official-prefill-window"] if one_more else []


def convert(source: Path, destination: Path, *options: str) -> None:
    convert_well("official", source, destination, *options)


@torch.no_grad()
def logits_of(folder: Path, ids: Tensor) -> Tensor:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)(ids).logits


@pytest.mark.parametrize(("case", "tag"), RUNS, ids=lambda value: value)
def test_converted_models_give_the_official_logits(case: str, tag: str, tmp_path: Path) -> None:
    config, weights, ids, expected = read_run(case, tag)
    write_checkpoint(tmp_path / "theirs", config, weights)
    convert(tmp_path / "theirs", tmp_path / "ours", "--no-verify", *window_options(config, tag))
    torch.testing.assert_close(logits_of(tmp_path / "ours", ids), expected, atol=3e-4, rtol=0)


@pytest.mark.parametrize(("case", "tag"), RUNS, ids=lambda value: value)
def test_the_reference_alone_gives_the_official_logits(case: str, tag: str) -> None:
    config, weights, ids, expected = read_run(case, tag)
    official = OfficialConfig.from_json(config, weights)
    one_more = tag.startswith(("prefill", "train"))
    window = None if config["window_size"] is None else config["window_size"] + one_more
    model = OfficialModel(official, weights, weights.__getitem__, window=window)
    torch.testing.assert_close(model.logits(ids[0], torch.float32), expected[0], atol=3e-4, rtol=0)


def split_projections(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    split: dict[str, Tensor] = {}
    for key, value in weights.items():
        if ".wqkv." in key:
            names = [key.replace("wqkv", name) for name in ("wq", "wk", "wv")]
            split |= zip(names, [part.clone() for part in value.chunk(3)], strict=True)
        else:
            split[key] = value
    return split


def add_copies(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """What `merge_weights`, `setup_caches` and the constructor leave in a state dict."""
    copies = {"layers.0.attention.kv_cache.k_cache": torch.zeros(1, 2, 3, 4)}
    for key in [key for key in weights if key.endswith("dyn_w_proj.dw1")]:
        prefix, heads = key.removesuffix("dw1"), weights[key].shape[-1] // 4
        copies[prefix + "dw_m"] = torch.cat([weights[key].flatten(1), weights[prefix + "dd"].flatten(1)], dim=-1)
        copies[prefix + "qkw_m"] = weights[prefix + "qkw"].flatten(3)[0].clone()
        for name in ("pre_proj.w", "post_proj.w"):
            copies[prefix + name] = torch.eye(heads)[None]
    return {**weights, **copies}


def save_sharded(folder: Path, weights: dict[str, Tensor], suffix: str, index: bool) -> None:
    """Three files; tensors that are needed together lie in different ones."""
    stem = "model" if suffix == "safetensors" else "pytorch_model"
    save: Callable[[Any, Any], None] = save_file if suffix == "safetensors" else torch.save
    (folder / "model.safetensors").unlink()
    keys, places = sorted(weights), {}
    for number in range(3):
        name = f"{stem}-{number + 1:05d}-of-00003.{suffix}"
        save({key: weights[key] for key in keys[number::3]}, folder / name)
        places |= dict.fromkeys(keys[number::3], name)
    if index:
        content = {"metadata": {}, "weight_map": places}
        (folder / f"{stem}.{suffix}.index.json").write_text(json.dumps(content))


def store(folder: Path, config: dict[str, Any], weights: dict[str, Tensor], storage: str) -> None:
    if "split" in storage:
        weights = split_projections(weights)
    if "copies" in storage:
        weights = add_copies(weights)
    write_checkpoint(folder, config, weights)
    if "shards" in storage:
        save_sharded(folder, weights, "bin" if "bin" in storage else "safetensors", index="index" in storage)
    elif "bin" in storage:
        (folder / "model.safetensors").unlink()
        torch.save(weights, folder / "pytorch_model.bin", _use_new_zipfile_serialization="legacy" not in storage)


@pytest.mark.parametrize("case", sorted(TYPICAL))
@pytest.mark.parametrize(
    "storage",
    ["bin", "legacy bin", "split", "split shards index", "copies shards", "split copies bin shards index"],
)
def test_every_storage_gives_the_same_weights(case: str, storage: str, tmp_path: Path) -> None:
    config, weights, _, _ = read_run(case, TYPICAL[case])
    store(tmp_path / "plain", config, weights, "")
    store(tmp_path / "stored", config, weights, storage)
    convert(tmp_path / "plain", tmp_path / "a", "--no-verify")
    convert(tmp_path / "stored", tmp_path / "b", "--no-verify", "--max_shard_size", "5GB")
    assert_same_checkpoint(tmp_path / "a", tmp_path / "b")


@pytest.mark.parametrize("case", sorted(TYPICAL))
def test_verification_passes_and_is_reported(case: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config, weights, _, _ = read_run(case, TYPICAL[case])
    store(tmp_path / "theirs", config, weights, "split copies shards")
    convert(tmp_path / "theirs", tmp_path / "ours", "--max-shard-size", "100KB")
    assert "tokens: logits differ by" in capsys.readouterr().out
    assert (tmp_path / "ours" / "model.safetensors.index.json").is_file()
    assert all(path.stat().st_size < 110_000 for path in (tmp_path / "ours").iterdir())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["ours", "theirs"]


@pytest.mark.parametrize("case", sorted(TYPICAL))
def test_half_precision_stays_and_differs_by_its_rounding_only(case: str, tmp_path: Path) -> None:
    config, weights, ids, expected = read_run(case, TYPICAL[case])
    halves = {key: value.half() for key, value in weights.items()}
    write_checkpoint(tmp_path / "theirs", config, halves)
    options = window_options(config, TYPICAL[case])
    convert(tmp_path / "theirs", tmp_path / "ours", *options)
    converted = AutoModelForCausalLM.from_pretrained(tmp_path / "ours")
    assert converted.dtype == torch.float16
    # What rounding the weights does to the official formulas is the noise; ours must not differ from them by more.
    official = OfficialConfig.from_json(config, weights)
    model = OfficialModel(official, halves, halves.__getitem__, window=config["window_size"])
    rounded = model.logits(ids[0], torch.float64)
    noise = (rounded - expected[0]).abs().max()
    assert noise > 1e-3
    assert (logits_of(tmp_path / "ours", ids)[0] - rounded).abs().max() < 0.1 * noise


@pytest.mark.parametrize("case", sorted(TYPICAL))
def test_official_to_ours_and_back_is_bit_exact(case: str, tmp_path: Path) -> None:
    config, weights, _, _ = read_run(case, TYPICAL[case])
    if not config["use_qk_norm"]:
        weights = {key: value for key, value in weights.items() if "_norm.scale" not in key}
    write_checkpoint(tmp_path / "theirs", config, weights)
    convert(tmp_path / "theirs", tmp_path / "ours", "--no-verify")
    convert(tmp_path / "ours", tmp_path / "back", "--reverse")
    returned = load_file(tmp_path / "back" / "model.safetensors")
    buffers = {key for key in returned if key.endswith("_proj.w")}
    assert returned.keys() - buffers == {key for key in weights if not key.endswith("_proj.w")}
    assert all(torch.equal(returned[key], weights[key]) for key in returned.keys() - buffers)
    assert all(torch.equal(returned[key][0], torch.eye(config["n_head"])) for key in buffers)
    before = OfficialConfig.from_json(config, weights)
    after = OfficialConfig.from_json(json.loads((tmp_path / "back" / "config.json").read_text()), returned)
    if before.window_type == "LG":  # is the same as no pattern
        before.window_type = None
    assert (after.mgate, after.mgate_dim if after.mgate else 44) == (before.mgate, before.mgate_dim)
    assert after == before


def test_query_wise_leaves_out_key_side_terms_in_both_directions(tmp_path: Path) -> None:
    config, weights, ids, _ = read_run("dcpythia_h8", "step_none_qknorm")
    config["query_wise"] = True
    write_checkpoint(tmp_path / "theirs", config, weights)
    convert(tmp_path / "theirs", tmp_path / "ours")
    convert(tmp_path / "ours", tmp_path / "back", "--reverse")
    returned = load_file(tmp_path / "back" / "model.safetensors")
    dw1 = returned["layers.0.attention.dyn_w_proj.dw1"]
    assert torch.equal(dw1[:, :, ::2], weights["layers.0.attention.dyn_w_proj.dw1"][:, :, ::2])
    assert not dw1[:, :, 1::2].any()
    convert(tmp_path / "back", tmp_path / "again", "--no-verify")
    assert torch.equal(logits_of(tmp_path / "ours", ids), logits_of(tmp_path / "again", ids))


def test_merged_copies_that_were_trained_are_told_and_can_be_taken(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config, weights, ids, expected = read_run("dcformer_v1_h8", "step_none_qknorm")
    trained = add_copies(weights)
    for key in weights:
        if key.endswith(("dw1", "dd", "qkw")):
            trained[key] = torch.randn_like(trained[key])
    write_checkpoint(tmp_path / "theirs", config, trained)
    convert(tmp_path / "theirs", tmp_path / "stale")
    assert "differ from dw1, dd and qkw in 4 layers" in capsys.readouterr().err
    convert(tmp_path / "theirs", tmp_path / "trained", "--prefer-merged")
    assert "differ from dw1" not in capsys.readouterr().err
    torch.testing.assert_close(logits_of(tmp_path / "trained", ids), expected, atol=3e-4, rtol=0)
    assert (logits_of(tmp_path / "stale", ids) - expected).abs().max() > 0.1


@pytest.mark.parametrize("query_wise", [False, True])
def test_merged_copies_hold_the_same_as_their_parts(query_wise: bool, tmp_path: Path) -> None:
    config, weights, _, _ = read_run("dcpythia_h8", "step_none_qknorm")
    config["query_wise"] = query_wise
    write_checkpoint(tmp_path / "theirs", config, add_copies(weights))
    convert(tmp_path / "theirs", tmp_path / "parts")
    convert(tmp_path / "theirs", tmp_path / "merged", "--prefer-merged")
    assert_same_weights(weights_of(tmp_path / "parts"), weights_of(tmp_path / "merged"))


def test_static_matrices_are_lost_only_on_request(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config, weights, ids, expected = read_run("dcformer_v1_h8", "step_none_qknorm")
    mixing = {key: torch.randn(1, 8, 8) / 4 for key in add_copies(weights) if key.endswith("_proj.w")}
    write_checkpoint(tmp_path / "theirs", config, {**weights, **mixing})
    assert "--static keep" in refusal(capsys, "official", tmp_path / "theirs", tmp_path / "no")
    assert not (tmp_path / "no").exists()
    convert(tmp_path / "theirs", tmp_path / "kept", "--static", "keep")
    convert(tmp_path / "theirs", tmp_path / "dropped", "--static", "drop")
    assert (logits_of(tmp_path / "kept", ids) - expected).abs().max() > 0.1
    torch.testing.assert_close(logits_of(tmp_path / "dropped", ids), expected, atol=3e-4, rtol=0)
