"""Processes that have some of the heads and of the MLP each compute what one process computes with all."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from cases.models import SMALL
from cases.processes import in_processes
from cases.versions import needs_transformers
from peft import LoraConfig, PeftModel, get_peft_model
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from transformers import (
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    GenerationConfig,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForCausalLM,
)
from transformers.distributed import DistributedConfig
from transformers.generation.configuration_utils import ContinuousBatchingConfig

import dynattn
from dynattn.modeling.layers.tensor_parallel import plan_composed_attention

PROCESSES = 2
# Transformers before 5.23 needs a vocabulary that can be divided evenly.
SIZES: dict[str, Any] = {**SMALL, "vocab_size": 96, "num_attention_heads": 8, "num_key_value_heads": 4}
PLAIN = {"compose_pre": False, "compose_post": False}
# Whether each process has some of the heads, and the fields.
DECODERS: dict[str, tuple[bool, dict[str, Any]]] = {
    "one group of heads": (False, {}),
    "two groups": (True, {"compose_groups": 2}),
    "four groups": (True, {"compose_groups": 4}),
    "biases and tied embeddings": (True, {"compose_groups": 2, "attention_bias": True, "tie_word_embeddings": True}),
    "static and dynamic composition": (True, {"compose_groups": 2, "compose_static": True}),
    "static composition": (True, {**dynattn.mixer_fields("head_convolution"), "compose_groups": 2}),
    "query-wise composition without norms": (
        True,
        {"compose_groups": 2, "compose_key_wise": False, "use_qk_norm": False},
    ),
    "gates of the MLP": (True, {"compose_groups": 2, "mgate_dim": 4, "tie_word_embeddings": True}),
    "gates of the MLP and one group": (False, {"mgate_dim": 4, "tie_word_embeddings": True}),
    "no composition": (True, PLAIN),
    "norms over all heads": (False, {"compose_groups": 2, "qk_norm_type": "joint_rms_norm"}),
    "a bias for each head": (False, {"compose_groups": 2, "position_scheme": "alibi"}),
    "rotations by content": (False, {"position_scheme": "carope", **PLAIN}),
    "differential heads": (False, dynattn.mixer_fields("differential")),
}
TINY: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "initializer_range": 0.2,
    "pad_token_id": 0,
}
LATENT = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8}
IN_PLACE: dict[str, tuple[type[PreTrainedModel], Any]] = {
    "fewer keys": (LlamaForCausalLM, LlamaConfig(**TINY, num_key_value_heads=2)),
    "one key head": (LlamaForCausalLM, LlamaConfig(**TINY, num_key_value_heads=1)),
    "norms of heads": (Qwen3ForCausalLM, Qwen3Config(**TINY, num_key_value_heads=2, head_dim=8)),
    "one projection": (GPTNeoXForCausalLM, GPTNeoXConfig(**TINY)),
    "a projection that is gathered": (Phi3ForCausalLM, Phi3Config(**TINY)),
    "latent attention": (
        DeepseekV3ForCausalLM,
        DeepseekV3Config(**TINY, **LATENT, n_routed_experts=4, n_group=1, topk_group=1, first_k_dense_replace=2),
    ),
}

# With one group attention stays whole, whatever its projections are; one kind is enough to test that.
WHOLE = "fewer keys"


def split(folder: Path, work: Callable[[], None]) -> None:
    """Runs `work` in the processes that a model is split into."""

    def begin() -> None:
        torch.set_num_threads(1)
        dist.init_process_group("gloo")
        work()
        dist.barrier()  # the first process holds what the others need to find each other
        dist.destroy_process_group()

    in_processes([folder / f"{rank}.txt" for rank in range(PROCESSES)], begin)


def load(model_class: Any, folder: Path, processes: int = PROCESSES) -> Any:
    """A model in inference, of which each process has a part; with one process all of it."""
    config = DistributedConfig(tp_size=processes) if processes > 1 else None
    return model_class.from_pretrained(folder, distributed_config=config, dtype=torch.float64).eval()


def whole(tensor: Tensor) -> Tensor:
    """A tensor of which every process may have a part."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def logits_and_gradients(model: PreTrainedModel, ids: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """Logits `[B, T, V]`, and the gradients of the loss, accumulated over two passes, whole."""
    model(input_ids=ids.flip(1), labels=ids).loss.backward()
    output = model(input_ids=ids, labels=ids)
    output.loss.backward()
    gradients = {name: weight.grad for name, weight in model.named_parameters()}
    return whole(output.logits.detach()), {name: whole(one) for name, one in gradients.items() if one is not None}


def assert_parts_compute_the_same(model_class: Any, folder: Path) -> Any:
    """Compares logits, gradients, greedy tokens and a saved copy with those of one process; returns the split model."""
    alone, parts = load(model_class, folder, 1), load(model_class, folder)
    ids = torch.randint(3, 96, (2, 20), generator=torch.Generator().manual_seed(3))
    expected, gradients = logits_and_gradients(alone, ids)
    found, shares = logits_and_gradients(parts, ids)
    # Norms of models of Transformers compute in float32.
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)
    assert shares.keys() == gradients.keys()
    for name, gradient in gradients.items():
        torch.testing.assert_close(shares[name], gradient, rtol=1e-5, atol=1e-6, msg=name)
    options: dict[str, Any] = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    assert torch.equal(parts.generate(ids, **options), alone.generate(ids, **options))
    parts.save_pretrained(folder / "again")
    dist.barrier()
    for name, weight in load(model_class, folder / "again", 1).named_parameters():
        assert torch.equal(weight, alone.get_parameter(name)), name
    return parts


def has_some_heads(attention: Any) -> bool:
    """Whether the weights of all parts of an attention module that have heads are divided."""
    weights = [one for name, one in attention.named_parameters() if "norm" not in name and name != "o_proj.bias"]
    divided = {isinstance(weight, DTensor) and weight.placements[0].is_shard() for weight in weights}
    (found,) = divided
    return found


@pytest.mark.parametrize("name", DECODERS)
def test_decoders_compute_the_same_in_two_processes(name: str, tmp_path: Path) -> None:
    has_parts, fields = DECODERS[name]
    torch.manual_seed(1)
    dynattn.DCFormerForCausalLM(dynattn.DCFormerConfig(**{**SIZES, **fields})).save_pretrained(tmp_path)

    def work() -> None:
        parts = assert_parts_compute_the_same(dynattn.DCFormerForCausalLM, tmp_path)
        assert {has_some_heads(layer.self_attn) for layer in parts.model.layers} == {has_parts}

    split(tmp_path, work)


def test_other_decoders_compute_the_same_in_two_processes(tmp_path: Path) -> None:
    models = {
        "grouped": dynattn.DCPythiaForCausalLM(dynattn.DCPythiaConfig(**TINY, compose_groups=2)),
        "whole": dynattn.RCMHAForCausalLM(dynattn.RCMHAConfig(**{**TINY, "max_position_embeddings": 256})),
    }
    for name, model in models.items():
        model.save_pretrained(tmp_path / name)

    def work() -> None:
        for name, model in models.items():
            parts = assert_parts_compute_the_same(type(model), tmp_path / name)
            assert has_some_heads(parts.model.layers[0].self_attn) == (name == "grouped")

    split(tmp_path, work)


def test_bidirectional_models_compute_the_same_in_two_processes(tmp_path: Path) -> None:
    torch.manual_seed(1)
    special = {f"{name}_token_id": number for number, name in enumerate(("pad", "bos", "eos", "cls", "sep"))}
    text = dynattn.DCModernBertConfig(**{**TINY, **special}, compose_groups=2)
    picture = dynattn.DCViTConfig.from_size("tiny", compose_groups=2)
    models: dict[type[PreTrainedModel], tuple[Any, Tensor]] = {
        dynattn.DCModernBertForMaskedLM: (text, torch.randint(5, 96, (2, 20))),
        dynattn.DCViTForImageClassification: (picture, torch.randn(2, 3, *picture.image_shape, dtype=torch.float64)),
    }
    for model_class, (config, _) in models.items():
        model_class(config).save_pretrained(tmp_path / model_class.__name__)

    @torch.no_grad()
    def work() -> None:
        for model_class, (_, inputs) in models.items():
            folder = tmp_path / model_class.__name__
            alone, parts = (load(model_class, folder, processes) for processes in (1, PROCESSES))
            assert has_some_heads(parts.model.layers[0].self_attn)
            torch.testing.assert_close(whole(parts(inputs).logits), alone(inputs).logits)

    split(tmp_path, work)


@pytest.mark.parametrize(
    ("name", "groups"),
    [
        pytest.param(name, groups, id=f"{name}-{groups}", marks=[pytest.mark.slow] * (groups == 1 and name != WHOLE))
        for name in IN_PLACE
        for groups in (1, 2)
    ],
)
def test_heads_composed_in_place_compute_the_same_in_two_processes(name: str, groups: int, tmp_path: Path) -> None:
    """With one group, and with fewer key heads than groups, attention stays whole, and the MLP is split."""
    model_class, config = IN_PLACE[name]
    composed = dynattn.with_composed_heads(model_class, compose_rank=2, compose_groups=groups)
    torch.manual_seed(1)
    model = composed(config)
    for part, weight in model.named_parameters():
        if "composition" in part:
            torch.nn.init.normal_(weight, std=0.2)
    model.save_pretrained(tmp_path)
    split(tmp_path, lambda: assert_parts_compute_the_same(composed, tmp_path))


@needs_transformers("5.24")
def test_engines_serve_models_of_which_each_process_has_a_part(tmp_path: Path) -> None:
    """Transformers' continuous batching, whose cache keeps in each process the heads of that process."""
    composed = dynattn.with_composed_heads(LlamaForCausalLM, compose_rank=2, compose_groups=2)
    torch.manual_seed(1)
    models: dict[str, PreTrainedModel] = {
        "family": dynattn.DCFormerForCausalLM(dynattn.DCFormerConfig(**SIZES, compose_groups=2)),
        "whole attention": dynattn.DCFormerForCausalLM(dynattn.DCFormerConfig(**SIZES)),
        "in place": composed(IN_PLACE["fewer keys"][1]),
    }
    for name, model in models.items():
        model.save_pretrained(tmp_path / name)
    prompts = [torch.randint(3, 96, (length,)).tolist() for length in (5, 20, 3, 30)]
    greedy = GenerationConfig(max_new_tokens=8, do_sample=False, eos_token_id=-1, pad_token_id=0)

    def work() -> None:
        for name, model in models.items():
            alone, parts = (load(type(model), tmp_path / name, processes) for processes in (1, PROCESSES))
            settings = ContinuousBatchingConfig(page_size=8, num_blocks=40, max_batch_tokens=24)
            answers = {tuple(one.prompt_ids): one for one in parts.generate_batch(prompts, greedy, settings).values()}
            for prompt in prompts:
                expected = alone.generate(torch.tensor([prompt]), greedy)[0, len(prompt) :].tolist()
                assert answers[tuple(prompt)].generated_tokens == expected, name

    split(tmp_path, work)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"num_attention_heads": 6, "num_key_value_heads": 6, "compose_groups": 3}, r"divide compose_groups \(3\)"),
        ({"num_attention_heads": 6, "num_key_value_heads": 3, **PLAIN}, r"divide num_key_value_heads \(3\)"),
    ],
    ids=["groups", "keys"],
)
def test_processes_have_whole_groups_and_whole_heads(fields: dict[str, Any], message: str, tmp_path: Path) -> None:
    dynattn.DCFormerForCausalLM(dynattn.DCFormerConfig(**{**SIZES, **fields})).save_pretrained(tmp_path)

    def work() -> None:
        with pytest.raises(ValueError, match=f"tp_size=2 must {message}"):
            load(dynattn.DCFormerForCausalLM, tmp_path)

    split(tmp_path, work)


