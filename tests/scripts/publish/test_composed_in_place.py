"""Publishing models of Transformers with composed heads: their code travels, and adds the heads without the package."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from cases.checkpoints import edit_config, save_tokenizer
from cases.vision_models import strengthen
from huggingface_hub import ModelCard
from torch import Tensor
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    BartConfig,
    BartForConditionalGeneration,
    BertConfig,
    BertForMaskedLM,
    CLIPVisionConfig,
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    LlavaConfig,
    LlavaForConditionalGeneration,
    PreTrainedConfig,
    PreTrainedModel,
    SiglipConfig,
    SiglipForImageClassification,
    SiglipModel,
    T5Config,
    T5ForConditionalGeneration,
    ViTConfig,
    ViTForImageClassification,
    WhisperConfig,
    WhisperForConditionalGeneration,
)
from transformers.dynamic_module_utils import get_class_from_dynamic_module

from dynattn import with_composed_heads
from dynattn.remote_code import write_code
from dynattn.scripts.cli import main
from dynattn.scripts.common.errors import UserError
from dynattn.scripts.publish.arguments import PublishArguments
from dynattn.scripts.publish.card import make_card
from dynattn.scripts.publish.checkpoint import Checkpoint, read_checkpoint
from dynattn.scripts.publish.verify import answers_with_package

SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
TEXTS = {**SIZES, "vocab_size": 300, "max_position_embeddings": 64, "initializer_range": 0.2, "pad_token_id": 0}
GPT2 = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "attn_pdrop": 0.0, "bos_token_id": 0}
T5 = {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4, "dropout_rate": 0.0}
IDS = torch.arange(3, 27)[None]


def save_composed(folder: Path, model_class: type[PreTrainedModel], config: PreTrainedConfig) -> None:
    """Saves a model whose outputs without the composition would be others."""
    torch.manual_seed(0)
    model = with_composed_heads(model_class, compose_rank=2)(config)
    strengthen(model)
    model.save_pretrained(folder)


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("original") / "tiny"
    save_composed(folder, LlamaForCausalLM, LlamaConfig(**TEXTS, num_key_value_heads=2))
    save_tokenizer(folder)
    return folder


@pytest.fixture(scope="module")
def published(original: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """By the command line, which compares the answers with those of a process without the package."""
    folder = tmp_path_factory.mktemp("published") / "tiny-hub"
    assert main(["publish", str(original), "--output", str(folder), "--repo", "me/tiny", "--dry_run"]) == 0
    return folder


@torch.no_grad()
def logits(model: PreTrainedModel) -> Tensor:
    return model.eval()(IDS).logits


def test_the_folders_code_and_the_package_answer_in_one_process(original: Path, published: Path) -> None:
    """Each copy of the code has an attention function of its own, also after the other one was loaded."""
    ours = with_composed_heads(LlamaForCausalLM).from_pretrained(original)
    remote = get_class_from_dynamic_module("modeling_composed.ComposedLlamaForCausalLM", published)
    theirs = remote.from_pretrained(published)
    assert type(theirs).__module__.startswith("transformers_modules.")
    plain = LlamaForCausalLM.from_pretrained(original, composed_heads=None)
    assert not torch.allclose(logits(plain), logits(ours), atol=0.01)
    for model in (ours, theirs, AutoModelForCausalLM.from_pretrained(published), ours):
        torch.testing.assert_close(logits(model), logits(ours), atol=0, rtol=0)


def test_a_card_says_how_both_are_loaded(original: Path, published: Path) -> None:
    card = ModelCard.load(published / "README.md")
    assert card.data.pipeline_tag == "text-generation"
    assert set(card.data.tags) == {"dynattn", "llama", "custom_code", "arxiv:2405.08553"}
    assert "A `LlamaForCausalLM` with composed heads." in card.text and '| {"compose_rank": 2} |' in card.text
    ours, remote = (text.partition("```")[0] for text in card.text.split("```python\n")[1:])
    for block in (ours, remote):
        names: dict[str, Any] = {}
        exec(block.replace("me/tiny", str(published)), names)
        expected = with_composed_heads(LlamaForCausalLM).from_pretrained(original)
        torch.testing.assert_close(logits(names["model"]), logits(expected))


def test_saved_again_the_model_keeps_its_code(original: Path, published: Path, tmp_path: Path) -> None:
    """Both by the package, which writes it, and by Transformers, which copies it. One without code gets none."""
    code = {path.name for path in published.glob("*.py")}
    assert "modeling_composed.py" in code and "modeling_dcformer.py" not in code
    model = with_composed_heads(LlamaForCausalLM).from_pretrained(published)
    model.save_pretrained(tmp_path / "package")
    AutoModelForCausalLM.from_pretrained(published, trust_remote_code=True).save_pretrained(tmp_path / "copied")
    for folder in ("package", "copied"):
        assert {path.name for path in (tmp_path / folder).glob("*.py")} == code
        again = AutoModelForCausalLM.from_pretrained(tmp_path / folder, trust_remote_code=True)
        torch.testing.assert_close(logits(again), logits(model))
    with_composed_heads(LlamaForCausalLM).from_pretrained(original).save_pretrained(tmp_path / "without")
    assert not list((tmp_path / "without").glob("*.py"))


def test_other_heads_load_with_the_composition_unless_it_names_its_modules(published: Path, tmp_path: Path) -> None:
    """An Auto class that the folder had no class for would return a plain model."""
    weights = with_composed_heads(LlamaForCausalLM).from_pretrained(published).state_dict()
    for auto_class in (AutoModel, AutoModelForSequenceClassification):
        loaded = auto_class.from_pretrained(published, trust_remote_code=True)
        names = [name for name, _ in loaded.base_model.named_parameters() if "composition." in name]
        assert names
        for name in names:
            assert torch.equal(loaded.base_model.get_parameter(name), weights[f"model.{name}"])
    config = LlamaConfig(**TEXTS, composed_heads={"names": ["model.layers.0.self_attn"]})
    config.architectures = ["ComposedLlamaForCausalLM"]
    write_code(config, tmp_path)
    assert list(config.auto_map) == ["AutoModelForCausalLM"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model_class", "config", "answers"),
    [
        (GPT2LMHeadModel, GPT2Config(**GPT2, vocab_size=300, eos_token_id=0), "plain, left-padded, cached, generated"),
        (BertForMaskedLM, BertConfig(**TEXTS, attention_probs_dropout_prob=0.0), "plain, left-padded, saved"),
        (
            T5ForConditionalGeneration,
            T5Config(**T5, vocab_size=300, decoder_start_token_id=0),
            "plain, left-padded, cached, generated",
        ),
        (ViTForImageClassification, ViTConfig(**SIZES, image_size=16, patch_size=4), "plain, larger, saved"),
    ],
    ids=["gpt2", "bert", "t5", "vit"],
)
def test_models_of_other_kinds_work_without_the_package(
    model_class: type[PreTrainedModel],
    config: PreTrainedConfig,
    answers: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    save_composed(tmp_path / "tiny", model_class, config)
    assert main(["publish", str(tmp_path / "tiny")]) == 0
    assert f"without the package: {answers}" in capsys.readouterr().out


def task_of(checkpoint: Checkpoint) -> str:
    """What the card says that a model is for."""
    arguments = PublishArguments(checkpoint=str(checkpoint.folder))
    return str(ModelCard(make_card(checkpoint, arguments)).data.pipeline_tag)


def test_the_parts_of_a_configuration_tell_the_tokens_and_the_pictures(tmp_path: Path) -> None:
    """Of models that read both, one of which compares them, and of a classifier with such a configuration."""
    vision = {**SIZES, "image_size": 16, "patch_size": 4, "num_channels": 1}
    llava = LlavaConfig(text_config=LlamaConfig(**TEXTS), vision_config=CLIPVisionConfig(**vision))
    save_composed(tmp_path / "both", LlavaForConditionalGeneration, llava)
    save_tokenizer(tmp_path / "both")
    both = read_checkpoint(str(tmp_path / "both"))
    assert both.tokenizer is not None and task_of(both) == "image-text-to-text"
    (tmp_path / "both" / "processor_config.json").write_text('{"processor_class": "LlavaProcessor"}')
    with_processor = read_checkpoint(str(tmp_path / "both"))
    card = make_card(with_processor, PublishArguments(checkpoint=str(tmp_path / "both")))
    assert 'processor = AutoProcessor.from_pretrained("both")' in card and "AutoTokenizer" not in card
    siglip = SiglipConfig(text_config={**SIZES, "vocab_size": 300}, vision_config=vision)
    save_composed(tmp_path / "pictures", SiglipForImageClassification, siglip)
    assert answers_with_package(read_checkpoint(str(tmp_path / "pictures")))["plain"].shape == (3, 2)
    save_composed(tmp_path / "pairs", SiglipModel, siglip)
    pairs = read_checkpoint(str(tmp_path / "pairs"))
    assert answers_with_package(pairs)["plain"].shape == (3, 1)
    assert task_of(pairs) == "zero-shot-image-classification"


def test_an_encoder_decoder_translates_though_its_class_fills_masks_too(tmp_path: Path) -> None:
    layers = {f"{side}_{name}": 1 for side in ("encoder", "decoder") for name in ("layers", "ffn_dim")}
    heads = {"encoder_attention_heads": 2, "decoder_attention_heads": 2}
    widths = {"d_model": 8, "vocab_size": 40, "max_position_embeddings": 16}
    save_composed(tmp_path / "bart", BartForConditionalGeneration, BartConfig(**layers, **heads, **widths))
    checkpoint = read_checkpoint(str(tmp_path / "bart"))
    assert (checkpoint.auto_class, task_of(checkpoint)) == ("AutoModelForSeq2SeqLM", "translation")


def test_buffers_are_no_parameters(tmp_path: Path) -> None:
    """Such as what DeepSeek-V3 adds to the scores of its experts, which no optimizer trains."""
    ranks = {"q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 8}
    experts = {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1}
    config = DeepseekV3Config(**TEXTS, **ranks, **experts, moe_intermediate_size=16, first_k_dense_replace=1)
    save_composed(tmp_path / "experts", DeepseekV3ForCausalLM, config)
    model = with_composed_heads(DeepseekV3ForCausalLM).from_pretrained(tmp_path / "experts")
    assert read_checkpoint(str(tmp_path / "experts")).elements == {"F32": model.num_parameters()}


def test_what_cannot_be_published_is_told_so(original: Path, tmp_path: Path) -> None:
    """A model that a program without this package loaded and saved has lost its composition, but not the field."""
    LlamaForCausalLM.from_pretrained(original, composed_heads=None).save_pretrained(tmp_path / "lost")
    edit_config(tmp_path / "lost", composed_heads={"compose_rank": 2})
    with pytest.raises(
        UserError, match=r"the architecture 'LlamaForCausalLM' in .* is none of those that dynattn\.with"
    ):
        read_checkpoint(str(tmp_path / "lost"))
    edit_config(tmp_path / "lost", composed_heads=None)
    with pytest.raises(UserError, match="holds a model of type 'llama'; only dcformer"):
        read_checkpoint(str(tmp_path / "lost"))
    for name, message in (
        ("flash_attention_2", "does not load: FlashAttention2 has been toggled on"),
        ("flex_attention", "the ComposedLlamaForCausalLM in .* does not work: .* has no masks for composed heads; use"),
    ):
        shutil.copytree(original, tmp_path / name)
        edit_config(tmp_path / name, attn_implementation=name)
        with pytest.raises(UserError, match=message):
            answers_with_package(read_checkpoint(str(tmp_path / name)))
    sides = {
        f"{side}_{name}": 4 for side in ("encoder", "decoder") for name in ("layers", "attention_heads", "ffn_dim")
    }
    ids = dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id", "decoder_start_token_id"), 0)
    sound = WhisperConfig(**sides, **ids, d_model=32, vocab_size=300)
    save_composed(tmp_path / "sound", WhisperForConditionalGeneration, sound)
    with pytest.raises(UserError, match=r"reads input_features, and only models that read input_ids or pixel_values"):
        read_checkpoint(str(tmp_path / "sound"))
