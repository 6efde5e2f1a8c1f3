"""Composed heads in models of Transformers that call its attention interface: truth is our own families."""

import copy
import pickle
import re
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from accelerate import cpu_offload
from cases import seq2seq
from cases.checkpoints import convert_well
from cases.encoder_parents import make_encoder_parent
from cases.models import assert_same_gradients
from cases.versions import is_before, needs_transformers
from cases.vision_models import strengthen
from cases.vision_parents import make_parent as make_vision_parent
from peft import AutoPeftModel, IA3Config, LoraConfig, OFTConfig, get_peft_model
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForImageClassification,
    AutoModelForMaskedLM,
    AutoModelForSequenceClassification,
    BertConfig,
    BertLMHeadModel,
    CLIPConfig,
    CLIPModel,
    ContinuousBatchingConfig,
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    DeiTConfig,
    DeiTForImageClassificationWithTeacher,
    DiffLlamaConfig,
    DiffLlamaForCausalLM,
    DynamicCache,
    EncoderDecoderConfig,
    EncoderDecoderModel,
    FalconH1Config,
    FalconH1ForCausalLM,
    Florence2VisionBackbone,
    Florence2VisionConfig,
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    Gemma4ForCausalLM,
    Gemma4TextConfig,
    GenerationConfig,
    GPT2Config,
    GPT2LMHeadModel,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    GptOssConfig,
    GptOssForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    MixtralConfig,
    MixtralForCausalLM,
    MllamaConfig,
    MllamaForCausalLM,
    MllamaForConditionalGeneration,
    MllamaTextConfig,
    OwlViTConfig,
    OwlViTModel,
    Pix2StructConfig,
    Pix2StructForConditionalGeneration,
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForCausalLM,
    SplinterConfig,
    SplinterModel,
    T5Config,
    T5ForConditionalGeneration,
    Trainer,
    TrainingArguments,
    ViTForImageClassification,
    ViTImageProcessor,
    WhisperConfig,
    WhisperForConditionalGeneration,
)
from transformers.cache_utils import DynamicLayer
from transformers.loss.loss_utils import LOSS_MAPPING
from transformers.models.llama.modeling_llama import LlamaAttention

from dynattn import DCFormerConfig, DCFormerForCausalLM, compose_heads_of, with_composed_heads
from dynattn.modeling.layers.head_composition import DynamicComposition
from dynattn.modeling.other_models import composed_classes, interface_function
from dynattn.modeling.other_models.composed_classes import composed_name
from dynattn.modeling.other_models.interface_modules import projections_of
from dynattn.modeling.other_models.side_generators import SideGenerators
from dynattn.remote_code import plain_classes

SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
DECODER = {**SIZES, "vocab_size": 97, "max_position_embeddings": 64, "initializer_range": 0.2, "pad_token_id": 0}
WINDOWS = {"sliding_window": 6, "layer_types": ["sliding_attention", "full_attention"]}
IDS = torch.randint(3, 97, (2, 11), generator=torch.Generator().manual_seed(0))
MASK = (torch.arange(11) >= torch.tensor([[0], [4]])).long()
GREEDY = {"max_new_tokens": 8, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}


def llama(**fields: Any) -> PreTrainedModel:
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**{**DECODER, "num_key_value_heads": 2, **fields})).eval().double()


def real(logits: Tensor) -> Tensor:
    """The rows of `[B, T, V]` that are not of padding."""
    return logits[MASK.bool()]


def copy_composition(source: nn.Module, target: nn.Module) -> None:
    """Gives our model the composition of another one, attention by attention in the order of both models."""
    given = [module for module in source.modules() if isinstance(module, SideGenerators)]
    taken = [module for module in target.modules() if getattr(module, "composition", None) is not None]
    assert len(given) == len(taken) > 0
    for theirs, ours in zip(given, taken, strict=True):
        for name in ("composition", "key_composition"):
            if (generator := getattr(theirs, name)) is not None:
                getattr(ours, name).load_state_dict(generator.state_dict())


@pytest.mark.parametrize("masking", ["sdpa", "eager", "chunked"])
@pytest.mark.parametrize(
    "shape",
    [{}, WINDOWS, {"num_attention_heads": 6, "num_key_value_heads": 3}],
    ids=["full", "windows", "wide"],
)
@torch.no_grad()
def test_a_decoder_is_our_decoder(shape: dict[str, Any], masking: str) -> None:
    """Also from growing, sliding and static caches, with beams, and with heads that do not divide the hidden size."""
    fields = {**DECODER, "num_key_value_heads": 2, "head_dim": 8, **shape}
    theirs = {"use_sliding_window": "sliding_window" in shape}
    model = Qwen3ForCausalLM(Qwen3Config(**fields, **theirs, attn_implementation=masking)).eval().double()
    compose_heads_of(model, compose_static=True)
    strengthen(model)
    config = DCFormerConfig(**fields, compose_static=True, tie_word_embeddings=False, use_qk_norm=True)
    ours = DCFormerForCausalLM(config).eval().double()
    ours.load_state_dict(model.state_dict())
    for mask in (None, MASK):
        found, expected = (real(net(IDS, attention_mask=mask).logits) for net in (model, ours))
        torch.testing.assert_close(found, expected, atol=1e-4, rtol=0)
    for options in ({}, {"cache_implementation": "static"}, {"num_beams": 3}):
        for ids, mask in ((IDS, MASK), (IDS[:1], torch.ones_like(IDS[:1]))):
            texts = [net.generate(ids, attention_mask=mask, **GREEDY, **options) for net in (model, ours)]
            assert torch.equal(*texts)


@torch.no_grad()
def test_an_encoder_decoder_is_ours() -> None:
    """Cross-attention has a generator for each side, and its keys are in the cache."""
    parent, ours = seq2seq.make_pair("bart", "eager", **seq2seq.IDENTITY)
    compose_heads_of(parent)
    strengthen(parent)
    copy_composition(parent, ours)
    source, target = seq2seq.random_tokens(2, 9), seq2seq.random_tokens(2, 7)
    mask = (torch.arange(9) < torch.tensor([[9], [6]])).long()
    expected = seq2seq.whole(ours, source, target, mask)
    torch.testing.assert_close(seq2seq.whole(parent, source, target, mask), expected, atol=1e-4, rtol=0)
    for options in ({}, {"num_beams": 3}, {"cache_implementation": "static"}):
        texts = [net.generate(source, attention_mask=mask, max_new_tokens=8, **options) for net in (parent, ours)]
        assert torch.equal(*texts)


def neox() -> PreTrainedModel:
    return GPTNeoXForCausalLM(GPTNeoXConfig(**DECODER, bos_token_id=1, eos_token_id=2))


PIXELS = torch.randn(2, 3, 24, 24, generator=torch.Generator().manual_seed(0))
# For each the kind of its conversion, what makes it, the class that loads ours, and an input.
JOINT: dict[str, tuple[str, Any, Any, dict[str, Tensor]]] = {
    "gpt_neox": ("pythia", neox, AutoModelForCausalLM, {"input_ids": IDS}),
    "modernbert": ("modernbert", lambda: make_encoder_parent("modernbert"), AutoModelForMaskedLM, {"input_ids": IDS}),
    "vit": ("vit", lambda: make_vision_parent("vit"), AutoModelForImageClassification, {"pixel_values": PIXELS}),
}


