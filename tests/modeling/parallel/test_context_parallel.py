"""Processes that share sequences compute what one process computes of whole ones."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from accelerate.utils import send_to_device
from cases.models import SMALL, make_model
from cases.processes import in_processes
from peft import LoraConfig, PromptTuningConfig, get_peft_model
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel
from transformers import (
    BartConfig,
    BartForCausalLM,
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GPT2Config,
    GPT2DoubleHeadsModel,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    OPTConfig,
    OPTForCausalLM,
    PreTrainedModel,
    StaticCache,
)

import dynattn
from dynattn import ContextParallel

TOKENS = 48
PLAIN = {"compose_pre": False, "compose_post": False}
CASES: dict[str, dict[str, Any]] = {
    "windows and fewer keys": {},
    "the definition": {"attn_implementation": "eager"},
    "query-wise composition": {"compose_key_wise": False},
    "static composition": dynattn.mixer_fields("talking_heads"),
    "differential heads": {**dynattn.mixer_fields("differential"), "num_key_value_heads": 6},
    "no composition": PLAIN,
    "no composition, by the definition": {**PLAIN, "attn_implementation": "eager"},
    "ALiBi": {"position_scheme": "alibi", "compose_position_bias": True},
    "learned bias by distance": {"position_scheme": "t5", **PLAIN},
    "learned gain by distance": {"position_gain": "distance"},
    "learned positions": {"position_scheme": "learned"},
    "sines and cosines": {"position_scheme": "sinusoidal"},
    "no positions": {"position_scheme": "none"},
}
TINY: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "initializer_range": 0.2,
}
# Norms of models of Transformers compute in float32, whatever the dtype of the model is.
IN_FLOAT32 = 1e-7
BART = {"vocab_size": 97, "d_model": 32, "decoder_layers": 1, "decoder_attention_heads": 4, "decoder_ffn_dim": 32}
OPT = {"vocab_size": 97, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "ffn_dim": 32}
LATENT = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8}
IN_PLACE: dict[str, tuple[type[PreTrainedModel], Any]] = {
    "windows": (
        Gemma3ForCausalLM,
        Gemma3TextConfig(**TINY, head_dim=8, sliding_window=7, layer_types=SMALL["layer_types"][:2]),
    ),
    # The default for experts has no float64.
    "experts": (MixtralForCausalLM, MixtralConfig(**TINY, num_local_experts=4, experts_implementation="eager")),
    "latent attention": (
        DeepseekV3ForCausalLM,
        DeepseekV3Config(**{**TINY, **LATENT, "num_key_value_heads": 4}, n_routed_experts=4, n_group=1, topk_group=1),
    ),
    "learned positions": (
        GPT2LMHeadModel,
        GPT2Config(
            vocab_size=97, n_embd=32, n_layer=2, n_head=4, n_positions=64, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0
        ),
    ),
}


def shared(processes: int, folder: Path, work: Callable[[ContextParallel], None]) -> None:
    """Runs `work` in so many processes, with a context of all of them."""

    def begin() -> None:
        torch.set_num_threads(1)
        dist.init_process_group("gloo")
        work(ContextParallel(init_device_mesh("cpu", (processes,))))
        dist.barrier()  # the first process holds what the others need to find each other
        dist.destroy_process_group()

    in_processes([folder / f"{rank}.txt" for rank in range(processes)], begin)


def texts(*, packed: bool) -> dict[str, Tensor]:
    """Two rows of tokens that are their own targets, and positions that begin anew at a place in each if `packed`."""
    ids = torch.randint(97, (2, TOKENS), generator=torch.Generator().manual_seed(3))
    if not packed:
        return {"input_ids": ids, "labels": ids}
    places, begin = torch.arange(TOKENS).expand(2, -1), torch.tensor([[17], [30]])
    return {"input_ids": ids, "labels": ids, "position_ids": places - begin * (places >= begin)}


def logits_and_gradients(model: PreTrainedModel, **arguments: Any) -> tuple[Tensor, dict[str, Tensor]]:
    """Logits `[B, T, V]`, and the gradients of the loss, which is a sum over targets divided by a fixed number."""
    model.zero_grad()
    output = model(**arguments, num_items_in_batch=torch.tensor(90.0))
    output.loss.backward()
    gradients = {name: weight.grad for name, weight in model.named_parameters()}
    return output.logits.detach(), {name: gradient for name, gradient in gradients.items() if gradient is not None}


def shifting_loss(logits: Tensor, labels: Tensor, vocab_size: int, **_: Any) -> Tensor:
    """A loss of a user's own, the sum over targets, which shifts the labels by itself."""
    targets = F.pad(labels[:, 1:], (0, 1), value=-100)
    return F.cross_entropy(logits.view(-1, vocab_size), targets.flatten(), reduction="sum")


