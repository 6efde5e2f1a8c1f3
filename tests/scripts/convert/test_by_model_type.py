"""What Transformers decides by the model type (tokenizer, image processor, generation) stays when the type changes."""

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import pytest
from cases.checkpoints import convert, convert_well, edit_config, refusal, save_tokenizer
from cases.seq2seq import PARENTS, SHORT
from cases.vision_parents import make_parent
from transformers import (
    AutoImageProcessor,
    AutoModelForSeq2SeqLM,
    AutoTokenizer,
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
    ViTImageProcessor,
)

from dynattn.scripts.cli import main
from dynattn.scripts.convert.upcycle import by_model_type
from dynattn.scripts.convert.upcycle.by_model_type import TOKENIZER

GENERATION = {"num_beams": 2, "no_repeat_ngram_size": 3}
SETTINGS: dict[str, dict[str, Any]] = {
    "bart": {"forced_bos_token_id": 0, **GENERATION},
    "marian": {"bad_words_ids": [[4], [9, 5]], **GENERATION},
}


def save_encoder_decoder(folder: Path, name: str, **fields: Any) -> Path:
    config_class, model_class, theirs, _ = PARENTS[name]
    config = config_class(**{**SHORT, **theirs, "encoder_layers": 1, "decoder_layers": 1, **fields})
    model_class(config).save_pretrained(folder)
    return folder


def save_llama(folder: Path) -> Path:
    sizes: dict[str, Any] = {
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
    }
    LlamaForCausalLM(LlamaConfig(**sizes, vocab_size=300, max_position_embeddings=64)).save_pretrained(folder)
    save_tokenizer(folder)
    return folder


def forget(file: Path, *names: str) -> None:
    """Removes fields from a JSON file."""
    content = json.loads(file.read_text())
    file.write_text(json.dumps({name: value for name, value in content.items() if name not in names}))


def settings_of(folder: Path) -> dict[str, Any]:
    """The generation settings with which the model in `folder` loads."""
    settings = AutoModelForSeq2SeqLM.from_pretrained(folder).generation_config.to_diff_dict()
    return {
        name: value for name, value in settings.items() if name not in ("transformers_version", "_from_model_config")
    }


@pytest.mark.parametrize("files", ["tokenizer.json without a class", "tokenizer.json alone", "vocab and merges alone"])
def test_a_tokenizer_whose_class_the_parent_implies_reads_text_as_before(files: str, tmp_path: Path) -> None:
    parent = save_encoder_decoder(tmp_path / "parent", "bart", vocab_size=310)
    save_tokenizer(parent)
    forget(parent / "tokenizer_config.json", "tokenizer_class", "eos_token")
    if files.endswith("alone"):
        (parent / "tokenizer_config.json").unlink()
    if files.startswith("vocab"):
        model = json.loads((parent / "tokenizer.json").read_bytes())["model"]
        (parent / "vocab.json").write_text(json.dumps(model["vocab"]))
        merges = "\n".join(" ".join(pair) for pair in model["merges"])
        (parent / "merges.txt").write_text(merges, encoding="utf-8")
        (parent / "tokenizer.json").unlink()
    convert_well("bart", parent, tmp_path / "ours", "--no-verify")
    convert_well("bart", tmp_path / "ours", tmp_path / "back", "--reverse", "--no-verify")
    theirs, *others = (
        AutoTokenizer.from_pretrained(folder) for folder in (parent, tmp_path / "ours", tmp_path / "back")
    )
    assert type(theirs).__name__ == "RobertaTokenizer" and theirs("heads").input_ids[0] == theirs.bos_token_id
    for other in others:
        assert type(other) is type(theirs) and other.special_tokens_map == theirs.special_tokens_map
        assert other("heads are composed").input_ids == theirs("heads are composed").input_ids


def test_ours_without_a_class_is_not_taken_for_the_parents(tmp_path: Path) -> None:
    convert_well(
        "bart", save_encoder_decoder(tmp_path / "parent", "bart", vocab_size=300), tmp_path / "ours", "--no-verify"
    )
    save_tokenizer(tmp_path / "ours")
    forget(tmp_path / "ours" / "tokenizer_config.json", "tokenizer_class")
    convert_well("bart", tmp_path / "ours", tmp_path / "back", "--reverse", "--no-verify")
    ours, back = (AutoTokenizer.from_pretrained(tmp_path / name) for name in ("ours", "back"))
    assert type(ours) is type(back) and ours("heads").input_ids == back("heads").input_ids