@pytest.mark.parametrize("name", JOINT)
@torch.no_grad()
def test_encoders_and_joint_projections_are_our_families(name: str, tmp_path: Path) -> None:
    kind, make, auto_class, given = JOINT[name]
    torch.manual_seed(0)
    parent = make().eval()
    parent.save_pretrained(tmp_path / "parent")
    if kind == "vit":
        ViTImageProcessor(size={"height": 24, "width": 24}).save_pretrained(tmp_path / "parent")
    convert_well(kind, tmp_path / "parent", tmp_path / "ours", "--no-verify")
    ours = auto_class.from_pretrained(tmp_path / "ours").eval()
    compose_heads_of(parent, compose_act=ours.config.compose_act)
    strengthen(parent)
    copy_composition(parent, ours)
    inputs = {name: value.double() if value.is_floating_point() else value for name, value in given.items()}
    torch.testing.assert_close(parent.double()(**inputs)[0], ours.double()(**inputs)[0], atol=1e-6, rtol=0)


MLA = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 12}
EXPERTS = {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1, "moe_intermediate_size": 16}
SMALL_EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
MAMBA = {"mamba_d_ssm": 32, "mamba_n_heads": 4, "mamba_d_state": 8, "mamba_d_head": 8}
SOURCES = {"input_ids": IDS, "attention_mask": MASK}
FEATURES = {"input_features": torch.randn(2, 8, 24, generator=torch.Generator().manual_seed(0))}
T5_SIZES = {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4, "dropout_rate": 0.0}
WHISPER: dict[str, Any] = dict.fromkeys(("encoder_layers", "decoder_layers"), 2)
WHISPER |= {"encoder_attention_heads": 4, "decoder_attention_heads": 2}  # the configuration names the first
WHISPER |= {"d_model": 32, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "num_mel_bins": 8, "max_source_positions": 12}
WHISPER |= {"max_target_positions": 40, "vocab_size": 97, "decoder_start_token_id": 1, "pad_token_id": 0}
WHISPER |= {"bos_token_id": 1, "eos_token_id": 2, "suppress_tokens": [], "begin_suppress_tokens": []}
T5_TOKENS = {"vocab_size": 97, "decoder_start_token_id": 0, "pad_token_id": 0, "eos_token_id": 2}
GEMMA = {**DECODER, "head_dim": 8, "num_key_value_heads": 2}
GPT2 = {"n_embd": 32, "n_head": 4, "n_layer": 2, "vocab_size": 97, "attn_pdrop": 0.0}
BERT = {**DECODER, "is_decoder": True, "attention_probs_dropout_prob": 0.0}
PATCHES: dict[str, Any] = {"flattened_patches": torch.randn(2, 6, 34, generator=torch.Generator().manual_seed(0))}
PATCHES["flattened_patches"][..., :2] = torch.arange(12).view(6, 2) % 4  # the row and column of each
PATCHES["use_cache"] = True  # not its default