def assert_parts_make_the_whole(
    context: ContextParallel, model: PreTrainedModel, batch: dict[str, Tensor], tolerance: float = 1e-11
) -> None:
    """Compares logits, and gradients summed over processes, with those of whole sequences."""
    expected, gradients = logits_and_gradients(model, **batch, use_cache=False)
    found, shares = logits_and_gradients(model, **context.part(model, **batch))
    torch.testing.assert_close(context.gather(found), expected, rtol=tolerance, atol=tolerance)
    assert shares.keys() == gradients.keys()
    for name, gradient in gradients.items():
        dist.all_reduce(shares[name])
        torch.testing.assert_close(shares[name], gradient, rtol=10 * tolerance, atol=tolerance)


@pytest.mark.parametrize("name", CASES)
def test_two_processes_compute_what_one_does(name: str, tmp_path: Path) -> None:
    def work(context: ContextParallel) -> None:
        for packed in (False, True):
            model = make_model(**CASES[name]).double().train()
            assert_parts_make_the_whole(context, model, texts(packed=packed))

    shared(2, tmp_path, work)


@pytest.mark.parametrize("name", IN_PLACE)
def test_two_processes_compute_what_one_does_with_heads_composed_in_place(name: str, tmp_path: Path) -> None:
    model_class, config = IN_PLACE[name]

    def work(context: ContextParallel) -> None:
        torch.manual_seed(1)
        model = dynattn.with_composed_heads(model_class, compose_rank=2)(config).double().train()
        for part, weight in model.named_parameters():
            if "composition" in part:
                torch.nn.init.normal_(weight, std=0.2)
        for packed in (False, True):
            assert_parts_make_the_whole(context, model, texts(packed=packed), IN_FLOAT32)

    shared(2, tmp_path, work)


@pytest.mark.parametrize("in_place", [False, True])
def test_labels_may_be_given_at_the_places_that_predict_them_alone(in_place: bool, tmp_path: Path) -> None:
    model = dynattn.with_composed_heads(LlamaForCausalLM)(LlamaConfig(**TINY)) if in_place else make_model()

    def work(context: ContextParallel) -> None:
        batch = texts(packed=False)
        expected = model(**context.part(model, **batch)).loss
        shifted = F.pad(batch.pop("labels")[:, 1:], (0, 1), value=-100)
        assert model(**context.part(model, **batch, shift_labels=shifted)).loss.equal(expected)

    shared(2, tmp_path, work)


def test_three_processes_compute_what_one_does_with_layers_that_are_recomputed(tmp_path: Path) -> None:
    def work(context: ContextParallel) -> None:
        torch.manual_seed(1)
        sizes = {name: size for name, size in SMALL.items() if name not in ("num_key_value_heads", "layer_types")}
        model = dynattn.DCPythiaForCausalLM(dynattn.DCPythiaConfig(**sizes)).double().train()
        model.gradient_checkpointing_enable({"use_reentrant": False, "context_fn": dynattn.keep_attention_outputs})
        assert_parts_make_the_whole(context, model, texts(packed=True))
        model_class, config = IN_PLACE["windows"]
        model = dynattn.with_composed_heads(model_class, compose_rank=2)(config).double().train()
        model.gradient_checkpointing_enable({"use_reentrant": False})
        assert_parts_make_the_whole(context, model, texts(packed=True), IN_FLOAT32)

    shared(3, tmp_path, work)


