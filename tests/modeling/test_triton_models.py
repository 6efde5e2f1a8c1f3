"""Models with `attn_implementation="triton"`, in Triton's interpreter or on a GPU, against the same with `eager`."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from cases.models import make_model
from cases.triton_marks import interpreted, on_gpu
from cases.vision_models import strengthen
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from dynattn import DCFormerConfig, DCFormerForCausalLM, compose_heads_of

pytest.importorskip("triton")
pytestmark = pytest.mark.filterwarnings("ignore:divide by zero encountered in log")
on_every_device = pytest.mark.parametrize(
    "device", [pytest.param("cpu", marks=interpreted), pytest.param("cuda", marks=on_gpu)]
)
TINY = {"num_hidden_layers": 2, "layer_types": ["sliding_attention", "full_attention"], "sliding_window": 5}
IDS = torch.randint(1, 97, (2, 8), generator=torch.Generator().manual_seed(7))


def pair(device: str, **fields: Any) -> tuple[DCFormerForCausalLM, DCFormerForCausalLM]:
    """The same model twice, the first one with Triton."""
    first, second = (make_model(**TINY, **fields, attn_implementation=name) for name in ("triton", "eager"))
    second.load_state_dict(first.state_dict())
    return first.to(device), second.to(device)


def gradients(model: DCFormerForCausalLM) -> dict[str, Tensor]:
    ids = IDS.to(model.device)
    model(ids, labels=ids).loss.backward()
    return {name: parameter.grad for name, parameter in model.named_parameters()}


@on_every_device
@pytest.mark.parametrize("cache", [pytest.param("dynamic", marks=pytest.mark.slow), "static"])
def test_greedy_tokens_of_a_padded_batch(cache: str, device: str) -> None:
    ids = IDS.to(device)
    mask = torch.ones_like(ids)
    mask[1, :3] = 0
    arguments = {"attention_mask": mask, "max_new_tokens": 4, "do_sample": False, "pad_token_id": 0}
    tokens = [
        model.generate(ids, **arguments, cache_implementation=None if cache == "dynamic" else cache)
        for model in pair(device, eos_token_id=None)
    ]
    assert tokens[0].shape == (2, 12)
    assert torch.equal(*tokens)


@on_every_device
def test_heads_composed_in_place(device: str) -> None:
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 64}
    plain = LlamaForCausalLM(LlamaConfig(**sizes, num_hidden_layers=1, vocab_size=97, initializer_range=0.2)).eval()
    compose_heads_of(plain, implementation="eager")
    strengthen(plain)
    model = LlamaForCausalLM(plain.config).eval()
    compose_heads_of(model, implementation="triton")
    model.load_state_dict(plain.state_dict())
    ours, theirs = model.to(device), plain.to(device)
    torch.testing.assert_close(ours(IDS.to(device)).logits, theirs(IDS.to(device)).logits, atol=1e-4, rtol=1e-4)
    texts = [net.generate(IDS.to(device), max_new_tokens=3, do_sample=False, pad_token_id=0) for net in (ours, theirs)]
    assert torch.equal(*texts)


@pytest.mark.slow
@on_every_device
@pytest.mark.parametrize("fields", [{}, {"compose_static": True, "compose_groups": 3}], ids=str)
def test_gradients_of_all_parameters_with_checkpointing(fields: dict[str, Any], device: str) -> None:
    ours, theirs = pair(device, **fields)
    ours.train().gradient_checkpointing_enable()
    exact = gradients(copy.deepcopy(theirs).double())
    references = gradients(theirs)
    for name, gradient in gradients(ours).items():
        expected = exact[name]
        error, noise = ((one - expected).abs().max() for one in (gradient, references[name]))
        assert error <= 4 * noise + 1e-6 * expected.abs().max(), name


@on_every_device
def test_in_half_precision_tensor_cores_learn_as_exactly_as_eager(device: str) -> None:
    ours, theirs = pair(device, hidden_size=96, num_attention_heads=12)
    exact = gradients(copy.deepcopy(theirs).double())
    found = [gradients(model.bfloat16()) for model in (ours, theirs)]
    errors = [sum((one[name] - exact[name]).square().sum() for name in exact) for one in found]
    assert 0 < errors[0] <= 1.5**2 * errors[1]


@on_every_device
def test_packed_documents_do_not_see_each_other(device: str) -> None:
    positions = torch.tensor([[0, 1, 2, 3, 4, 0, 1, 2], [0, 1, 0, 1, 2, 3, 4, 5]], device=device)
    with torch.no_grad():
        ours, theirs = (model(IDS.to(device), position_ids=positions).logits for model in pair(device))
    torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_gradients_of_the_passes_of_an_update_add_up_in_cuda_graphs() -> None:
    accelerate = pytest.importorskip("accelerate")
    from dynattn.scripts.pretrain.engines.interface import Engine

    ours, theirs = pair("cuda", hidden_size=96, num_attention_heads=12)
    engine = Engine("ddp", accelerate.Accelerator(), cuda_graphs=True)
    compiled, optimizer = engine.prepare(ours, lambda model: torch.optim.SGD(model.parameters()), compiled=True)
    for _ in range(4):  # graphs are recorded in the second update
        engine.begin_update(compiled)
        for row in IDS.cuda().split(1):
            engine.backward(compiled(row, labels=row, use_cache=False).loss)
            theirs(row, labels=row, use_cache=False).loss.backward()
        for name, parameter in theirs.named_parameters():
            torch.testing.assert_close(ours.get_parameter(name).grad, parameter.grad, atol=1e-4, rtol=1e-3, msg=name)
        optimizer.zero_grad()
        theirs.zero_grad()


def shard_and_compare(rank: int, folder: str) -> None:
    from torch.distributed.fsdp import fully_shard

    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    mesh = dist.init_device_mesh("cpu", (2,))
    torch.manual_seed(1)
    fields = {"vocab_size": 97, "hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 4, **TINY}
    config = DCFormerConfig(**fields, initializer_range=0.2, compose_init_scale=40.0)
    whole = DCFormerForCausalLM._from_config(config, attn_implementation="eager")
    sharded = DCFormerForCausalLM._from_config(config, attn_implementation="triton")
    sharded.load_state_dict(whole.state_dict())
    for layer in sharded.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(sharded, mesh=mesh)
    sharded(IDS[rank : rank + 1], labels=IDS[rank : rank + 1]).loss.backward()
    expected = gradients(whole)  # the mean over both rows is the mean over processes
    for name, parameter in sharded.named_parameters():
        torch.testing.assert_close(parameter.grad.full_tensor(), expected[name], atol=1e-5, rtol=1e-4)
    dist.destroy_process_group()


@interpreted
@pytest.mark.slow
def test_two_processes_that_share_the_parameters_have_the_gradients_of_one(tmp_path: Path) -> None:
    torch.multiprocessing.spawn(shard_and_compare, (str(tmp_path),), nprocs=2)