def make_pix2struct_config() -> Pix2StructConfig:
    sizes = {"hidden_size": 32, "d_kv": 8, "d_ff": 48}
    text = {**sizes, "num_layers": 2, "num_heads": 4, "dropout_rate": 0.0, **T5_TOKENS}
    patches = {"patch_embed_hidden_size": 32, "seq_len": 16, "attention_dropout": 0.0}
    vision = {**sizes, **patches, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = Pix2StructConfig(text_config=text, vision_config=vision)
    for part in (config, config.text_config, config.vision_config):
        part.initializer_range = 0.2
    return config


# Models that differ in what they project, cache, mask and pass to attention functions.
OTHERS: dict[str, tuple[Any, Any, dict[str, Tensor]]] = {
    "bert": (BertLMHeadModel, lambda: BertConfig(**BERT), SOURCES),
    "gpt2": (GPT2LMHeadModel, lambda: GPT2Config(**GPT2), SOURCES),
    "mixtral": (MixtralForCausalLM, lambda: MixtralConfig(**GEMMA, num_local_experts=2), SOURCES),
    "gpt_oss": (GptOssForCausalLM, lambda: GptOssConfig(**GEMMA, **WINDOWS, **SMALL_EXPERTS), SOURCES),
    "gemma3": (Gemma3ForCausalLM, lambda: Gemma3TextConfig(**GEMMA, **WINDOWS), SOURCES),
    "deepseek_v3": (DeepseekV3ForCausalLM, lambda: DeepseekV3Config(**DECODER, **MLA, **EXPERTS), SOURCES),
    "falcon_h1": (FalconH1ForCausalLM, lambda: FalconH1Config(**GEMMA, **MAMBA), SOURCES),
    "t5": (T5ForConditionalGeneration, lambda: T5Config(**T5_SIZES, **T5_TOKENS), SOURCES),
    "whisper": (WhisperForConditionalGeneration, lambda: WhisperConfig(**WHISPER), FEATURES),
    "pix2struct": (Pix2StructForConditionalGeneration, make_pix2struct_config, PATCHES),
}


@pytest.mark.parametrize("name", OTHERS)
@torch.no_grad()
def test_other_models_start_as_they_were_and_a_cache_changes_nothing(name: str) -> None:
    model_class, make_config, given = OTHERS[name]
    torch.manual_seed(0)
    model = model_class(make_config()).eval()

    def ask(**options: Any) -> Tensor:
        """The logits `[N, B, V]` of generated tokens."""
        options = {**GREEDY, "output_logits": True, "return_dict_in_generate": True, **options}
        return torch.stack(model.generate(**{**given, **options}).logits)

    before = ask()
    names = compose_heads_of(model)
    torch.testing.assert_close(ask(), before, atol=1e-4, rtol=1e-4)
    strengthen(model)
    composed = ask()
    assert len(names) == (6 if name in ("t5", "whisper", "pix2struct") else 2)
    assert float((composed - before).abs().max()) > 1e-2 * float(before.abs().max())
    for options in ({"use_cache": False}, {"cache_implementation": "static"}):
        torch.testing.assert_close(ask(**options), composed, atol=1e-4, rtol=1e-4)
    beams = {"num_beams": 3, "output_logits": False, "return_dict_in_generate": False}
    assert torch.equal(
        *(model.generate(**{**given, **GREEDY, **beams, "use_cache": cached}) for cached in (True, False))
    )


def test_values_may_be_of_another_width_than_queries() -> None:
    if "mimo_v2_flash" not in transformers.CONFIG_MAPPING:
        pytest.skip("this version of Transformers has no MiMo-V2-Flash")
    sizes = {**GEMMA, "head_dim": 12, "v_head_dim": 8, "moe_intermediate_size": 16}
    config = transformers.AutoConfig.for_model("mimo_v2_flash", **sizes)
    model = AutoModelForCausalLM.from_config(config).eval()
    before = model(IDS).logits
    compose_heads_of(model)
    assert model.get_submodule("model.layers.0.self_attn.composition").num_heads == 4
    torch.testing.assert_close(model(IDS).logits, before)


class HalvedAttention(LlamaAttention):
    """Attention that calls the interface by the class that it extends."""

    def forward(self, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
        output, maps = super().forward(*args, **kwargs)
        return output / 2, maps


def test_an_attention_that_extends_one_of_transformers_is_composed() -> None:
    model = llama()
    model.model.layers[1].self_attn.__class__ = HalvedAttention
    before = attend(model).logits
    assert compose_heads_of(model) == ["model.layers.0.self_attn", "model.layers.1.self_attn"]
    torch.testing.assert_close(attend(model).logits, before)
    strengthen(model.model.layers[1])
    assert not torch.allclose(attend(model).logits, before, atol=1e-2)
    with pytest.raises(ValueError, match="has composed heads already"):
        compose_heads_of(model)


def test_a_learned_position_bias_gets_its_gradient() -> None:
    torch.manual_seed(0)
    model = T5ForConditionalGeneration(T5Config(**T5_SIZES, **T5_TOKENS)).double()
    composed = copy.deepcopy(model)
    compose_heads_of(composed)
    for net in (model, composed):
        net(input_ids=IDS, attention_mask=MASK, labels=IDS.flip(1)).loss.backward()
    theirs = {name: p.grad for name, p in model.named_parameters() if "relative_attention_bias" in name}
    assert len(theirs) == 2 and all(grad.abs().max() > 0 for grad in theirs.values())
    for name, grad in theirs.items():
        torch.testing.assert_close(composed.get_parameter(name).grad, grad, atol=1e-10, rtol=1e-6)


@torch.no_grad()
def test_a_position_bias_over_a_static_cache_that_is_longer_than_the_prompt() -> None:
    torch.manual_seed(0)
    model = T5ForConditionalGeneration(T5Config(**T5_SIZES, **T5_TOKENS)).eval()
    prompt = torch.cat([torch.zeros(2, 1, dtype=torch.long), IDS[:, :4]], dim=1)
    options = {**GREEDY, "decoder_input_ids": prompt, "output_logits": True, "return_dict_in_generate": True}
    expected = torch.stack(model.generate(IDS, **options).logits)
    compose_heads_of(model)
    for cache in ({}, {"cache_implementation": "static"}):
        found = torch.stack(model.generate(IDS, **options, **cache).logits)
        torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)


def mllama() -> PreTrainedModel:
    """A decoder whose second layer attends to a picture."""
    torch.manual_seed(0)
    fields = {**DECODER, "num_key_value_heads": 2, "cross_attention_layers": [1]}
    model = MllamaForCausalLM(MllamaTextConfig(**fields)).eval()
    torch.nn.init.ones_(model.model.layers[1].cross_attn_attn_gate)
    return model


@torch.no_grad()
def test_attention_that_is_causal_over_fewer_keys_stays_so() -> None:
    """Without a mask, SDPA takes the cross-attention of Mllama, which does not say whether it is causal, for causal."""
    model = mllama()
    given = {"input_ids": IDS, "cross_attention_states": torch.randn(2, 6, 32), "use_cache": False}
    expected = model(**given).logits
    assert compose_heads_of(model) == ["model.layers.0.self_attn", "model.layers.1.cross_attn"]
    torch.testing.assert_close(model(**given).logits, expected, atol=1e-5, rtol=0)


@torch.no_grad()
def test_the_tiles_of_a_picture_are_keys_of_one_row() -> None:
    """Mllama projects each tile as a row of its own, and attends to all tiles of a picture at once."""
    model = mllama()
    compose_heads_of(model)
    strengthen(model)
    picture = torch.randn(2, 6, 32)
    given = {"input_ids": IDS, "use_cache": False}
    tiled = model(**given, cross_attention_states=picture.reshape(4, 3, 32)).logits
    torch.testing.assert_close(tiled, model(**given, cross_attention_states=picture).logits)


def test_models_without_sdpa_stay_bidirectional() -> None:
    """A Splinter does not say that it is, and makes no mask where nothing is hidden."""
    sizes = {**SIZES, "vocab_size": 97, "question_token_id": 5, "initializer_range": 0.2}
    model = SplinterModel(SplinterConfig(**sizes, attention_probs_dropout_prob=0.0)).eval()
    expected = model(IDS)[0]
    compose_heads_of(model)
    torch.testing.assert_close(model(IDS)[0], expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("way", ["compiled", "recomputed"])
def test_training_in_other_ways_gives_the_same_gradients(way: str) -> None:
    model = llama()
    compose_heads_of(model, compose_static=True)
    strengthen(model)
    again = copy.deepcopy(model).train()
    if way == "recomputed":
        again.gradient_checkpointing_enable()
    net = torch.compile(again, backend="eager", fullgraph=True) if way == "compiled" else again
    for each in (model, net):
        each(IDS, attention_mask=MASK, labels=IDS, use_cache=False).loss.backward()
    assert_same_gradients([p.grad for p in again.parameters()], [p.grad for p in model.parameters()])


def test_a_class_with_composed_heads_loads_plain_and_composed_checkpoints(tmp_path: Path) -> None:
    model = llama()
    model.save_pretrained(tmp_path / "plain")
    composed_class = with_composed_heads(LlamaForCausalLM, compose_static=True)
    upcycled = composed_class.from_pretrained(tmp_path / "plain", dtype=torch.float64).eval()
    assert type(upcycled).__name__ == "ComposedLlamaForCausalLM" and isinstance(upcycled, LlamaForCausalLM)
    assert upcycled.config.composed_heads == {"compose_static": True}
    torch.testing.assert_close(upcycled(IDS).logits, model(IDS).logits)
    drawn = {name: p for name, p in upcycled.named_parameters() if "composition." in name}
    assert len(drawn) == 2 * 4
    assert all(
        bool(p.isfinite().all()) and (p.abs().max() > 0) == ("hidden" in name or "factor" in name)
        for name, p in drawn.items()
    )
    strengthen(upcycled)
    upcycled.save_pretrained(tmp_path / "composed")
    for loading in (composed_class, with_composed_heads(LlamaForCausalLM)):  # the latter reads the options
        loaded = loading.from_pretrained(tmp_path / "composed", dtype=torch.float64).eval()
        torch.testing.assert_close(loaded(IDS).logits, upcycled(IDS).logits)


@torch.no_grad()
def test_a_model_of_a_class_that_was_made_here_can_be_pickled_and_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    model: Any = with_composed_heads(LlamaForCausalLM, compose_rank=1)(LlamaConfig(**DECODER)).eval()
    strengthen(model)
    expected, pickled = model(IDS).logits, pickle.dumps([model, model.model, copy.copy(model)])
    for again in (copy.deepcopy(model), *pickle.loads(pickled)[::2]):
        assert type(again) is type(model) and torch.equal(again(IDS).logits, expected)
    monkeypatch.setattr(composed_classes, "MADE", {})  # as in a process that did not make the class
    one, other = (pickle.loads(pickled)[0] for _ in range(2))
    assert type(one) is type(other) is not type(model) and type(one).__name__ == "ComposedLlamaForCausalLM"
    assert torch.equal(one(IDS).logits, expected)
    assert type(one)(LlamaConfig(**DECODER)).config.composed_heads == {"compose_rank": 1}


def test_a_subclass_of_a_class_that_was_made_here_is_pickled_by_its_name() -> None:
    model = NamedLlama(LlamaConfig(**DECODER))
    assert type(pickle.loads(pickle.dumps(model))) is NamedLlama


def test_a_composition_that_another_program_dropped_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Programs that merge or train models load them by Auto classes, and save the configuration as it was."""
    told: list[str] = []
    monkeypatch.setattr(composed_classes.logger, "warning", told.append)
    composed_class = with_composed_heads(LlamaForCausalLM)
    llama().save_pretrained(tmp_path / "plain")
    model = composed_class.from_pretrained(tmp_path / "plain")
    model.save_pretrained(tmp_path / "composed")
    composed_class.from_pretrained(tmp_path / "composed")
    composed_class(model.config)
    assert not told
    llama().save_pretrained(tmp_path / "dropped")
    model.config.save_pretrained(tmp_path / "dropped")
    composed_class.from_pretrained(tmp_path / "dropped")
    assert len(told) == 1 and f"{tmp_path / 'dropped'} has composed_heads, but its files lack all weights" in told[0]


def test_options_that_only_the_one_who_composed_a_model_in_place_knows_are_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another activation fits the same weights, and the plain class does not write it into the configuration."""
    told: list[str] = []
    monkeypatch.setattr(composed_classes.logger, "warning", told.append)
    model = llama()
    compose_heads_of(model, compose_act="relu")
    strengthen(model)
    model.save_pretrained(tmp_path)
    given = with_composed_heads(LlamaForCausalLM, compose_act="relu").from_pretrained(tmp_path)
    with_composed_heads(LlamaForCausalLM)(LlamaConfig(**DECODER))
    assert not told
    torch.testing.assert_close(given(IDS).logits, model(IDS).logits)
    with_composed_heads(LlamaForCausalLM, implementation="eager").from_pretrained(tmp_path)
    assert len(told) == 1 and f"The files of {tmp_path} have weights of a composition, but" in told[0]


def test_what_a_model_computes_when_it_is_loaded_is_computed_for_composed_heads_too(tmp_path: Path) -> None:
    """The scales of a FalconH1 are in no checkpoint, and a module without weights of its own fills them in."""
    model = with_composed_heads(FalconH1ForCausalLM)(FalconH1Config(**DECODER, **MAMBA, num_key_value_heads=2))
    model.save_pretrained(tmp_path)
    loaded = dict(type(model).from_pretrained(tmp_path).named_buffers())
    assert "model.layers.0.mamba.mup_vector" in loaded
    for name, buffer in model.named_buffers():
        assert torch.equal(loaded[name], buffer), name


@pytest.mark.parametrize("kept", [True, False, [], "compose_rank"])
def test_a_configuration_without_options_is_refused(kept: Any) -> None:
    message = re.escape(f"composed_heads ({kept}) must be options of compose_heads_of, or {{}} for its")
    with pytest.raises(ValueError, match=message):
        with_composed_heads(LlamaForCausalLM)(LlamaConfig(**DECODER, composed_heads=kept))


COMPOSED_LLAMA: Any = with_composed_heads(LlamaForCausalLM)


class NamedLlama(COMPOSED_LLAMA):
    """A class with composed heads that `pickle` finds in this module."""


class CustomNeoX(GPTNeoXForCausalLM):
    """Code of others with a name that Transformers knows."""


CustomNeoX.__name__ = GPTNeoXForCausalLM.__name__


@pytest.mark.parametrize("plain_class", [GPTNeoXForCausalLM, CustomNeoX], ids=["transformers", "custom"])
def test_weights_that_checkpoints_name_otherwise_are_loaded_into_composed_models(
    plain_class: type[PreTrainedModel], tmp_path: Path
) -> None:
    """Transformers finds some names by that of its class: files of its GPT-NeoX call the head `embed_out`."""
    torch.manual_seed(0)
    plain = plain_class(GPTNeoXConfig(**DECODER, rotary_pct=1.0)).eval()
    plain.save_pretrained(tmp_path / "plain")
    with_composed_heads(plain_class, compose_rank=1)  # has the same name
    composed_class = with_composed_heads(plain_class)
    composed = composed_class.from_pretrained(tmp_path / "plain").eval()
    torch.testing.assert_close(composed(IDS).logits, plain(IDS).logits)
    composed.save_pretrained(tmp_path / "composed")
    names = [load_file(tmp_path / kind / "model.safetensors").keys() for kind in ("plain", "composed")]
    assert names[0] < names[1]
    earlier = {name.replace("embed_out", "lm_head"): weight for name, weight in composed.state_dict().items()}
    save_file(earlier, tmp_path / "composed" / "model.safetensors", metadata={"format": "pt"})
    loaded = composed_class.from_pretrained(tmp_path / "composed").eval()
    torch.testing.assert_close(loaded(IDS).logits, plain(IDS).logits, msg="saved by an earlier version")


@pytest.mark.parametrize("adapted", [False, True], ids=["model", "adapter"])
def test_label_smoothing_of_the_trainer_predicts_the_next_token(adapted: bool, tmp_path: Path) -> None:
    model: Any = with_composed_heads(LlamaForCausalLM)(LlamaConfig(**DECODER)).eval()
    trained = get_peft_model(model, LoraConfig(target_modules=["q_proj"])).eval() if adapted else model
    arguments = TrainingArguments(str(tmp_path), label_smoothing_factor=0.1, report_to=[], use_cpu=True)
    loss = Trainer(model=trained, args=arguments).compute_loss(trained, {"input_ids": IDS, "labels": IDS})
    logits = model(IDS).logits[:, :-1].flatten(0, 1)
    torch.testing.assert_close(loss, F.cross_entropy(logits, IDS[:, 1:].flatten(), label_smoothing=0.1))


def test_composed_models_have_the_losses_of_plain_ones() -> None:
    """Transformers finds the loss by the name of the class, too, or else by the first known name inside it."""

    def loss_of(name: str) -> list[str]:
        return [name] if name in LOSS_MAPPING else re.findall("|".join(LOSS_MAPPING), name)[:1]

    names = [name for name in dir(transformers) if "For" in name]
    assert len(names) > 500
    assert [loss_of(composed_name(name)) for name in names] == [loss_of(name) for name in names]


def test_options_that_a_checkpoint_was_saved_with_stay(tmp_path: Path) -> None:
    """Other ones may come to them: new weights that start as the identity, and what is no matter of the weights."""
    names = ["model.layers.1.self_attn"]
    model = with_composed_heads(LlamaForCausalLM, compose_act="silu", names=iter(names))(LlamaConfig(**DECODER)).eval()
    strengthen(model)
    model.save_pretrained(tmp_path)
    assert model.config.composed_heads == {"compose_act": "silu", "names": names}
    for options in ({}, {"implementation": "eager"}, {"compose_static": True}, {"names": tuple(names)}):
        loaded = with_composed_heads(LlamaForCausalLM, **options).from_pretrained(tmp_path).eval()
        torch.testing.assert_close(loaded(IDS).logits, model(IDS).logits)
    for options in ({"compose_act": "gelu"}, {"compose_norm_eps": 0.1}, {"names": ["model.layers.0.self_attn"]}):
        message = rf"options {re.escape(str(options))} differ from composed_heads \({{'compose_act': 'silu', 'names'"
        with pytest.raises(ValueError, match=message):
            with_composed_heads(LlamaForCausalLM, **options).from_pretrained(tmp_path)


def test_auto_classes_and_the_plain_class_load_the_heads_that_a_configuration_says_are_composed(tmp_path: Path) -> None:
    model = with_composed_heads(LlamaForCausalLM, compose_rank=1)(LlamaConfig(**DECODER)).eval()
    strengthen(model)
    model.save_pretrained(tmp_path)
    for loading in (LlamaForCausalLM, AutoModelForCausalLM):
        loaded = loading.from_pretrained(tmp_path).eval()
        torch.testing.assert_close(loaded(IDS).logits, model(IDS).logits)
    inner = AutoModel.from_pretrained(tmp_path).eval()
    torch.testing.assert_close(inner(IDS).last_hidden_state, model.model(IDS).last_hidden_state)
    assert (
        type(AutoModelForCausalLM.from_config(loaded.config)) is type(LlamaForCausalLM(loaded.config)) is type(loaded)
    )
    assert pickle.loads(pickle.dumps(loaded)).config.composed_heads == {"compose_rank": 1}
    loaded.config.composed_heads = None
    assert type(LlamaForCausalLM(loaded.config)) is LlamaForCausalLM
    assert type(AutoModelForCausalLM.from_config(LlamaConfig(**DECODER))) is LlamaForCausalLM


def test_a_class_whose_model_is_made_by_an_auto_class_has_composed_heads(tmp_path: Path) -> None:
    """The classifier of a Llama makes its model so, from the same configuration."""
    plain = LlamaForSequenceClassification(LlamaConfig(**DECODER)).eval()
    plain.save_pretrained(tmp_path)
    config = LlamaConfig(**DECODER, composed_heads={"compose_rank": 1})
    for model_class in (AutoModelForSequenceClassification, LlamaForSequenceClassification):
        model = model_class.from_pretrained(tmp_path, config=config).eval()
        generators = [one for one in model.modules() if isinstance(one, DynamicComposition)]
        assert len(generators) == config.num_hidden_layers
        assert all(0 < one.factor_weight[..., :1, :].std() < 1 and not one.gate_weight.any() for one in generators)
        torch.testing.assert_close(model(IDS).logits, plain(IDS).logits)


def test_an_auto_class_that_makes_the_model_of_texts_alone_composes_its_heads(tmp_path: Path) -> None:
    text = {**DECODER, "num_key_value_heads": 2, "cross_attention_layers": [1], "bos_token_id": 1, "eos_token_id": 2}
    text["rope_parameters"] = {"rope_type": "default", "rope_theta": 1e4}
    pictures = {"hidden_size": 16, "attention_heads": 2, "intermediate_size": 16, "vision_output_dim": 32}
    pictures |= {"num_hidden_layers": 1, "num_global_layers": 1, "intermediate_layers_indices": [0]}
    config = MllamaConfig(text_config=text, vision_config={**pictures, "image_size": 16, "patch_size": 8})
    model = with_composed_heads(MllamaForConditionalGeneration, compose_act="relu")(config).eval()
    strengthen(model)
    model.save_pretrained(tmp_path / "whole")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "whole").eval()
    torch.testing.assert_close(loaded(IDS).logits, model(IDS).logits)
    loaded.save_pretrained(tmp_path / "text")
    again = with_composed_heads(MllamaForCausalLM).from_pretrained(tmp_path / "text").eval()
    torch.testing.assert_close(again(IDS).logits, model(IDS).logits)
    config.text_config.composed_heads = {"compose_rank": 1}
    part = AutoModelForCausalLM.from_config(config)
    assert part.config.composed_heads == {"compose_rank": 1}


def test_peft_finds_the_class_of_an_adapter_without_a_task(tmp_path: Path) -> None:
    model = with_composed_heads(LlamaForCausalLM)(LlamaConfig(**DECODER))
    strengthen(model)
    model.save_pretrained(tmp_path / "base")
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    adapted = get_peft_model(base, LoraConfig(target_modules=["v_proj"], init_lora_weights=False)).eval()
    adapted.save_pretrained(str(tmp_path / "adapter"))
    loaded = AutoPeftModel.from_pretrained(str(tmp_path / "adapter"), import_allowlist=["dynattn"]).eval()
    torch.testing.assert_close(loaded(IDS).logits, adapted(IDS).logits)
    with pytest.raises(AttributeError, match="no attribute 'ComposedUnknown'"):
        _ = composed_classes.ComposedUnknown


def test_pipelines_support_the_class_for_what_they_support_its_plain_class(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where a table has several classes for a configuration."""
    told: list[str] = []
    monkeypatch.setattr(transformers.pipelines.base.logger, "error", told.append)
    sizes = {**SIZES, "image_size": 8, "patch_size": 4}
    for model_class in (ViTForImageClassification, DeiTForImageClassificationWithTeacher):
        model = with_composed_heads(model_class)(model_class.config_class(**sizes))
        transformers.pipeline("image-classification", model=model, image_processor=ViTImageProcessor())
    assert not told


@pytest.fixture
def marked_memory() -> Iterator[None]:
    """New memory holds NaN, so that weights that nothing draws are seen."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def test_parts_made_by_auto_classes_start_as_the_identity_and_keep_what_they_learned(
    marked_memory: None, tmp_path: Path
) -> None:
    """The decoder's attention is in a BERT within its part, which knows no weights of composition."""
    sizes = {**SIZES, "vocab_size": 97, "attention_probs_dropout_prob": 0.0}
    configs = [BertConfig(**sizes), BertConfig(**sizes, is_decoder=True, add_cross_attention=True)]
    plain = EncoderDecoderModel(EncoderDecoderConfig.from_encoder_decoder_configs(*configs)).eval()
    plain.save_pretrained(tmp_path)
    for config in configs:
        config.composed_heads = {}
    config = EncoderDecoderConfig.from_encoder_decoder_configs(*configs)
    model = EncoderDecoderModel.from_pretrained(tmp_path, config=config).eval()
    assert len([one for one in model.modules() if isinstance(one, DynamicComposition)]) == 8
    torch.testing.assert_close(model(IDS, decoder_input_ids=IDS).logits, plain(IDS, decoder_input_ids=IDS).logits)
    encoder = AutoModel.from_config(configs[0])
    strengthen(encoder)
    learned = copy.deepcopy(encoder.state_dict())
    EncoderDecoderModel(encoder=encoder, decoder=model.decoder)
    for name, weight in encoder.state_dict().items():
        torch.testing.assert_close(weight, learned[name], msg=name, atol=0, rtol=0)


def test_a_part_whose_class_its_model_names_is_composed_as_one_that_an_auto_class_finds(tmp_path: Path) -> None:
    parts: dict[str, Any] = {"text_config": {**SIZES, "vocab_size": 97}, "vision_config": {**SIZES, "image_size": 32}}
    given = {"input_ids": IDS, "pixel_values": torch.randn(2, 3, 32, 32)}
    plain = CLIPModel(CLIPConfig(**parts)).eval()
    plain.save_pretrained(tmp_path / "plain")
    parts["text_config"]["composed_heads"] = {"compose_rank": 1}
    model = CLIPModel.from_pretrained(tmp_path / "plain", config=CLIPConfig(**parts)).eval()
    torch.testing.assert_close(model(**given).text_embeds, plain(**given).text_embeds)
    strengthen(model)
    assert {type(part).__name__ for part in (model.text_model, model.vision_model)} == {
        "ComposedCLIPTextModel",
        "CLIPVisionModel",
    }
    model.save_pretrained(tmp_path / "composed")
    for loaded in (CLIPModel.from_pretrained(tmp_path / "composed"), AutoModel.from_pretrained(tmp_path / "composed")):
        torch.testing.assert_close(loaded(**given).text_embeds, model(**given).text_embeds)


def test_a_part_that_its_model_makes_by_a_call_of_the_class_is_composed(tmp_path: Path) -> None:
    text = {"hidden_size": 32, "num_attention_heads": 4, "num_hidden_layers": 1, "intermediate_size": 48}
    text |= {"vocab_size": 97, "eos_token_id": 96, "composed_heads": {"compose_rank": 1}}
    sizes = {**SIZES, "image_size": 8, "patch_size": 4}
    given = {"input_ids": IDS, "pixel_values": torch.randn(2, 3, 8, 8)}
    model = OwlViTModel(OwlViTConfig(text_config=text, vision_config=sizes)).eval()
    strengthen(model)
    assert any("composition." in name for name in model.text_model.state_dict())
    model.save_pretrained(tmp_path)
    loaded = OwlViTModel.from_pretrained(tmp_path).eval()
    torch.testing.assert_close(loaded(**given).text_embeds, model(**given).text_embeds)


def test_other_bases_of_a_model_class_get_its_arguments() -> None:
    """Such as `PyTorchModelHubMixin`, which keeps them for the file that it writes."""

    class Keeping:
        def __new__(cls, *args: Any, **kwargs: Any) -> Any:
            made = super().__new__(cls)
            made.given = (args, kwargs)
            return made

    class KeepingLlama(LlamaForCausalLM, Keeping):
        given: Any

    config = LlamaConfig(**DECODER)
    assert KeepingLlama(config).given == ((config,), {})
    config.composed_heads = {}
    made = KeepingLlama(config=config)
    assert made.given == ((), {"config": config}) and type(made).__name__ == "ComposedKeepingLlama"


def test_a_part_reads_the_configuration_that_the_whole_has_of_it() -> None:
    """Transformers and users change the latter later on."""
    parts: dict[str, Any] = {"text_config": {**SIZES, "composed_heads": {}}, "vision_config": SIZES}
    model = CLIPModel(CLIPConfig(**parts))
    assert model.text_model.config is model.config.text_config
    assert model.config.text_config.composed_heads == {}
    model.set_attn_implementation({"text_config": "eager"})
    attention = next(part for part in model.text_model.modules() if isinstance(part, SideGenerators))
    assert attention.implementation == "eager"


def test_an_auto_class_has_several_composing_classes_or_none_for_a_configuration() -> None:
    config = DeiTConfig(
        hidden_size=16, num_hidden_layers=1, num_attention_heads=2, image_size=8, patch_size=4, composed_heads={}
    )
    model = AutoModelForImageClassification.from_config(config)
    assert type(model).__name__ == "ComposedDeiTForImageClassification"
    config.architectures = ["ComposedDeiTForImageClassificationWithTeacher"]
    assert type(AutoModelForImageClassification.from_config(config)).__name__ == config.architectures[0]
    with pytest.raises(ValueError, match="Unrecognized configuration class"):
        AutoModelForCausalLM.from_config(config)


@pytest.fixture
def registered() -> Iterator[type]:
    """The class that `AutoModelForCausalLM` returns for a Llama's configuration, with composed heads."""
    composed = with_composed_heads(LlamaForCausalLM)
    AutoModelForCausalLM.register(LlamaConfig, composed, exist_ok=True)
    yield composed
    del AutoModelForCausalLM._model_mapping._extra_content[LlamaConfig]


@needs_transformers("5.19")
def test_an_auto_class_loads_composed_heads_where_their_class_is_registered(registered: type, tmp_path: Path) -> None:
    model = registered(LlamaConfig(**DECODER)).eval()
    strengthen(model)
    plain = LlamaForCausalLM(LlamaConfig(**DECODER)).eval()
    for one, folder in ((model, tmp_path / "composed"), (plain, tmp_path / "plain")):
        one.save_pretrained(folder)
        loaded = AutoModelForCausalLM.from_pretrained(folder).eval()
        assert type(loaded) is registered
        torch.testing.assert_close(loaded(IDS).logits, one(IDS).logits)
    assert set(plain_classes(model.config).values()) == {LlamaForCausalLM}


def test_an_implementation_is_of_the_machine_and_not_of_the_checkpoint() -> None:
    """A model that was trained with Triton would not work on a machine without a GPU."""
    config = LlamaConfig(**DECODER, composed_heads={"implementation": "triton"})
    assert with_composed_heads(LlamaForCausalLM)(config).config.composed_heads == {}
    model = with_composed_heads(LlamaForCausalLM, compose_rank=1, implementation="eager")(LlamaConfig(**DECODER))
    assert model.config.composed_heads == {"compose_rank": 1}


def test_a_configuration_is_not_changed_for_other_models() -> None:
    config = LlamaConfig(**DECODER)
    composed_class = with_composed_heads(LlamaForCausalLM, names=iter(["model.layers.1.self_attn"]))
    assert len([composed_class(config) for _ in range(2)]) == 2
    assert not hasattr(config, "composed_heads")


def test_experts_are_computed_as_those_of_the_plain_class(monkeypatch: pytest.MonkeyPatch) -> None:
    """Transformers asks a class once, and models of a plain class that was asked before show nothing."""
    monkeypatch.delattr(MixtralForCausalLM, "_can_set_experts_implementation_cached_value", raising=False)
    config = MixtralConfig(**GEMMA, num_local_experts=2)
    composed = with_composed_heads(MixtralForCausalLM)(copy.deepcopy(config))
    assert composed.config._experts_implementation == MixtralForCausalLM(config).config._experts_implementation
    assert composed.config._experts_implementation == "grouped_mm"


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_routers_stay_in_float32_and_gates_of_the_composition_do_not(dtype: torch.dtype, tmp_path: Path) -> None:
    config = DeepseekV3Config(**DECODER, **MLA, **EXPERTS, first_k_dense_replace=1)
    model = with_composed_heads(DeepseekV3ForCausalLM)(config)
    model.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path, dtype=dtype)
    kept = [name for name, weight in loaded.named_parameters() if weight.dtype == torch.float32]
    assert kept in (["model.layers.1.mlp.gate.weight"], [])  # the latter in earlier Transformers
    assert loaded(IDS).logits.dtype == dtype