def test_processes_with_parts_of_the_heads_cannot_share_sequences_besides(tmp_path: Path) -> None:
    """They would add up what they compute of different tokens."""
    dynattn.DCFormerForCausalLM(dynattn.DCFormerConfig(**SIZES)).save_pretrained(tmp_path)

    def work() -> None:
        context = dynattn.ContextParallel(init_device_mesh("cpu", (PROCESSES,)))
        with pytest.raises(ValueError, match=r"processes \[0, 1\] share sequences .*tp_size=2"):
            context.check(load(dynattn.DCFormerForCausalLM, tmp_path))

    split(tmp_path, work)


def test_copies_of_modules_that_adapters_train_have_the_heads_of_their_process(tmp_path: Path) -> None:
    """PEFT copies the modules that `modules_to_save` names; the copies, and not the modules, are computed with."""
    torch.manual_seed(1)
    model = dynattn.DCFormerForCausalLM(dynattn.DCFormerConfig(**SIZES, compose_groups=2))
    model.save_pretrained(tmp_path / "model")
    saved = ["composition", "q_norm"]
    adapted = get_peft_model(model, LoraConfig(r=2, target_modules=["v_proj"], modules_to_save=saved))
    for name, weight in adapted.named_parameters():
        if weight.requires_grad:
            torch.nn.init.normal_(weight, mean=float("norm" in name), std=0.2)
    adapted.save_pretrained(tmp_path / "adapter")
    ids = torch.randint(3, 96, (2, 20))

    def work() -> None:
        wholes = [load(dynattn.DCFormerForCausalLM, tmp_path / "model", processes) for processes in (1, PROCESSES)]
        alone, parts = (PeftModel.from_pretrained(one, tmp_path / "adapter", is_trainable=True) for one in wholes)
        (expected, gradients), (found, shares) = (logits_and_gradients(one, ids) for one in (alone, parts))
        torch.testing.assert_close(found, expected)
        assert shares.keys() == gradients.keys()
        for name, gradient in gradients.items():
            torch.testing.assert_close(shares[name], gradient, msg=name)

    split(tmp_path, work)


@pytest.mark.parametrize("rule", ["q_proj", "experts"])
def test_plans_that_leave_the_heads_of_a_module_together_stay(rule: str) -> None:
    """Those that gather what they split, and those of other modules that some layers have under the same name."""
    model = dynattn.with_composed_heads(LlamaForCausalLM)(IN_PLACE["fewer keys"][1])
    name = "model.layers.*.self_attn"
    plan = {f"{name}.{rule}": "colwise_gather_output" if rule == "q_proj" else "colwise"}
    assert plan_composed_attention(plan, "model.layers.0.self_attn", model.model.layers[0].self_attn) == plan
