"""Arguments of `dynattn pretrain`: files, options, ranges, and that reading them needs nothing that computes."""

import re
from pathlib import Path

import pytest
from cases.training import parse

from dynattn.scripts.common.errors import UserError
from dynattn.scripts.pretrain import PretrainArguments


def test_options_override_the_file_and_are_converted(tmp_path: Path):
    file = tmp_path / "run.yaml"
    file.write_text(
        "output: there\nlearning_rate: 1e-4\nbatch_size: 2\nmixed_precision: no\nmodel_config: {hidden_size: 8}\n"
        "mask_documents: false\ndataset_config: null\n"
    )
    arguments = parse(str(file), "--batch_size", "4")
    assert (arguments.output, arguments.learning_rate, arguments.batch_size) == ("there", 1e-4, 4)
    assert (arguments.mixed_precision, arguments.mask_documents, arguments.dataset_config) == ("no", False, None)
    assert arguments.config_overrides == {"hidden_size": 8}
    assert parse("--output", "x", "--model_config", '{"hidden_size": 8}').config_overrides == {"hidden_size": 8}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--batch_size 0", "batch_size=0 must be positive"),
        ("--learning_rate nan", "learning_rate=nan must be positive"),
        ("--validation_share 1", "validation_share=1.0 must be above 0 and below 1"),
        ("--validation_share 0", "validation_share=0.0 must be above 0 and below 1"),
        ("--sequence_length 1", "sequence_length=1 must be 2 or more"),
        ("--sequence_length 0", "sequence_length=0 must be 2 or more"),
        ("--adam_epsilon 1e-320", "adam_epsilon=1e-320 must be 1e-37 or more"),
        ("--seed -1", "seed=-1 must be between 0 and 4294901760"),
        ("--seed 4294967296", "seed=4294967296 must be between 0 and"),
        ("--adam_beta2 1", "adam_beta2=1.0 must be below 1"),
        ("--learning_rate inf", "learning_rate=inf must be finite"),
        ("--learning_rate 1e39 --weight_decay 0", "learning_rate=1e+39 must be at most 1e+30"),
        ("--epochs inf", "epochs=inf must be finite"),
        ("--batch_size 99999999999", "batch_size=99999999999 must be at most 2147483647"),
        ("--dataloader_workers 100000", "dataloader_workers=100000 must be at most 1024"),
        ("--tokenizer_workers 2000000", "tokenizer_workers=2000000 must be at most 1024"),
        ("--max_steps 3 --epochs 1", "exclude each other"),
        ("--price_per_gpu_hour 2", "price_per_gpu_hour=2.0 is for dry_run; give both"),
        ("--tokenizer t --chat_column a --text_column b", "chat_column=a and text_column=b exclude each other"),
        (
            "--streaming --max_steps 3 --validation_dataset a.idx",
            "validation_dataset=a.idx holds tokens",
        ),
        ("--streaming --max_steps 3 --tokenizer t", "streaming reads files or a data set of the Hub; name one"),
        ("--weight_decay 1e20", "weight_decay=1e+20 times the learning rate 0.001 must be below 1"),
        ("--max_steps 3 --warmup_steps 3", "warmup_steps=3 must be below max_steps=3; give fewer"),
        ("tiny.yaml --max_steps 9", "warmup_steps=20 must be below max_steps=9; give fewer, or 0 for none"),
        ("--init_from a --model_type llama", "already fixes the model"),
        ("--model_config {a", "is not JSON"),
        ("--model_config " + "9" * 5000, "is not JSON"),
        ("--model_config " + "[" * 50_000, "is not JSON"),
        ("--model_config [1]", "must be a mapping"),
        ('--model_config {"hidden_size":8,"hidden_size":16}', "hidden_size is given twice"),
    ],
)
def test_values_out_of_range_are_one_clear_error(options: str, message: str):
    with pytest.raises(UserError, match=re.escape(message)):
        parse("--output", "x", *options.split())


def test_ranges_go_by_the_types_of_options_and_not_by_those_of_values():
    """Python programs write 0 for False, and may confuse options."""
    assert not PretrainArguments(output="x", compile=0, mask_documents=0).compile
    with pytest.raises(UserError, match="batch_size=False must be positive"):
        PretrainArguments(output="x", batch_size=False)
    with pytest.raises(UserError, match=r"optimizer=0 must be one of \('adamw', 'muon'\)"):
        PretrainArguments(output="x", optimizer=0)
    with pytest.raises(TypeError, match="'str' and 'int'"):
        PretrainArguments(output="x", log_every="10")


def test_a_column_of_text_needs_texts():
    def is_read(**options: str) -> bool:
        return "text_column" not in PretrainArguments(output="x", tokenizer="t", **options).without_effect

    assert is_read(dataset="a.jsonl") and is_read(validation_dataset="a.jsonl")
    assert not is_read() and not is_read(dataset="a.idx")


def test_a_recipe_may_say_what_a_dry_run_is_about(tmp_path: Path):
    file = tmp_path / "run.yaml"
    file.write_text("output: x\non: h100:8\ndry_run: on\n")
    assert (parse(str(file)).on, parse(str(file)).dry_run) == ("h100:8", True)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("max_steps: 1.5", "argument --max_steps/--max-steps: invalid int value: '1.5'"),
        ("trackers: [wandbb]", "argument --trackers: invalid choice: 'wandbb'"),
        ("engine: fsdp", "argument --engine: invalid choice: 'fsdp'"),
        ("dataset: [a.jsonl, b.jsonl]", "argument --dataset: dataset=['a.jsonl', 'b.jsonl'] must be a single value"),
    ],
)
def test_a_value_of_the_wrong_type_in_a_file_is_one_clear_error(tmp_path: Path, line: str, message: str):
    file = tmp_path / "run.yaml"
    file.write_text(f"output: x\n{line}\n")
    with pytest.raises(UserError, match=re.escape(f"{file}: {message}")):
        parse(str(file))


def test_shipped_files_are_found_by_name_unless_there_is_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    assert parse("tiny.yaml", "--seed", "3").seed == parse("--seed", "3", "tiny.yaml").seed == 3
    Path("tiny.yaml").write_text("output: mine\n")
    assert parse("tiny.yaml").output == "mine"


def test_only_bare_names_are_those_of_shipped_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    Path("configs").mkdir()
    Path("configs/tiny.yaml").write_text("output: mine\n")
    assert parse("configs/tiny.yaml").output == "mine"
    assert parse(str(tmp_path / "configs" / "tiny.yaml")).output == "mine"
    for missing in ("other/tiny.yaml", "../recipes/tiny.yaml", "x" * 300 + ".yaml"):
        with pytest.raises(UserError, match="cannot read the argument file"):
            parse(missing)


@pytest.mark.parametrize("line", ["batch_size: null", "seed: null", "dataset: null"])
def test_a_missing_value_in_a_file_is_one_clear_error(line: str, tmp_path: Path):
    (tmp_path / "run.yaml").write_text(f"output: x\n{line}\n")
    with pytest.raises(UserError, match="=None must be given, or left out"):
        parse(str(tmp_path / "run.yaml"))


def test_an_output_that_no_library_can_write_is_one_clear_error(tmp_path: Path):
    (tmp_path / "run.yaml").write_text('output: "a\\0b"\n')
    with pytest.raises(UserError, match=re.escape(r"output='a\x00b' must be a path in UTF-8 without null bytes")):
        parse(str(tmp_path / "run.yaml"))
    with pytest.raises(UserError, match=re.escape(r"output='\udcff' must be a path in UTF-8")):
        parse("--output", "\udcff")