@torch.no_grad()
def test_threads_may_call_a_model_and_its_replicas_at_the_same_time() -> None:
    """The hooks of a replica, as `DataParallel` makes them, are those of the module that it was copied from."""
    model = llama(num_hidden_layers=1)
    compose_heads_of(model)
    strengthen(model)
    rows = [(IDS + row) % 97 for row in range(4)]
    expected = [model(ids).logits for ids in rows]
    layer, arrived = model.model.layers[0], threading.Barrier(len(rows))

    def wait_for_all(module: nn.Module, given: Any) -> None:
        """Runs between the projections of keys and the attention."""
        arrived.wait(10)

    layer.self_attn.v_proj.register_forward_pre_hook(wait_for_all)
    for attention in (layer.self_attn, copy.copy(layer.self_attn)):
        layer.self_attn = attention
        with ThreadPoolExecutor(len(rows)) as threads:
            found = list(threads.map(lambda ids: model(ids).logits, rows))
        torch.testing.assert_close(found, expected)


def test_a_thread_may_first_call_a_model_when_it_is_compiled() -> None:
    model = llama(num_hidden_layers=1)
    compose_heads_of(model)
    strengthen(model)
    expected = model.generate(IDS, max_new_tokens=3, do_sample=False)
    model.forward = torch.compile(model.forward, backend="eager")
    with ThreadPoolExecutor(1) as threads:
        found = threads.submit(model.generate, IDS, max_new_tokens=3, do_sample=False).result()
    assert torch.equal(found, expected)


