"""One token through a whole model: with a static cache, eager and compiled, and with a cache that grows."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, StaticCache

from dynattn.modeling.caches.names import named_cache
from dynattn.modeling.ops.dcmha.attention import COMPOSING_IMPLEMENTATIONS

from ..harness.accuracy import Results
from ..harness.inputs import COMPOSED, PLAIN
from ..harness.interface import COMPILED, Candidate, Case, Role, Subject
from ..harness.settings import BenchmarkSettings
from ..harness.shapes import Shape
from .models import IN_PLACE, QUICK_SHAPES, ModelProblem, Step, make_case, make_problem

# The ending of candidates whose cache grows with every token, as that of `generate` does by default.
DYNAMIC = "-dynamic"


def candidates(device: torch.device) -> list[Candidate]:
    """The model with every composing implementation, and without composition, each eager and compiled."""
    entries: list[tuple[str, Role, str, str]] = [(name, "ours", COMPOSED, name) for name in COMPOSING_IMPLEMENTATIONS]
    entries += [("sdpa", "plain", PLAIN, "sdpa"), ("matmul", "plain", PLAIN, "eager")]
    entries += [(IN_PLACE, "ours", COMPOSED, IN_PLACE)] if device.type == "cpu" else []
    found = []
    for name, role, function, implementation in entries:
        for ending, step in STEPS.items():
            # The step fills its cache before the clock starts.
            prepare = partial(ModelProblem.call, function=function, implementation=implementation, step=step)
            found.append(Candidate(name + ending, role, function, prepare))
    return found


def token_step(model: Any, tokens: Tensor, *, compiles: bool = False) -> Callable[[], Results]:
    """A step that processes the last of `tokens` `[B, T]`, with all earlier ones in a cache of exactly `T` slots."""
    model.eval()
    length = tokens.shape[1]
    cache = StaticCache(config=model.config, max_cache_len=length)
    with torch.no_grad():
        model(input_ids=tokens[:, :-1], **named_cache(cache))
    forward = torch.compile(model.forward) if compiles else model.forward
    composed = [layer.factors for layer in cache.layers if hasattr(layer, "factors")]
    counts = [vars(layer)["cumulative_length"] for layer in (*cache.layers, *composed)]

    def step() -> Results:
        for count in counts:
            count.fill_(length - 1)
        with torch.no_grad():
            return {"output": forward(input_ids=tokens[:, -1:], **named_cache(cache)).logits}

    return step


def growing_step(model: Any, tokens: Tensor) -> Callable[[], Results]:
    """`token_step` with a cache that grows by the last of `tokens` `[B, T]`, and then loses it again."""
    model.eval()
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        model(input_ids=tokens[:, :-1], **named_cache(cache))

    def step() -> Results:
        with torch.no_grad():
            logits = model(input_ids=tokens[:, -1:], **named_cache(cache)).logits
        cache.crop(-1)
        return {"output": logits}

    return step


STEPS: dict[str, Step] = {"": token_step, COMPILED: partial(token_step, compiles=True), DYNAMIC: growing_step}


def cases(shape: Shape, settings: BenchmarkSettings) -> Iterator[Case]:
    """One case.

    Raises:
        ValueError: there is a single token, so that none is in the cache.
    """
    if shape.length < 2:
        raise ValueError("its last token needs others before it, which are in the cache; give 2 tokens or more")
    problem = make_problem(shape, settings, token_step, settings.layers)
    yield make_case(problem, settings, logits=1, first=shape.length - 1)


STEP = Subject(
    name="step",
    function=COMPOSED,
    shapes=("16x64@2048",),
    quick_shapes=QUICK_SHAPES,
    candidates=candidates,
    cases=cases,
)
