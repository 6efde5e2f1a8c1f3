"""Publishing models of Sentence Transformers: their other modules stay, and the library gives the same answers."""

import json
import shutil
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from cases.checkpoints import edit_config, save_tokenizer
from cases.vision_models import strengthen
from huggingface_hub import ModelCard
from torch import Tensor
from transformers import AutoTokenizer, BertConfig, BertModel

import dynattn
from dynattn.scripts.cli import main
from dynattn.scripts.common.errors import UserError
from dynattn.scripts.publish import verify
from dynattn.scripts.publish.sentence_modules import class_name, module_files

sentences = pytest.importorskip("sentence_transformers")

SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
CONFIG = {**SIZES, "vocab_size": 300, "max_position_embeddings": 64, "pad_token_id": 0, "initializer_range": 0.2}
TEXTS = ["heads 7 are composed", "heads", "heads 8 are composed with heads 9"]


def save_encoder(folder: Path, head: str = "Model") -> None:
    """A small DCModernBert whose outputs without composition would be others, with a tokenizer that pads."""
    torch.manual_seed(0)
    special = dict.fromkeys(("bos_token_id", "eos_token_id", "cls_token_id", "sep_token_id"), 0)
    config = dynattn.DCModernBertConfig(**CONFIG, **special, compose_init_scale=40.0)
    getattr(dynattn, f"DCModernBert{head}")(config).save_pretrained(folder)
    save_tokenizer(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder, pad_token="<eos>")
    tokenizer.save_pretrained(folder)


def embed(encoder: Any) -> Tensor:
    found: Tensor = encoder.encode(TEXTS, convert_to_tensor=True)
    return found.to_dense()


