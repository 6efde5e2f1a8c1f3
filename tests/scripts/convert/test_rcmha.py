"""`dynattn convert rcmha` on the official code's own results, both ways, and what it refuses."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from cases.checkpoints import (
    assert_same_checkpoint,
    convert_well,
    edit_config,
    edit_weights,
    refusal,
    refusal_leaving_nothing,
    write_checkpoint,
)
from cases.checkpoints import convert as try_to_convert
from cases.golden import case_names, read_case, tensors_under
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache

from dynattn import DCFormerConfig, DCFormerForCausalLM, RCMHAConfig, RCMHAForCausalLM
from dynattn.scripts.convert.common.transforms import CausalKernel, Select
from dynattn.scripts.convert.rcmha import layout as rcmha_layout
from dynattn.scripts.convert.rcmha.config import OfficialRCMHAConfig
from dynattn.scripts.convert.rcmha.reference import OfficialRCMHA

KINDS = ("rcmha", "rmha", "mdha", "mha")
CASES = case_names(*(f"{kind}_model_*" for kind in KINDS))
RELATIVE = [case for case in CASES if case.startswith(("rcmha", "rmha"))]
CASE = "rcmha_model_relu2"
FIELDS = ("kind", "heads", "d_model", "d_ff", "n_layers", "vocab", "mem_len", "P", "activation")
TABLES = ("key_pos_embeddings", "key_pos_bias")


def read_run(case: str) -> tuple[dict[str, Any], dict[str, Tensor], list[Tensor], list[Tensor]]:
    """Official config.json and tensors, the token ids `[B, T]` of every segment, their logits `[B, T, V]`."""
    meta, tensors = read_case(case)
    segments = tensors["tokens"].T[:, : sum(meta["segments"])].split(meta["segments"], dim=1)
    logits = [tensors[f"seg{index}.logits"].transpose(0, 1) for index in range(len(segments))]
    return {name: meta[name] for name in FIELDS}, tensors_under(tensors, "sd."), list(segments), logits


def convert(source: Path, destination: Path, *options: str) -> None:
    convert_well("rcmha", source, destination, *options)


@torch.no_grad()
def logits_of(folder: Path, segments: list[Tensor]) -> list[Tensor]:
    """Every segment's logits, with the memory of those before."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    memory = DynamicCache(config=model.config)
    return [model(ids, past_key_values=memory, use_cache=True).logits for ids in segments]


def assert_logits(folder: Path, segments: list[Tensor], expected: list[Tensor]) -> None:
    for observed, wanted in zip(logits_of(folder, segments), expected, strict=True):
        torch.testing.assert_close(observed, wanted, atol=3e-4, rtol=0)


def test_every_golden_case_is_tested() -> None:
    assert len(CASES) == 5
    assert {case.split("_")[0] for case in CASES} == set(KINDS)


@pytest.mark.parametrize("case", CASES)
def test_converted_models_give_the_official_logits_over_segments(
    case: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config, weights, segments, expected = read_run(case)
    write_checkpoint(tmp_path / "theirs", config, weights)
    convert(tmp_path / "theirs", tmp_path / "ours")
    assert_logits(tmp_path / "ours", segments, expected)
    out = capsys.readouterr().out
    assert "in segments with memory: logits differ by" in out
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "ours")
    before = sum(value.numel() for value in weights.values())
    assert f"{before:,} before, {model.num_parameters():,} after" in out
    dropped = (
        "32 of 64 table rows are kept, of distances 0 to 31; 32 are dropped: 31 of future tokens, 1 out of reach\n"
    )
    assert (dropped in out) == (case in RELATIVE)


@pytest.mark.parametrize("case", CASES)
def test_the_reference_alone_gives_the_official_logits(case: str) -> None:
    config, weights, segments, expected = read_run(case)
    shapes = {key: value.shape for key, value in weights.items()}
    model = OfficialRCMHA(OfficialRCMHAConfig.from_json(config, shapes), weights.__getitem__)
    for row in range(2):
        observed = model.logits([ids[row] for ids in segments], torch.float32)
        torch.testing.assert_close(observed, torch.cat([part[row] for part in expected]), atol=3e-4, rtol=0)