def test_attention_reads_the_keys_and_values_of_the_cache_without_a_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    model, cache, read = llama().float(), DynamicCache(), []
    compose_heads_of(model)
    attend = interface_function.attention_function_of("chunked")

    def recorded(*args: Any, **options: Any) -> Any:
        read.append([states.data_ptr() for states in args[2:4]])
        return attend(*args, **options)

    monkeypatch.setattr(interface_function, "attention_function_of", lambda name: recorded)
    model(IDS, past_key_values=cache)
    model(IDS[:, :1], past_key_values=cache)
    assert read[2:] == [[layer.keys.data_ptr(), layer.values.data_ptr()] for layer in cache.layers]


def test_query_wise_composition_needs_no_place_in_the_cache() -> None:
    model = llama()
    compose_heads_of(model, compose_key_wise=False)
    strengthen(model)
    cache = DynamicCache()
    model(IDS, past_key_values=cache)
    assert {type(layer) for layer in cache.layers} == {DynamicLayer}


def attend(model: PreTrainedModel, **options: Any) -> Any:
    return model(IDS, attention_mask=MASK, **options)


GEMMA2 = {**GEMMA, "attn_logit_softcapping": 20.0}
UNFIT: dict[str, tuple[Any, Any, str]] = {
    "soft caps": (Gemma2ForCausalLM, lambda: Gemma2Config(**GEMMA2), "attention with soft caps cannot have composed"),
    "one head": (LlamaForCausalLM, lambda: LlamaConfig(**DECODER | {"num_attention_heads": 1}), "attention with one"),
}


