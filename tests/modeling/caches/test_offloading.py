"""Offloading caches, whose layers are on the host between their uses."""

from contextlib import nullcontext
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from cases.models import make_model
from cases.seq2seq import make_model as make_seq2seq
from cases.triton_marks import on_gpu
from transformers import PreTrainedModel
from transformers.cache_utils import DynamicCache

from dynattn import RCMHAConfig, RCMHAForCausalLM
from dynattn.modeling.caches import offloading
from dynattn.modeling.caches.offloading import await_copies, read_layer
from dynattn.modeling.layers import composed_attention, relative_attention
from dynattn.modeling.positions.carope import last_phases


def make_rcmha() -> RCMHAForCausalLM:
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4}
    return RCMHAForCausalLM(RCMHAConfig(vocab_size=97, initializer_range=0.2, **sizes)).eval()


MODELS = {
    "composed": make_model,
    "carope": lambda: make_model(position_scheme="carope"),
    "rcmha": make_rcmha,
    "rcmha_seq2seq": lambda: make_seq2seq("rcmha"),
    "dcbart": lambda: make_seq2seq("dcbart"),
}


class RecordedStream:
    """Notes for which other stream it waits."""

    def __init__(self) -> None:
        self.waited: list[object] = []

    def wait_stream(self, other: object) -> None:
        self.waited.append(other)


def test_the_device_and_the_copies_of_an_offloading_cache_wait_for_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    computation, copies = RecordedStream(), RecordedStream()
    monkeypatch.setattr(torch.cuda, "default_stream", lambda _: computation)
    cache: Any = SimpleNamespace(offloading=True, prefetch_stream=copies)
    await_copies(cache, torch.device("cuda"))
    assert (computation.waited, copies.waited) == ([copies], [computation])
    for other in (None, DynamicCache(), SimpleNamespace(offloading=False, prefetch_stream=copies)):
        await_copies(other, torch.device("cuda"))
    await_copies(cache, torch.device("cpu"))
    assert (computation.waited, copies.waited) == ([copies], [computation])


@pytest.mark.parametrize("name", ["composed", "carope", "rcmha", "rcmha_seq2seq", "dcbart"])
def test_every_update_waits(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    events: list[str] = []
    update = DynamicCache.update
    monkeypatch.setattr(offloading, "await_copies", lambda *_: events.append("waited"))
    monkeypatch.setattr(DynamicCache, "update", lambda *given: (events.append("updated"), update(*given))[1])
    MODELS[name]().generate(torch.arange(1, 20)[None], max_new_tokens=2)  # type: ignore[operator]
    before_updates = {events[place - 1] for place, event in enumerate(events) if event == "updated"}
    assert before_updates == {"waited"}


@pytest.mark.parametrize(
    ("name", "module", "reader"),
    [
        ("carope", composed_attention, "last_phases"),
        ("rcmha", relative_attention.RCMHAAttention, "_project"),
    ],
)
def test_layers_wait_before_they_read(
    monkeypatch: pytest.MonkeyPatch, name: str, module: ModuleType, reader: str
) -> None:
    events: list[str] = []
    read = getattr(module, reader)
    layers = composed_attention if name == "carope" else relative_attention
    monkeypatch.setattr(layers, "await_copies", lambda *_: events.append("waited"))
    monkeypatch.setattr(module, reader, lambda *given, **named: (events.append("read"), read(*given, **named))[1])
    with torch.no_grad():
        MODELS[name]()(torch.arange(1, 6)[None], use_cache=True)
    per_layer = ["waited", "read"] if read is last_phases else ["waited", *3 * ["read"]]
    assert events == 3 * per_layer


class NoStream(nullcontext):
    """In the place of CUDA's streams, without which Transformers makes no offloading cache."""

    def wait_stream(self, other: object) -> None:
        pass


def test_a_layer_is_read_on_the_device_and_stays_on_the_host() -> None:
    cache = DynamicCache()
    cache.update(torch.ones(1, 2, 3, 4), torch.ones(1, 2, 3, 4), 0)
    assert all(one.device.type == "meta" for one in read_layer(cache, 0, torch.device("meta")))
    layer: Any = cache.layers[0]
    assert layer.keys.device.type == layer.values.device.type == "cpu"
    assert read_layer(cache, 0, torch.device("cpu"))[0] is layer.keys


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=on_gpu)])
@pytest.mark.parametrize("name", MODELS)
def test_an_offloaded_cache_changes_no_token(name: str, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU nothing is moved, but all that moves a cache is called."""
    if device == "cpu":
        monkeypatch.setattr(torch, "Stream", NoStream)
        monkeypatch.setattr(torch.cuda, "default_stream", lambda _: NoStream())
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    model: PreTrainedModel = MODELS[name]().to(device)
    given = {"inputs": torch.arange(1, 20, device=device)[None], "max_new_tokens": 30, "do_sample": False}
    expected = model.generate(**given)  # type: ignore[operator]
    offloaded = model.generate(**given, cache_implementation="offloaded")  # type: ignore[operator]
    assert torch.equal(offloaded, expected)
