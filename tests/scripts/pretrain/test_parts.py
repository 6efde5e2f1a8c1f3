"""The small parts of `dynattn pretrain`: arguments, schedule, optimizer groups, tokenizer and documents."""

import math
import re
from pathlib import Path

import pytest
from datasets import Dataset
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from dynattn.scripts.common.arguments import parse_arguments
from dynattn.scripts.common.errors import UserError
from dynattn.scripts.pretrain import PretrainArguments
from dynattn.scripts.pretrain.data.documents import cut_tail, hold_out, load_documents
from dynattn.scripts.pretrain.data.tokenizer import load_tokenizer, required_vocabulary, train_bpe
from dynattn.scripts.pretrain.main import find_shipped
from dynattn.scripts.pretrain.optimizer import build_optimizer
from dynattn.scripts.pretrain.schedule import CosineSchedule
from dynattn.scripts.pretrain.validation import Validation


def parse(*argv: str) -> PretrainArguments:
    return parse_arguments(PretrainArguments, argv, prog="dynattn pretrain")


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
        ("--sequence_length 1", "sequence_length=1 must be 2 or more"),
        ("--max_steps 3 --epochs 1", "exclude each other"),
        ("--max_steps 3 --warmup_steps 3", "warmup_steps=3 must be below max_steps=3"),
        ("--init_from a --model_type llama", "already fixes the model"),
        ("--model_config {a", "is not JSON"),
        ("--model_config [1]", "must be a mapping"),
    ],
)
def test_values_out_of_range_are_one_clear_error(options: str, message: str):
    with pytest.raises(UserError, match=re.escape(message)):
        parse("--output", "x", *options.split())


def test_a_value_of_the_wrong_type_in_a_file_ends_as_on_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture):
    file = tmp_path / "run.yaml"
    file.write_text("output: x\nmax_steps: 1.5\n")
    with pytest.raises(SystemExit) as caught:
        parse(str(file))
    assert caught.value.code == 2
    assert "argument --max_steps/--max-steps: invalid int value: '1.5'" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["tiny.yaml", "405m.yaml"])