@pytest.mark.parametrize("name", UNFIT)
def test_attention_that_cannot_have_composed_heads_is_refused(name: str) -> None:
    model_class, make_config, message = UNFIT[name]
    model = model_class(make_config()).eval()
    with pytest.raises(ValueError, match=rf"layers\.0\.self_attn: {message}.*; leave it out by names"):
        compose_heads_of(model)


def test_attention_without_a_known_number_of_heads_is_refused() -> None:
    model = Florence2VisionBackbone(Florence2VisionConfig(embed_dim=[16] * 4, num_heads=[2] * 4, num_groups=[2] * 4))
    with pytest.raises(ValueError, match=r"channel_attn: Florence2VisionChannelAttention has no number of heads that"):
        compose_heads_of(model)


ZAMBA: dict[str, Any] = {**DECODER, "mamba_d_state": 8, "n_mamba_heads": 8, "mamba_ngroups": 1, "num_mem_blocks": 1}
ZAMBA |= {"num_key_value_heads": 4, "layers_block_type": ["mamba", "hybrid"]}
HRM = {**DECODER, "L_cycles": 2, "H_cycles": 1}
SPARSE = {**MLA, **EXPERTS, "index_topk": 3, "index_n_heads": 2, "index_head_dim": 16}
# Models that pass on, or keep, more than what is composed, and what is said of them.
UNFIT_CALLS = {
    "hrm_text": (HRM, {}, "HrmTextAttention keeps its keys in another layer of the cache than its own"),
    "zamba2": (ZAMBA, {}, "Zamba2Attention has no layer of the cache for its own"),
    "deepseek_v32": ({**DECODER, **SPARSE}, {"use_cache": False}, r"attention with \['indices'\] cannot have composed"),
}