def test_adapters_of_heads_composed_in_place_learn_the_same(tmp_path: Path) -> None:
    def work(context: ContextParallel) -> None:
        torch.manual_seed(1)
        model_class, config = IN_PLACE["experts"]
        plain = dynattn.with_composed_heads(model_class, compose_rank=2)(config)
        model = get_peft_model(plain, LoraConfig(target_modules=["q_proj", "k_proj"], task_type="CAUSAL_LM"))
        assert_parts_make_the_whole(context, model.double(), texts(packed=False), IN_FLOAT32)
        for wrapped in (plain, DistributedDataParallel(model), torch.compile(model)):
            again = ContextParallel(context.mesh)
            assert again.part(wrapped, **texts(packed=False))["input_ids"].shape[1] == TOKENS // 2

    shared(2, tmp_path, work)


def test_a_mask_of_all_pairs_takes_no_memory_when_a_part_is_moved_to_the_model(tmp_path: Path) -> None:
    def work(context: ContextParallel) -> None:
        model_class, config = IN_PLACE["experts"]
        model = dynattn.with_composed_heads(model_class, compose_rank=2)(config).to("meta")
        part = context.part(model, input_ids=texts(packed=False)["input_ids"], inputs_embeds=None, labels=None)
        mask = send_to_device(part, model.device)["attention_mask"]
        assert mask.shape[2:] == (TOKENS // 2, TOKENS // 2)
        assert mask.stride()[2:] == (0, 0)

    shared(2, tmp_path, work)


def test_every_process_has_as_many_visible_pairs(tmp_path: Path) -> None:
    def work(context: ContextParallel) -> None:
        whole = torch.arange(TOKENS)[None]
        part = context.take(whole)
        assert context.gather(part).equal(whole)
        for chunk, end in context.chunks(part.shape[1]):
            assert part[0, chunk][-1] == end - 1
        pairs = (part + 1).sum()
        every = [torch.empty_like(pairs) for _ in range(context.processes)]
        dist.all_gather(every, pairs)
        assert len(set(map(int, every))) == 1

    shared(4, tmp_path, work)


def test_what_cannot_be_divided_is_refused(tmp_path: Path) -> None:
    partly = dynattn.with_composed_heads(MixtralForCausalLM, names=["model.layers.0.self_attn"])
    classes = BartForCausalLM, OPTForCausalLM, GPT2DoubleHeadsModel, MixtralForCausalLM, Gemma3ForCausalLM
    bart, opt, double, mixtral, gemma = map(dynattn.with_composed_heads, classes)
    routed = mixtral(MixtralConfig(**TINY, num_local_experts=4, output_router_logits=True))
    repeating = mixtral(IN_PLACE["experts"][1])
    repeating.model.layers[1] = repeating.model.layers[0]
    prompt = PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4)
    stretched = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
    in_place = MixtralForCausalLM(IN_PLACE["experts"][1])
    dynattn.compose_heads_of(in_place)
    shifting, shifting_gemma = make_model(), gemma(IN_PLACE["windows"][1])
    shifting.loss_function = shifting_gemma.loss_function = shifting_loss

    def work(context: ContextParallel) -> None:
        model, ids = make_model(), texts(packed=False)["input_ids"]
        flash = make_model(**PLAIN)
        flash.config._attn_implementation = "flash_attention_2"
        refused: list[tuple[str, PreTrainedModel, dict[str, Any]]] = [
            (r"\['attention_mask'\] cannot be divided", model, {"attention_mask": torch.ones_like(ids)}),
            ("multiple of 4", model, {"input_ids": ids[:, :10]}),
            (r"position_ids of shape \(1, 12\) must be", model, {"position_ids": torch.arange(12)[None]}),
            ("ForSequenceClassification has no language", dynattn.DCFormerForSequenceClassification(model.config), {}),
            ("without CARoPE", make_model(position_scheme="carope"), {}),
            ("rope_type 'dynamic' rotates", make_model(rope_parameters=stretched), {}),
            ("only if every layer has composed heads", partly(IN_PLACE["experts"][1]), {}),
            ("it: ComposedBart.* no position_ids, [^;]*; let each process read whole", bart(BartConfig(**BART)), {}),
            ("layerdrop=0.1 skips other layers", opt(OPTConfig(**OPT, layerdrop=0.1)), {}),
            ("of MixtralForCausalLM; they can those of .* with_composed_heads", in_place, {}),
            ("output_router_logits=True adds a loss", routed, {}),
            ("the loss of ComposedGPT2DoubleHeadsModel does not read", double(IN_PLACE["learned positions"][1]), {}),
            ("the loss of DCFormerForCausalLM does not read .* or a loss_function that reads", shifting, {}),
            ("the loss of ComposedGemma3ForCausalLM does not read", shifting_gemma, {}),
            (r"attend as \(layer, window\) \[\(0, None\), \(0, None\)\]", repeating, {}),
            ("attention_dropout=0.1 drops", make_model(**PLAIN, attention_dropout=0.1), {}),
            ("a PEFT model with a trained prompt", get_peft_model(make_model(), prompt), {}),
            ("cannot share sequences of MixtralForCausalLM", MixtralForCausalLM(IN_PLACE["experts"][1]), {}),
            ("'flash_attention_2' cannot attend", flash, {}),
        ]
        for message, refusing, changes in refused:
            with pytest.raises(ValueError, match=message):
                refusing(**context.part(refusing, **{"input_ids": ids, **changes}))
        with pytest.raises(ValueError, match="layer 1 attends with 24 queries and 64 keys, and a part has 24 tokens"):
            model(**context.part(model, input_ids=ids), past_key_values=StaticCache(model.config, max_cache_len=64))
        with pytest.raises(ValueError, match="the mesh has 2 dimensions"):
            ContextParallel(init_device_mesh("cpu", (1, 2)))

    shared(2, tmp_path, work)