@pytest.mark.parametrize("given", [{}, {"tokenizer_class": "AnotherTokenizer"}], ids=["implied", "named"])
def test_files_of_marians_tokenizer_travel_and_keep_its_class_even_where_it_cannot_load(
    given: dict[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    parent = save_encoder_decoder(tmp_path / "parent", "marian")
    files = {"source.spm": "s", "target.spm": "t", "vocab.json": "{}", "target_vocab.json": "{}"}
    for name, text in files.items():
        (parent / name).write_text(text)
    (parent / "tokenizer_config.json").write_text(json.dumps({"source_lang": "en", **given}))
    convert_well("bart", parent, tmp_path / "ours", "--no-verify")
    assert "the tokenizer was copied but does not load here" in capsys.readouterr().err
    convert_well("bart", tmp_path / "ours", tmp_path / "back", "--reverse", "--no-verify")
    for folder in (tmp_path / "ours", tmp_path / "back"):
        assert {name: (folder / name).read_text() for name in files} == files
        named = json.loads((folder / "tokenizer_config.json").read_text())
        assert named == {"source_lang": "en", "tokenizer_class": "MarianTokenizer", **given}


def test_a_damaged_tokenizer_configuration_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    parent = save_llama(tmp_path / "parent")
    (parent / "tokenizer_config.json").write_text("[")
    line = refusal(capsys, "llama", parent, tmp_path / "ours", "--no-verify")  # no class is to be named
    assert f"{parent / 'tokenizer_config.json'} is not JSON" in line
    bart = save_encoder_decoder(tmp_path / "bart", "bart")
    (bart / "tokenizer_config.json").write_text("[")
    assert f"{bart / 'tokenizer_config.json'} is not JSON" in refusal(capsys, "bart", bart, tmp_path / "dcbart")


def test_naming_a_class_brings_no_code_and_no_path_back(tmp_path: Path) -> None:
    bart = save_encoder_decoder(tmp_path / "bart", "bart")
    save_tokenizer(bart)
    forget(bart / "tokenizer_config.json", "tokenizer_class")
    elsewhere = {"auto_map": {"AutoTokenizer": [None, "evil/repo--evil.Tokenizer"]}, "name_or_path": "/home/me/bart"}
    content = json.loads((bart / "tokenizer_config.json").read_text())
    (bart / "tokenizer_config.json").write_text(json.dumps(content | elsewhere))
    convert_well("bart", bart, tmp_path / "ours", "--no-verify")
    written = json.loads((tmp_path / "ours" / "tokenizer_config.json").read_text())
    assert "tokenizer_class" in written and not elsewhere.keys() & written.keys()


@pytest.mark.parametrize("kind", ["llama", "vit"])
def test_code_that_files_name_does_not_run(kind: str, tmp_path: Path) -> None:
    elsewhere, parent = tmp_path / "elsewhere", tmp_path / "parent"
    elsewhere.mkdir()
    (elsewhere / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w').close()\n")
    if kind == "llama":
        save_llama(parent)
    else:
        make_parent("vit").save_pretrained(parent)
        ViTImageProcessor().save_pretrained(parent)
    loaders = [f"Auto{name}" for name in ("Config", "Tokenizer", "ImageProcessor", "Model", "ModelForCausalLM")]
    code = {"auto_map": dict.fromkeys(loaders, f"{elsewhere}--evil.Evil")}
    for file in parent.glob("*config.json"):
        file.write_text(json.dumps(json.loads(file.read_text()) | code))
    convert(kind, parent, tmp_path / "ours")  # a class that only the code defines may be refused
    assert not (tmp_path / "ran").exists()


def test_a_tokenizer_that_no_name_keeps_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def by_folder(folder: Path) -> tuple[str, Any]:
        return "SomeTokenizer", folder.name

    monkeypatch.setattr(by_model_type, "TOKENIZER", dataclasses.replace(TOKENIZER, behaviour=by_folder))
    line = refusal(capsys, "llama", save_llama(tmp_path / "parent"), tmp_path / "ours", "--no-verify")
    assert "is a SomeTokenizer, and beside a model of the new type it would behave differently" in line
    assert not (tmp_path / "ours").exists()


@pytest.mark.parametrize("name", ["vit", "deit", "dinov2"])
def test_an_image_processor_whose_class_the_parent_implies_goes_along(name: str, tmp_path: Path) -> None:
    parent = tmp_path / "parent"
    make_parent(name).save_pretrained(parent)
    ViTImageProcessor(size={"height": 24, "width": 24}, image_mean=[0.1, 0.2, 0.3]).save_pretrained(parent)
    settings = parent / "preprocessor_config.json"
    forget(settings, "image_processor_type")
    settings.write_text(json.dumps({**json.loads(settings.read_text()), "auto_map": {"AutoImageProcessor": "own.Own"}}))
    convert_well("vit", parent, tmp_path / "ours", "--no-verify")
    convert_well("vit", tmp_path / "ours", tmp_path / "back", "--reverse", "--no-verify")
    theirs, *others = (
        AutoImageProcessor.from_pretrained(folder).to_dict()
        for folder in (parent, tmp_path / "ours", tmp_path / "back")
    )
    del theirs["auto_map"]  # names of code do not go along
    assert others == [theirs, theirs] and list(theirs["image_mean"]) == [0.1, 0.2, 0.3]


@pytest.mark.parametrize("options", [(), ("--no-verify",)], ids=["verified", "not verified"])
@pytest.mark.parametrize("name", SETTINGS)
def test_generation_settings_in_config_json_are_kept(name: str, options: tuple[str, ...], tmp_path: Path) -> None:
    parent = save_encoder_decoder(tmp_path / "parent", name)
    (parent / "generation_config.json").unlink()
    edit_config(parent, **SETTINGS[name])
    convert_well("bart", parent, tmp_path / "ours", *options)
    convert_well("bart", tmp_path / "ours", tmp_path / "back", "--reverse", *options)
    theirs, ours, back = (settings_of(folder) for folder in (parent, tmp_path / "ours", tmp_path / "back"))
    assert theirs == ours == back and theirs.items() >= SETTINGS[name].items()


def test_settings_that_transformers_would_not_save_today_are_kept_too(tmp_path: Path) -> None:
    parent = save_llama(tmp_path / "parent")
    (parent / "generation_config.json").unlink(missing_ok=True)
    convert_well("llama", parent, tmp_path / "plain", "--no-verify")
    assert not (tmp_path / "plain" / "generation_config.json").exists()  # which says nothing that config.json does not
    edit_config(parent, temperature=0.7)  # without do_sample
    convert_well("llama", parent, tmp_path / "ours", "--no-verify")
    assert GenerationConfig.from_pretrained(tmp_path / "ours").temperature == 0.7


def test_models_that_generate_different_numbers_of_tokens_are_told_apart(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    parent = save_encoder_decoder(tmp_path / "parent", "bart", max_position_embeddings=64)  # which is exact
    convert_well("bart", parent, tmp_path / "ours", "--no-verify")
    generation = json.loads((parent / "generation_config.json").read_text())
    goes_on = {**generation, "eos_token_id": None}  # where the parent stops at the token that it starts with
    (tmp_path / "ours" / "generation_config.json").write_text(json.dumps(goes_on))
    capsys.readouterr()
    assert main(["convert", "check", str(parent), str(tmp_path / "ours")]) == 1
    assert re.search(r"different +\d+ tokens, .*bit for bit, but other tokens are generated", capsys.readouterr().out)


def test_all_chat_templates_travel_when_converted_and_published(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    parent = save_llama(tmp_path / "parent")
    tokenizer = AutoTokenizer.from_pretrained(parent)
    tokenizer.chat_template = {"default": "{{ messages }}", "tool_use": "{{ tools }}"}
    tokenizer.save_pretrained(parent)
    convert_well("llama", parent, tmp_path / "ours", "--no-verify")
    assert "additional_chat_templates/tool_use.jinja" in capsys.readouterr().out
    assert main(["publish", str(tmp_path / "ours"), "--output", str(tmp_path / "hub"), "--no_verify"]) == 0
    report = capsys.readouterr()
    assert "additional_chat_templates/tool_use.jinja" in report.out and "left out" not in report.err
    for folder in (tmp_path / "ours", tmp_path / "hub"):
        assert AutoTokenizer.from_pretrained(folder).chat_template == tokenizer.chat_template