@pytest.mark.parametrize("name", UNFIT_CALLS)
def test_what_would_be_wrong_in_silence_is_refused_when_it_is_called(name: str) -> None:
    """A layer that a model goes through several times has several layers of the cache, and indices choose keys."""
    fields, options, message = UNFIT_CALLS[name]
    if name not in transformers.CONFIG_MAPPING:
        pytest.skip(f"this version of Transformers has no {name}")
    if name == "hrm_text" and is_before("5.23"):
        pytest.skip("its configuration takes no implementation for the model alone before transformers 5.23")
    model = AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(name, **fields)).eval()
    compose_heads_of(model)
    with pytest.raises(ValueError, match=message):
        attend(model, **options)


def test_a_model_is_composed_once() -> None:
    model = llama()
    compose_heads_of(model)
    with pytest.raises(ValueError, match=r"has composed heads already, in model\.layers\.0\.self_attn; make them of a"):
        compose_heads_of(model)


def test_two_attentions_at_once_are_refused_when_they_are_called(tmp_path: Path) -> None:
    """Also of a model that is loaded, whose weights are nowhere at first but for vectors of this attention."""
    model = DiffLlamaForCausalLM(DiffLlamaConfig(**DECODER)).eval()
    model.save_pretrained(tmp_path)
    compose_heads_of(model)
    for composed in (model, with_composed_heads(DiffLlamaForCausalLM).from_pretrained(tmp_path)):
        with pytest.raises(ValueError, match=r"DiffLlamaAttention attends in pieces, or more than once; leave it out"):
            attend(composed)