@pytest.fixture(scope="module")
def embedder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Embeddings that are projected and normalized."""
    folder = tmp_path_factory.mktemp("embedder")
    save_encoder(folder / "model")
    encoder = sentences.SentenceTransformer(str(folder / "model"), device="cpu")
    modules = sentences.sentence_transformer.modules
    torch.manual_seed(1)
    encoder.append(modules.Dense(in_features=32, out_features=8))
    encoder.append(modules.Normalize())
    encoder.save_pretrained(str(folder / "embedder"))
    return folder / "embedder"


def publish(folder: Path, destination: Path) -> Path:
    assert main(["publish", str(folder), "--output", str(destination), "--repo", "me/it", "--dry_run"]) == 0
    return destination


@pytest.fixture(scope="module")
def published(embedder: Path) -> Path:
    return publish(embedder, embedder.parent / "hub")


def test_a_published_embedder_is_whole_and_gives_the_same_embeddings(embedder: Path, published: Path) -> None:
    """A process without the package has compared them, too."""
    kept = {path.relative_to(embedder) for path in embedder.rglob("*") if path.is_file()}
    assert kept <= {path.relative_to(published) for path in published.rglob("*")}
    expected = embed(sentences.SentenceTransformer(str(embedder), device="cpu"))
    found = sentences.SentenceTransformer(str(published), device="cpu", trust_remote_code=True)
    assert expected.shape == (3, 8)
    torch.testing.assert_close(embed(found), expected, atol=0, rtol=0)


def test_its_card_is_of_the_library_and_says_how_it_is_loaded(published: Path) -> None:
    card = ModelCard.load(published / "README.md")
    assert card.data.library_name == "sentence-transformers" and card.data.pipeline_tag == "sentence-similarity"
    assert {"sentence-transformers", "dynattn", "custom_code"} <= set(card.data.tags)
    assert 'SentenceTransformer("me/it")' in card.text
    assert 'SentenceTransformer("me/it", trust_remote_code=True)' in card.text


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "head"),
    [
        ("CrossEncoder", "ForSequenceClassification"),
        ("SparseEncoder", "ForMaskedLM"),
        ("MultiVectorEncoder", "Model"),
    ],
)
def test_other_models_of_the_library_are_published_too(kind: str, head: str, tmp_path: Path) -> None:
    save_encoder(tmp_path / "model", head)
    model = getattr(sentences, kind)(str(tmp_path / "model"), device="cpu")
    model.save_pretrained(str(tmp_path / "saved"))
    folder = publish(tmp_path / "saved", tmp_path / "hub")
    again = getattr(sentences, kind)(str(folder), device="cpu", trust_remote_code=True)
    if kind == "SparseEncoder":
        torch.testing.assert_close(embed(again), embed(model), atol=0, rtol=0)
    elif kind == "MultiVectorEncoder":
        torch.testing.assert_close(again.encode(TEXTS), model.encode(TEXTS), atol=0, rtol=0)
    else:
        pairs = [(TEXTS[0], TEXTS[1]), (TEXTS[1], TEXTS[2])]
        assert again.predict(pairs).tolist() == model.predict(pairs).tolist()


@pytest.mark.slow
def test_heads_composed_in_place_stay_in_a_published_embedder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    torch.manual_seed(0)
    model = dynattn.with_composed_heads(BertModel, compose_rank=2, dropout=0.0)(BertConfig(**CONFIG))
    strengthen(model)
    save_encoder(tmp_path / "model")
    model.save_pretrained(tmp_path / "model")
    encoder = sentences.SentenceTransformer(str(tmp_path / "model"), device="cpu")
    encoder.save_pretrained(str(tmp_path / "saved"))
    folder = publish(tmp_path / "saved", tmp_path / "hub")
    printed = capsys.readouterr()
    assert "embeddings" in printed.out and "left out" not in printed.err
    found = embed(sentences.SentenceTransformer(str(folder), device="cpu", trust_remote_code=True))
    torch.testing.assert_close(found, embed(encoder), atol=0, rtol=0)
    encoder[0].model = BertModel.from_pretrained(tmp_path / "model", composed_heads=None).eval()
    assert not torch.allclose(found, embed(encoder), atol=0.01)


@pytest.mark.slow
def test_without_the_library_the_modules_are_copied_and_a_warning_says_what_was_not_verified(
    embedder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(verify, "find_spec", lambda name: None)
    folder = publish(embedder, tmp_path / "hub")
    printed = capsys.readouterr()
    assert "embeddings" not in printed.out and "pip install sentence-transformers" in printed.err
    assert (folder / "2_Dense" / "model.safetensors").is_file()


def test_modules_that_the_library_cannot_load_are_refused(
    embedder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    broken = tmp_path / "broken"
    shutil.copytree(embedder, broken)
    edit_config(broken / "2_Dense", in_features=31)
    assert main(["publish", str(broken), "--output", str(tmp_path / "hub"), "--dry_run"]) == 2
    assert "Sentence Transformers does not load" in capsys.readouterr().err
    assert not (tmp_path / "hub").exists()


@pytest.mark.parametrize(
    ("modules", "message"),
    [
        ({}, "must hold a list of modules"),
        ([], "must hold a list of modules"),
        (["Pooling"], "a module has a type"),
        ([{"path": "../elsewhere", "type": "sentence_transformers.models.Dense"}], "a folder beside the file"),
        ([{"path": "*", "type": "sentence_transformers.models.Dense"}], "a folder beside the file"),
        ([{"path": "", "type": "my_modules.Transformer"}], "only modules of Sentence Transformers are published"),
        (
            [{"path": "", "type": "sentence_transformers.models.Router"}],
            "must begin with the Transformer of the folder",
        ),
    ],
)
def test_a_damaged_list_of_modules_is_refused(modules: Any, message: str, tmp_path: Path) -> None:
    (tmp_path / "modules.json").write_text(json.dumps(modules))
    with pytest.raises(UserError, match=message):
        module_files(tmp_path)


MODULES = [
    {"path": "", "type": "sentence_transformers.Transformer"},
    {"path": "1_Pooling", "type": "sentence_transformers.Pooling"},
]


@pytest.mark.parametrize("place", ["config.json", "config_sentence_transformers.json", "1_Pooling/config.json"])
def test_classes_elsewhere_are_refused(place: str, tmp_path: Path) -> None:
    """Who loads the folder trusts the code in it, and not all that is installed."""
    (tmp_path / "1_Pooling").mkdir()
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "modules.json").write_text(json.dumps(MODULES))
    for name, refused in (("torch.nn.modules.activation.Tanh", False), ("gelu", False), ("code.interact", True)):
        (tmp_path / place).write_text(json.dumps({"sentence_transformers": {"activation_fn": name}}))
        with pytest.raises(UserError, match=r"only classes in torch\.nn are published") if refused else nullcontext():
            module_files(tmp_path)


def test_only_files_of_modules_are_copied(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "modules.json").write_text(json.dumps(MODULES))
    assert module_files(tmp_path) == ["modules.json"]  # a folder without files, as for normalization, is on no Hub
    for name in ("1_Pooling/config.json", "1_Pooling/code.py", "1_Pooling/weights.bin", "2_Other/config.json"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("{}")
    assert module_files(tmp_path) == ["1_Pooling/config.json", "modules.json"]


def test_a_folder_without_modules_is_of_no_other_library(tmp_path: Path) -> None:
    assert module_files(tmp_path) == []


@pytest.mark.parametrize("content", [{"model_type": "Trainer"}, []])
def test_other_classes_of_the_library_are_refused(content: Any, tmp_path: Path) -> None:
    (tmp_path / "config_sentence_transformers.json").write_text(json.dumps(content))
    with pytest.raises(UserError, match="MultiVectorEncoder, CrossEncoder can be published"):
        class_name(tmp_path)


def test_old_folders_without_settings_are_of_the_first_class(tmp_path: Path) -> None:
    assert class_name(tmp_path) == "SentenceTransformer"