@pytest.mark.parametrize("case", RELATIVE)
def test_trimmed_tables_still_give_the_official_logits(
    case: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config, weights, segments, expected = read_run(case)
    reach = config["mem_len"] + segments[0].shape[1]
    write_checkpoint(tmp_path / "theirs", config, weights)
    convert(tmp_path / "theirs", tmp_path / "ours", "--max_position_embeddings", str(reach))
    assert f"{32 - reach} of longer distances" in capsys.readouterr().out
    table = load_file(tmp_path / "ours" / "model.safetensors")["model.layers.0.self_attn.position_bias"]
    assert table.shape == (reach, config["heads"])
    assert_logits(tmp_path / "ours", segments, expected)
    one_more = torch.cat([segments[-1], segments[-1][:, :1]], dim=1)
    with pytest.raises(ValueError, match=f"max_position_embeddings \\({reach}\\)"):
        logits_of(tmp_path / "ours", [*segments, one_more])


@pytest.mark.parametrize("case", CASES)
def test_official_to_ours_and_back_keeps_what_a_model_can_reach(case: str, tmp_path: Path) -> None:
    config, weights, _, _ = read_run(case)
    write_checkpoint(tmp_path / "theirs", config, weights)
    convert(tmp_path / "theirs", tmp_path / "ours", "--no-verify")
    convert(tmp_path / "ours", tmp_path / "back", "--reverse", "--official-positions", "32")
    returned = load_file(tmp_path / "back" / "model.safetensors")
    assert returned.keys() == weights.keys()
    for key, value in weights.items():
        if key.endswith(TABLES):
            assert torch.equal(returned[key][1:33], value[1:33])
            assert not returned[key][33:].any()
            assert not returned[key][0].any()
        else:
            assert torch.equal(returned[key], value)
    assert json.loads((tmp_path / "back" / "config.json").read_text()) == config


def test_unchanged_official_code_gets_tables_of_its_own_length(tmp_path: Path) -> None:
    config, weights, segments, expected = read_run(CASE)
    write_checkpoint(tmp_path / "theirs", config, weights)
    convert(tmp_path / "theirs", tmp_path / "ours", "--max-position-embeddings", "14", "--no-verify")
    convert(tmp_path / "ours", tmp_path / "back", "--reverse")
    table = load_file(tmp_path / "back" / "model.safetensors")["transformer.layers.1.self_attn.key_pos_embeddings"]
    theirs = weights["transformer.layers.1.self_attn.key_pos_embeddings"]
    assert table.shape == (8192, 4, 8)
    assert torch.equal(table[4096 - 13 : 4097], theirs[32 - 13 : 33])
    convert(tmp_path / "back", tmp_path / "again", "--no-verify")
    assert AutoConfig.from_pretrained(tmp_path / "again").max_position_embeddings == 4096
    assert_logits(tmp_path / "again", segments, expected)


@pytest.mark.parametrize("case", CASES)
def test_streaming_is_the_same_function_within_a_first_segment_and_says_that_it_is_another_after_it(
    case: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config, weights, segments, expected = read_run(case)
    write_checkpoint(tmp_path / "theirs", config, weights)
    convert(tmp_path / "theirs", tmp_path / "ours", "--memory_type", "streaming")
    out = capsys.readouterr().out
    assert "not what the official model computes; on a probe its logits differ by up to" in out
    assert "logits differ by" in out
    streaming = load_file(tmp_path / "ours" / "model.safetensors")
    lengths = {value.shape[0] for key, value in streaming.items() if key.endswith("position_bias")}
    assert lengths == ({config["mem_len"] + 1} if case in RELATIVE else set())
    observed = logits_of(tmp_path / "ours", segments)
    torch.testing.assert_close(observed[0], expected[0], atol=3e-4, rtol=0)
    assert (observed[-1] - expected[-1]).abs().max() > 0.1


@pytest.mark.parametrize("positions", [16, 1024])
def test_the_effect_of_streaming_does_not_depend_on_positions_that_have_no_tables(
    positions: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config, weights, _, _ = read_run("mha_model_relu2")
    write_checkpoint(tmp_path / "theirs", {**config, "mem_len": 40, "P": positions}, weights)
    convert(tmp_path / "theirs", tmp_path / "ours", "--memory_type", "streaming")
    assert float(capsys.readouterr().out.partition("on a probe its logits differ by up to ")[2].split()[0]) > 0.1


def test_other_precision_is_no_rounding(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_checkpoint(tmp_path / "theirs", *read_run(CASE)[:2])
    for dtype in ("float32", "bfloat16"):
        convert(tmp_path / "theirs", tmp_path / dtype, "--dtype", dtype, "--no-verify")
    assert try_to_convert("check", tmp_path / "float32", tmp_path / "bfloat16") == 1
    assert try_to_convert("check", tmp_path / "float32", tmp_path / "float32") == 0
    assert "different   " in capsys.readouterr().out


def test_streaming_goes_back_only_on_request(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config, weights, _, _ = read_run(CASE)
    write_checkpoint(tmp_path / "theirs", config, weights)
    convert(tmp_path / "theirs", tmp_path / "ours", "--memory_type", "streaming", "--no-verify")
    line = refusal(capsys, "rcmha", tmp_path / "ours", tmp_path / "back", "--reverse")
    assert "--from-streaming if that is meant" in line
    convert(tmp_path / "ours", tmp_path / "back", "--reverse", "--from-streaming", "--official-positions", "32")
    assert "not what the official model computes" in capsys.readouterr().out
    key = "transformer.layers.2.self_attn.key_pos_bias"
    table = load_file(tmp_path / "back" / "model.safetensors")[key]
    assert torch.equal(table[24:33], weights[key][24:33])
    assert not table[:24].any()


def test_other_storage_and_fewer_fields_give_the_same_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config, weights, _, _ = read_run("rcmha_model_relu_seq2")
    write_checkpoint(tmp_path / "theirs", config, weights)
    convert(tmp_path / "theirs", tmp_path / "a", "--no-verify")
    (tmp_path / "theirs" / "model.safetensors").unlink()
    torch.save(weights, tmp_path / "theirs" / "pytorch_model.bin")
    fewer = {name: value for name, value in config.items() if name not in ("P", "activation")}
    (tmp_path / "theirs" / "config.json").write_text(json.dumps({**fewer, "seed": 7}))
    capsys.readouterr()
    convert(tmp_path / "theirs", tmp_path / "b")
    told = capsys.readouterr().err
    assert "fields without meaning: seed" in told
    assert "no activation; relu is" in told
    assert_same_checkpoint(tmp_path / "a", tmp_path / "b")


def test_half_precision_stays_and_is_verified(tmp_path: Path) -> None:
    config, weights, segments, expected = read_run(CASE)
    write_checkpoint(tmp_path / "theirs", config, {key: value.bfloat16() for key, value in weights.items()})
    convert(tmp_path / "theirs", tmp_path / "ours")
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "ours").dtype == torch.bfloat16
    # Rounding weights is felt, which shows that the logits are of the rounded ones.
    assert (logits_of(tmp_path / "ours", segments)[0] - expected[0]).abs().max() > 3e-3


@pytest.mark.parametrize("width", [2, 5])
def test_kernels_of_other_widths_are_taken_but_not_given_back(
    width: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config, weights, _, _ = read_run("mdha_model_relu2")
    kernels = {key: torch.randn(8, 1, width) for key in weights if key.endswith("conv.weight")}
    write_checkpoint(tmp_path / "theirs", config, {**weights, **kernels})
    convert(tmp_path / "theirs", tmp_path / "ours")
    assert f"kernels are {width} wide" in capsys.readouterr().err
    line = refusal(capsys, "rcmha", tmp_path / "ours", tmp_path / "back", "--reverse")
    assert f"conv_kernel_size is {width}, but the official code can only run 3" in line


@pytest.fixture
def official(tmp_path: Path) -> Path:
    """An official checkpoint folder."""
    write_checkpoint(tmp_path / "official", *read_run(CASE)[:2])
    return tmp_path / "official"


@pytest.fixture
def refused(official: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Converts, and returns the one line that explains why it did not; nothing may have been written."""
    return lambda *options, source=official: refusal_leaving_nothing(
        capsys, tmp_path / "work", "rcmha", source, *options
    )


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"kind": "dcmha"}, "kind 'dcmha' is unknown; it can be rcmha, rmha, mdha, mha"),
        ({"kind": "rmha"}, "config.json says rmha, but the weights are of rcmha (with convolutions, with position"),
        ({"kind": None}, "kind None is unknown"),
        ({"heads": None, "mem_len": None}, "config.json lacks heads, mem_len"),
        ({"heads": 8}, "self_attn.query.1.conv.weight has shape (8, 1, 3), but config.json asks for (4, 1, 3)"),
        ({"heads": 5}, "multiple of num_attention_heads"),
        ({"heads": 0}, "heads in config.json is 0"),
        ({"d_model": 64}, "has shape"),
        ({"d_ff": 47}, "feed_forward.layer1.weight has shape"),
        ({"vocab": 30}, "src_embed.weight has shape (31, 32), but config.json asks for (30, 32)"),
        ({"n_layers": 2}, "transformer.layers.2."),
        ({"n_layers": 4}, "the weights lack transformer.layers.3."),
        ({"n_layers": "3"}, "n_layers"),
        ({"mem_len": 32}, "must be smaller than max_position_embeddings"),
        ({"mem_len": -1}, "must be at least 0"),
        ({"P": 64}, "P in config.json is 64, but the position tables have 64 rows"),
        ({"activation": "gelu"}, "activation 'gelu' is unknown; it can be relu or relu2"),
    ],
    ids=str,
)
def test_impossible_configurations(
    changes: dict[str, Any], says: str, official: Path, refused: Callable[..., str]
) -> None:
    edit_config(official, **changes)
    assert says in refused()


OUTPUT = "transformer.layers.1.self_attn.output.weight"


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda w: w.pop(OUTPUT), f"the weights lack {OUTPUT}"),
        (lambda w: w.pop("transformer.layers.0.self_attn.query_pos_bias"), "query_pos_bias (our model.layers.0"),
        (lambda w: w.update(surplus=torch.zeros(1)), "surplus which is no part of this format"),
        (
            lambda w: w.update({"transformer.layers.0.self_attn.query.0.linear.bias": torch.zeros(32)}),
            "query.0.linear.bias which is no part",
        ),
        (lambda w: w.update({OUTPUT: torch.zeros(32, 31)}), f"{OUTPUT} has shape (32, 31)"),
        (
            lambda w: w.update({"transformer.layers.2.self_attn.key.1.conv.weight": torch.zeros(8, 1, 5)}),
            "key.1.conv.weight has shape (8, 1, 5), but config.json asks for (8, 1, 3)",
        ),
        (
            lambda w: w.update({"transformer.layers.0.self_attn.query.1.conv.weight": torch.zeros(8)}),
            "query.1.conv.weight has shape (8,)",
        ),
        (lambda w: w.update({OUTPUT: torch.zeros(32, 32, dtype=torch.int8)}), f"{OUTPUT} in model.safetensors"),
        (lambda w: w["generator.bias"].fill_(float("nan")), "not finite"),
    ],
    ids=range(9),
)
def test_weights_that_do_not_fit(
    change: Callable[[dict[str, Tensor]], object], says: str, official: Path, refused: Callable[..., str]
) -> None:
    edit_weights(official, change)
    assert says in refused()


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (("--max_position_embeddings", "8"), "must be more than mem_len (8)"),
        (("--max_position_embeddings", "0"), "must be more than mem_len (8)"),
        (("--max_position_embeddings", "33"), "more than the 32 distances that the official tables know"),
        (("--official_positions", "64"), "only matter for writing the official format"),
        (("--from_streaming",), "only matter for writing the official format"),
        (("--reverse", "--memory_type", "streaming"), "memory_type only matter for reading"),
        (("--reverse",), "not in our format; leave out --reverse"),
        (("--reverse", "--official_positions", "0"), "official_positions must be from 1 to 1048576, not 0"),
        (("--reverse", "--official_positions", "1180591620717411303424"), "must be from 1 to 1048576"),
    ],
    ids=str,
)
def test_options_without_meaning(options: tuple[str, ...], says: str, refused: Callable[..., str]) -> None:
    assert says in refused(*options)


SMALL = {
    "vocab_size": 31,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "memory_type": "segment",
    "mem_len": 8,
    "max_position_embeddings": 16,
}


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"attention_type": "mha", "position_scheme": "rope"}, "position_scheme is 'rope', but the official code"),
        ({"attention_type": "mdha", "position_scheme": "learned"}, "position_scheme is 'learned'"),
        ({"attention_type": "mha", "qk_bias": False}, "qk_bias is False, but the official code can only run True"),
        ({"attention_type": "rmha", "qk_bias": True}, "qk_bias is True"),
        ({"head_dim": 16}, "head_dim is 16"),
        ({"conv_kernel_size": 1}, "conv_kernel_size is 1"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu', but the official code can only run relu or relu2"),
        ({"layer_norm_eps": 1e-6}, "layer_norm_eps"),
        ({"lm_head_bias": False}, "lm_head_bias is False"),
        ({"tie_word_embeddings": True}, "tie_word_embeddings is True"),
        ({"mem_len": None}, "mem_len is None"),
        ({"memory_type": "streaming"}, "memory_type is 'streaming'"),
        ({"max_position_embeddings": 5000}, "the position tables have 5000 rows"),
    ],
    ids=str,
)
def test_models_that_the_official_code_cannot_run(
    fields: dict[str, Any], says: str, tmp_path: Path, refused: Callable[..., str]
) -> None:
    RCMHAForCausalLM(RCMHAConfig(**{**SMALL, **fields})).save_pretrained(tmp_path / "ours")
    assert says in refused("--reverse", source=tmp_path / "ours")


def test_what_is_ours_already_or_of_another_family(tmp_path: Path, refused: Callable[..., str]) -> None:
    RCMHAForCausalLM(RCMHAConfig(**SMALL)).save_pretrained(tmp_path / "ours")
    assert "in our format already; --reverse" in refused(source=tmp_path / "ours")
    assert "--from-streaming, but memory_type is 'segment'" in refused(
        "--reverse", "--from-streaming", source=tmp_path / "ours"
    )
    sizes = {"vocab_size": 8, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1}
    DCFormerForCausalLM(DCFormerConfig(**sizes, num_attention_heads=2)).save_pretrained(tmp_path / "other")
    assert "a 'dcformer' model" in refused("--reverse", source=tmp_path / "other")
    assert "not of an official RCMHA model" in refused(source=tmp_path / "other")


def test_dropout_that_is_not_kept_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    RCMHAForCausalLM(RCMHAConfig(**SMALL, hidden_dropout=0.1)).save_pretrained(tmp_path / "ours")
    convert(tmp_path / "ours", tmp_path / "theirs", "--reverse", "--no-verify")
    assert "hidden_dropout 0.1 is not kept" in capsys.readouterr().err


LAYER, OUR_LAYER = "transformer.layers.{layer}.", "model.layers.{layer}."
EXCHANGED = {
    LAYER + "norm_ff": OUR_LAYER + "input_layernorm",
    LAYER + "norm_self_attn": OUR_LAYER + "post_attention_layernorm",
}


class Unturned(CausalKernel):
    """As if the newest token came first."""

    def forward(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        return [tensor.squeeze(1).T for tensor in tensors]


def shifted(positions: int, rows: int) -> Select:
    """As if distance 0 were one row later."""
    return Select(0, tuple(range(positions + 1, positions + 1 - rows, -1)), 2 * positions)


def unturned(positions: int, rows: int) -> Select:
    """As if the longest distance came last."""
    return Select(0, tuple(range(positions - rows + 1, positions + 1)), 2 * positions)


@pytest.mark.parametrize(
    ("name", "replacement"),
    [
        ("by_distance", unturned),
        ("by_distance", shifted),
        ("CausalKernel", Unturned),
        ("MODULES", rcmha_layout.MODULES | EXCHANGED),
    ],
    ids=["tables not reversed", "tables one row off", "kernels not reversed", "norms exchanged"],
)
def test_verification_finds_a_wrong_conversion(
    name: str, replacement: Any, refused: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rcmha_layout, name, replacement)
    assert "differ from the official formulas" in refused()