def test_layers_that_attend_to_keys_of_others_are_left_alone() -> None:
    shared = {"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 97, "num_kv_shared_layers": 1}
    model = Gemma4ForCausalLM(Gemma4TextConfig(**GEMMA, **shared, layer_types=["full_attention"] * 2)).eval()
    assert compose_heads_of(model) == ["model.layers.0.self_attn"]


class PiecewiseAttention(LlamaAttention):
    """Stands for attention that gets the borders of pieces of a row, as in encoders of Qwen's pictures."""

    def forward(self, hidden_states: Tensor, cu_seqlens: Tensor | None = None, **kwargs: Any) -> Any:
        return super().forward(hidden_states, **kwargs)


def test_attention_to_pieces_of_a_row_is_left_alone() -> None:
    model = llama()
    model.model.layers[1].self_attn.__class__ = PiecewiseAttention
    assert compose_heads_of(model) == ["model.layers.0.self_attn"]


def test_a_projection_that_takes_anothers_place_is_noted() -> None:
    """As those with quantized weights do, when `from_pretrained` has made the model. PEFT puts one into another."""
    model = llama()
    compose_heads_of(model)
    strengthen(model)
    expected, attention = attend(model).logits, model.model.layers[0].self_attn
    for name in ("q_proj", "k_proj"):
        replaced, new = attention.get_submodule(name), nn.Linear(32, 1, bias=False)
        new.weight, new.out_features = replaced.weight, replaced.out_features
        model.set_submodule(f"model.layers.0.self_attn.{name}", new)
        torch.testing.assert_close(attend(model).logits, expected)
        model.set_submodule(f"model.layers.0.self_attn.{name}", replaced)
        assert len(new._forward_pre_hooks) == len(replaced._forward_pre_hooks) == 1


def test_a_projection_that_was_replaced_unnoticed_is_noted_in_the_next_call() -> None:
    model = llama()
    compose_heads_of(model)
    strengthen(model)
    expected, attention = attend(model).logits, model.model.layers[0].self_attn
    new = nn.Linear(32, 16, bias=False)
    new.weight = attention.k_proj.weight
    attention._modules["k_proj"] = new
    torch.testing.assert_close(attend(model).logits, expected)
    attention._modules["k_proj"] = nn.Sequential(nn.Linear(32, 16).double())  # does not tell its input's width
    with pytest.raises(
        ValueError, match=r"LlamaAttention attends to keys that it did not project, .*; use compose_key_wise"
    ):
        attend(model)


@pytest.mark.parametrize("family", ["llama", "gpt_neox"])
def test_inputs_of_projections_that_others_rotate_are_noted_as_they_were(family: str) -> None:
    """As QuIP of llm-compressor does, which puts its hooks before all others, and rotates the weights back."""
    neox = {**DECODER, "attention_dropout": 0.0}
    model = llama() if family == "llama" else GPTNeoXForCausalLM(GPTNeoXConfig(**neox)).eval().double()
    names = compose_heads_of(model)
    strengthen(model)
    expected, rotation = attend(model).logits, torch.linalg.qr(torch.randn(32, 32, dtype=torch.float64)).Q
    for projection in {part for name in names for part in projections_of(model.get_submodule(name))}:
        projection.weight.data = projection.weight @ rotation
        projection.register_forward_pre_hook(lambda _, inputs: inputs[0] @ rotation, prepend=True)
    for _ in range(2):
        torch.testing.assert_close(attend(model).logits, expected)


@pytest.mark.parametrize("family", ["llama", "gpt_neox"])
@pytest.mark.parametrize("kind", ["oft", "ia3"])
@torch.no_grad()
def test_adapters_that_change_the_inputs_of_projections_can_be_merged(kind: str, family: str) -> None:
    """They call the projection in them with changed inputs; once they are merged, they change its weight instead."""
    neox = {**DECODER, "attention_dropout": 0.0}
    model = llama() if family == "llama" else GPTNeoXForCausalLM(GPTNeoXConfig(**neox)).eval().double()
    compose_heads_of(model)
    strengthen(model)
    targets = ["q_proj", "k_proj"] if family == "llama" else ["query_key_value"]
    configs = {
        "oft": OFTConfig(r=0, oft_block_size=8, target_modules=targets),
        "ia3": IA3Config(target_modules=targets, feedforward_modules=targets),
    }
    adapted: Any = get_peft_model(model, configs[kind]).eval()
    for parameter in adapted.parameters():
        if parameter.requires_grad:
            parameter += 0.2 * torch.randn_like(parameter)
    expected = attend(adapted).logits
    torch.testing.assert_close(attend(adapted.merge_and_unload()).logits, expected, atol=1e-4, rtol=1e-4)


@needs_transformers("5.24")
def test_continuous_batching_needs_keys_without_factors() -> None:
    model = llama().float()
    compose_heads_of(model, compose_key_wise=False)
    strengthen(model)
    settings = GenerationConfig(max_new_tokens=5, do_sample=False, eos_token_id=-1, pad_token_id=0)
    small = ContinuousBatchingConfig(num_blocks=16, max_batch_tokens=32)
    found = model.generate_batch([IDS[0].tolist(), IDS[1, 4:].tolist()], settings, small)
    texts = {tuple(result.generated_tokens) for result in found.values()}
    alone = [model.generate(ids[None], **{**GREEDY, "max_new_tokens": 5}) for ids in (IDS[0], IDS[1, 4:])]
    assert texts == {tuple(ids[0, -5:].tolist()) for ids in alone}


def test_a_module_that_was_dispatched_before_is_refused() -> None:
    model = llama()
    cpu_offload(model, execution_device=torch.device("cpu"))
    with pytest.raises(ValueError, match=r"self_attn or a part of it has .*; compose heads before that"):
        compose_heads_of(model)


def test_calls_that_would_be_wrong_in_silence_are_refused() -> None:
    model = llama(attention_dropout=0.1)
    with pytest.raises(ValueError, match=r"layers\.0\.self_attn: dropout=0\.1 drops probabilities.*dropout=0\.0"):
        compose_heads_of(model)
    model = llama()
    filled = attend(model).past_key_values
    compose_heads_of(model)
    with pytest.raises(ValueError, match="the cache holds 11 tokens without composition factors"):
        model(IDS[:, :1], past_key_values=filled)
    with pytest.raises(ValueError, match="keeps no documents apart here; give position_ids alone and use_cache=False"):
        model(IDS[:1], cu_seq_lens_q=torch.tensor([0, 4, 11]), position_ids=torch.arange(11)[None])
    positions = torch.cat([torch.arange(4), torch.arange(7)])[None]
    apart = model(IDS[:1], position_ids=positions, use_cache=False).logits[:, 4:]
    torch.testing.assert_close(apart, model(IDS[:1, 4:]).logits, atol=1e-5, rtol=0)
    model.model.layers[0].self_attn.attention_dropout = 0.1
    with pytest.raises(ValueError, match=r"dropout=0\.1 drops probabilities"):
        attend(model.train())
    model.config._attn_implementation = "flash_attention_2"
    with pytest.raises(ValueError, match="'flash_attention_2' has no masks for composed heads; use 'sdpa'"):
        model.model.layers[0].self_attn(torch.randn(1, 2, 32))


@pytest.mark.skipif(
    torch.backends.cuda.is_built() and not torch.cuda.is_available(),
    reason="Transformers' offloaded cache needs a GPU where PyTorch is built for one",
)
def test_offloaded_caches_are_refused() -> None:
    model = llama()
    compose_heads_of(model)
    with pytest.raises(ValueError, match="an offloaded cache cannot keep composition factors here"):
        model.generate(IDS, cache_implementation="offloaded", **GREEDY)


def test_a_packed_row_may_be_a_single_document() -> None:
    model = llama()
    compose_heads_of(model)
    ids = IDS[:1]
    borders = torch.tensor([0, ids.shape[1]])  # TRL's collator gives them, and Transformers makes no mask
    packed = model(ids, position_ids=torch.arange(ids.shape[1])[None], cu_seq_lens_q=borders, cu_seq_lens_k=borders)
    torch.testing.assert_close(packed.logits, model(ids).logits, atol=0, rtol=0)


def test_dropout_that_was_switched_off_stays_off() -> None:
    model = llama(attention_dropout=0.1)
    compose_heads_of(model, dropout=0.0)
    model.train()
    torch.testing.assert_close(attend(model).logits, attend(model).logits, atol=0, rtol=0)


@pytest.mark.parametrize("options", [{"implementation": "eager"}, {}], ids=["of the heads", "of the model"])
def test_eager_makes_the_maps(options: dict[str, Any]) -> None:
    model = llama()
    compose_heads_of(model, **options)
    strengthen(model)
    expected = attend(model).logits
    model.set_attn_implementation("eager")
    output = model(IDS, attention_mask=MASK, output_attentions=True)
    torch.testing.assert_close(real(output.logits), real(expected), atol=1e-5, rtol=0)
    assert [maps.shape for maps in output.attentions] == [(2, 4, 11, 11)] * 2
    assert output.attentions[0].min() < 0  # composed, as probabilities alone are not