def test_shipped_files_are_found_by_name_and_parse(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    assert parse(*find_shipped([name, "--seed", "3"])).seed == 3
    Path(name).write_text("output: mine\n")
    assert parse(*find_shipped([name])).output == "mine"


def test_schedule_has_the_values_of_the_formula():
    schedule = CosineSchedule(peak=2.0, warmup_steps=4, max_steps=15, min_ratio=0.1)
    assert [schedule(step) for step in range(4)] == [0.5, 1.0, 1.5, 2.0]
    assert schedule(4) == 2.0
    assert schedule(9) == pytest.approx(0.2 + 1.8 / 2)
    assert schedule(14) == pytest.approx(0.2)
    quarter = 2.0 * (0.1 + 0.9 * (1 + math.cos(math.pi * 0.3)) / 2)
    assert schedule(7) == pytest.approx(quarter)
    assert CosineSchedule(peak=1.0, warmup_steps=0, max_steps=1, min_ratio=0.1)(0) == 1.0


@pytest.mark.parametrize("tied", [True, False])
def test_only_matrices_that_are_no_embeddings_decay(tied: bool):
    config = LlamaConfig(
        vocab_size=8, hidden_size=4, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1,
        tie_word_embeddings=tied, attention_bias=True,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    optimizer = build_optimizer(model, PretrainArguments(output="x", weight_decay=0.3))
    names = {id(weight): name for name, weight in model.named_parameters()}
    decayed, rest = ({names[id(weight)] for weight in group["params"]} for group in optimizer.param_groups)
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.3, 0.0]
    assert decayed | rest == set(names.values())
    assert all(name.endswith("bias") or "norm" in name or "embed" in name for name in rest)
    assert ("lm_head.weight" in decayed) == (not tied)


def test_bits_per_byte_by_hand():
    # Four targets with probability 1/2 and two with 1/8 are 4 + 6 bits; the text has 5 bytes.
    nats = 4 * math.log(2) + 2 * math.log(8)
    validation = Validation.from_sums(nats, targets=6, text_bytes=5)
    assert validation.bits_per_byte == pytest.approx(10 / 5)
    assert validation.loss == pytest.approx(nats / 6)
    assert validation.perplexity == pytest.approx(2 ** (10 / 6))


def test_trained_tokenizer_loads_with_auto_classes_and_is_lossless(tmp_path: Path):
    tokenizer = train_bpe([["the cat sat on the mat " * 20]], vocab_size=270)
    tokenizer.save_pretrained(tmp_path)
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    text = "the cat, naïve 猫\n\n\tend"
    assert loaded.decode(loaded(text)["input_ids"]) == text
    assert loaded.eos_token == loaded.bos_token == loaded.pad_token == "<|endoftext|>"
    assert required_vocabulary(loaded) <= 270


def test_tokenizer_mistakes_are_told(tmp_path: Path):
    with pytest.raises(UserError, match="vocab_size=256 is too small for a byte-level BPE; give 257 or more"):
        train_bpe([["text"]], vocab_size=256)
    with pytest.raises(UserError, match="cannot load the tokenizer"):
        load_tokenizer(tmp_path / "nothing")
    backend = train_bpe([["text"]], vocab_size=257).backend_tokenizer
    PreTrainedTokenizerFast(tokenizer_object=backend).save_pretrained(tmp_path / "no_eos")
    with pytest.raises(UserError, match="has no eos_token"):
        load_tokenizer(tmp_path / "no_eos")


def test_held_out_documents_are_not_training_documents():
    dataset = Dataset.from_dict({"text": [f"document {number}" for number in range(50)]})
    train, validation = hold_out(dataset, share=0.1)
    assert len(validation["text"]) == 5
    assert sorted([*train["text"], *validation["text"]]) == sorted(dataset["text"])


def test_a_single_document_is_cut_after_a_line():
    text = "".join(f"line {number}\n" for number in range(100))
    head, tail = cut_tail(text, share=0.2)
    assert head + tail == text
    assert head.endswith("\n")
    assert 0.15 < len(tail) / len(text) <= 0.2
    assert cut_tail("x" * 100, share=0.2) == ("x" * 80, "x" * 20)


@pytest.mark.parametrize("suffix", [".txt", ".jsonl", ".parquet"])
def test_local_files_folders_and_globs_hold_the_same_documents(tmp_path: Path, suffix: str):
    documents = [f"document {number}\nwith two lines" for number in range(4)]
    folder = tmp_path / "data"
    folder.mkdir()
    for part in (0, 1):
        chosen = Dataset.from_dict({"body": [*documents[2 * part : 2 * part + 2], "  "]})
        if suffix == ".txt":
            for number, text in enumerate(chosen["body"]):
                (folder / f"{part}-{number}.txt").write_text(text)
        elif suffix == ".jsonl":
            chosen.to_json(folder / f"{part}.jsonl")
        else:
            chosen.to_parquet(folder / f"{part}.parquet")
    for source in (folder, folder / f"*{suffix}"):
        column = "text" if suffix == ".txt" else "body"
        loaded = load_documents(PretrainArguments(output="x", dataset=str(source), text_column=column))
        assert sorted([*loaded.train["text"], *loaded.validation["text"]]) == documents
        assert loaded.train.column_names == ["text"]


def test_named_validation_data_is_used(tmp_path: Path):
    (tmp_path / "a.txt").write_text("training text")
    (tmp_path / "b.txt").write_text("other text")
    arguments = PretrainArguments(
        output="x", dataset=str(tmp_path / "a.txt"), validation_dataset=str(tmp_path / "b.txt")
    )
    loaded = load_documents(arguments)
    assert (loaded.train["text"][:], loaded.validation["text"][:]) == (["training text"], ["other text"])
    assert loaded.name == "a.txt"


def test_data_mistakes_are_told(tmp_path: Path):
    (tmp_path / "empty.txt").write_text("")
    (tmp_path / "blank.txt").write_text(" \n ")
    (tmp_path / "binary.txt").write_bytes(b"\xff\xfe\x00")
    (tmp_path / "broken.jsonl").write_text('{"text": \n')
    (tmp_path / "good.jsonl").write_text('{"body": "text", "number": 3}\n')
    (tmp_path / "table.csv").write_text("text\na\n")
    (tmp_path / "folder").mkdir()
    mistakes = {
        "missing.txt": "there is no file or folder",
        "empty.txt": "is empty",
        "blank.txt": "holds no text",
        "binary.txt": "cannot read",
        "broken.jsonl": "cannot read",
        "good.jsonl": r"has no column 'text', only \['body', 'number'\]",
        "folder": "holds no file that ends in",
        "table.csv": "ends in none of",
    }
    for name, message in mistakes.items():
        with pytest.raises(UserError, match=message):
            load_documents(PretrainArguments(output="x", dataset=str(tmp_path / name)))
    with pytest.raises(UserError, match=r"holds .*int64.*, not text"):
        load_documents(PretrainArguments(output="x", dataset=str(tmp_path / "good.jsonl"), text_column="number"))
    with pytest.raises(UserError, match="cannot load the split 'train' of the dataset 'no_such_dataset'"):
        load_documents(PretrainArguments(output="x", dataset="no_such_dataset"))