@pytest.mark.parametrize("in_place", [False, True])
def test_positions_that_a_model_lacks_are_refused_in_all_processes(in_place: bool, tmp_path: Path) -> None:
    """Only the first process has tokens beyond the last learned position; the second would wait for their keys."""

    def make(kind: str, **family: Any) -> PreTrainedModel:
        model_class, config = IN_PLACE[kind]
        return dynattn.with_composed_heads(model_class)(config) if in_place else make_model(**family)

    learned, rotary = make("learned positions", position_scheme="learned", max_position_embeddings=64), make("experts")

    def work(context: ContextParallel) -> None:
        batch = {**texts(packed=False), "position_ids": torch.arange(20, 20 + TOKENS)[None]}
        with pytest.raises(ValueError, match=r"reach from 20 to 67, but must be .* max_position_embeddings \(64\)"):
            learned(**context.part(learned, **batch))
        assert rotary(**context.part(rotary, **batch)).loss.isfinite()

    shared(2, tmp_path, work)


@pytest.mark.parametrize("form", ["tokens", "lengths", "embeddings"])
def test_processes_that_read_different_sequences_are_refused(form: str, tmp_path: Path) -> None:
    def work(context: ContextParallel) -> None:
        model, ids = make_model(), texts(packed=False)["input_ids"]
        ids = (ids + context.process) % 97 if form == "tokens" else ids[:, context.process * 4 :]
        given = {"inputs_embeds": model.model.embed_tokens(ids)} if form == "embeddings" else {"input_ids": ids}
        with pytest.raises(ValueError, match="the processes of a group have different sequences"):
            model(**context.part(model, **given))

    shared(2, tmp_path, work)
