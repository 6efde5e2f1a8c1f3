"""A DCFormer: one block, a training step of the whole, and reading a prompt into the cache."""

from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from dynattn import DCFormerConfig, DCFormerForCausalLM
from dynattn.modeling.ops.dcmha.attention import COMPOSING

from ...common.flops import ModelFlops
from ..baselines.dcmha import IN_MODELS
from ..harness.accuracy import Results
from ..harness.contest import Case, Contestant, Role, Subject
from ..harness.inputs import COMPOSED, PLAIN
from ..harness.settings import Settings
from ..harness.shapes import Shape
from .attention import ours, self_compiling

# Weights large enough that composition and attention matter: an error in either then shows in the logits.
INITIAL = {"initializer_range": 0.05, "compose_init_scale": 20.0}
UNCOMPOSED = {"compose_pre": False, "compose_post": False}
# The last tokens, whose logits are compared with the truth.
COMPARED = 256
# For a backward pass the reference op keeps maps of all pairs, some 40 of each layer. Where those of a layer have more
# entries than this (10 GB in float64), the truth is that of a path checked against it; where those of all layers have,
# layers are computed again.
REFERENCE, REFERENCE_ENTRIES, LARGE_REFERENCE = "eager", 1 << 25, "chunked"


class ModelProblem(NamedTuple):
    """Tokens `[B, T]`, weights of each function in the dtype measured, how to build a model, and what it then does."""

    tokens: Tensor
    weights: dict[str, dict[str, Tensor]]
    config: dict[str, Any]
    dtype: torch.dtype
    step: "Step"
    backward: bool

    def model(self, function: str, implementation: str, dtype: torch.dtype | None = None) -> Any:
        """A model with the problem's weights."""
        composition = UNCOMPOSED if function == PLAIN else {}
        foreign = implementation in IN_MODELS
        settings = {**self.config, **composition, "attn_implementation": REFERENCE if foreign else implementation}
        with torch.device(self.tokens.device):
            model: Any = DCFormerForCausalLM(DCFormerConfig(**settings))
        if foreign:
            model.config._attn_implementation = implementation  # asking for it, models refuse all but their own
        model.load_state_dict(self.weights[function])
        return model.to(dtype or self.dtype)

    def truth(self, function: str, dtype: torch.dtype) -> Results:
        """What the reference op gives in a dtype."""
        batch, length = self.tokens.shape
        kept = batch * self.config["num_attention_heads"] * length**2 if self.backward else 0
        model = self.model(function, LARGE_REFERENCE if kept > REFERENCE_ENTRIES else REFERENCE, dtype)
        if kept * self.config["num_hidden_layers"] > REFERENCE_ENTRIES:
            model.gradient_checkpointing_enable()
        return self.step(model, self.tokens)()

    def flops(self, function: str, logits: int) -> float:
        """FLOPs of a forward pass that gives the logits of as many tokens of each sequence."""
        batch, length = self.tokens.shape
        head = 2 * self.config["hidden_size"] * self.config["vocab_size"]
        all_logits = ModelFlops.of(self.model(function, REFERENCE)).forward(torch.arange(length))
        return batch * (all_logits - head * (length - logits))


Step = Callable[[Any, Tensor], Callable[[], Results]]


def contestants(device: torch.device) -> list[Contestant]:
    """Every composing implementation that models can be asked for, the official style, and without composition."""
    usable = [name for name in COMPOSING if name == "eager" or name in ALL_ATTENTION_FUNCTIONS]
    entries: list[tuple[str, Role, str, str, str]] = [
        (name, "ours", COMPOSED, implementation, mode) for name, implementation, mode in ours(usable)
    ]
    entries += [("sdpa", "plain", PLAIN, "sdpa", "auto"), ("matmul", "plain", PLAIN, "eager", "auto")]
    entries += [(name, "other", COMPOSED, name, "auto") for name in IN_MODELS]

    def prepare(problem: ModelProblem, function: str, implementation: str, mode: str) -> Callable[[], Results]:
        run = problem.step(problem.model(function, implementation), problem.tokens)
        return self_compiling(mode)(run)

    return [
        Contestant(name, role, function, partial(prepare, function=function, implementation=implementation, mode=mode))
        for name, role, function, implementation, mode in entries
    ]


def training_step(model: Any, tokens: Tensor) -> Callable[[], Results]:
    """Forward, loss, backward and AdamW; a learning rate of 0 lets it do all its work and leave the weights alone."""
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0, weight_decay=0.0)

    def step() -> Results:
        optimizer.zero_grad(set_to_none=True)
        outputs = model(input_ids=tokens, labels=tokens, use_cache=False)
        outputs.loss.backward()
        optimizer.step()
        gradients = {f"grad {name}": weight.grad for name, weight in model.named_parameters()}
        return {"output": outputs.logits[:, -COMPARED:].detach().clone(), **gradients}

    return step


def prefill_step(model: Any, tokens: Tensor) -> Callable[[], Results]:
    """One pass over the prompt that fills a new cache and gives the last token's logits."""
    model.eval()

    def step() -> Results:
        with torch.no_grad():
            return {"output": model(input_ids=tokens, use_cache=True, logits_to_keep=1).logits}

    return step


def block_step(model: Any, tokens: Tensor, *, backward: bool) -> Callable[[], Results]:
    """The decoder without embedding and head: a single layer and the norm behind it."""
    decoder = model.model.train()
    rows = decoder.embed_tokens(tokens).detach().requires_grad_(backward)
    weights = {name: weight for name, weight in decoder.named_parameters() if not name.startswith("embed_tokens")}
    leaves = {"hidden_states": rows, **weights}

    def step() -> Results:
        with torch.set_grad_enabled(backward):
            output = decoder(inputs_embeds=rows, use_cache=False).last_hidden_state
        if not backward:
            return {"output": output}
        gradients = torch.autograd.grad(output, list(leaves.values()), rows.detach())
        named = {f"grad {name}": one for name, one in zip(leaves, gradients, strict=True)}
        return {"output": output.detach(), **named}

    return step


def make_problem(shape: Shape, settings: Settings, step: Step, layers: int, *, backward: bool = False) -> ModelProblem:
    """Random tokens and weights; the uncomposed model has the composed one's weights without the generators'."""
    hidden = shape.heads * shape.width
    config: dict[str, Any] = {
        "vocab_size": settings.vocabulary,
        "hidden_size": hidden,
        "intermediate_size": 128 * -(-8 * hidden // 384),  # 8/3 of the width, aligned as GPUs like it
        "num_hidden_layers": layers,
        "num_attention_heads": shape.heads,
        "max_position_embeddings": shape.length,
        "sliding_window": settings.window,
        "layer_types": ["full_attention" if settings.window is None else "sliding_attention"] * layers,
        **INITIAL,
    }
    torch.manual_seed(settings.seed)
    drawn = DCFormerForCausalLM(DCFormerConfig(**config)).state_dict()
    weights = {name: weight.to(settings.device, settings.dtype) for name, weight in drawn.items()}
    plain = {name: weight for name, weight in weights.items() if ".composition." not in name}
    tokens = torch.randint(settings.vocabulary, (settings.batch_size, shape.length)).to(settings.device)
    return ModelProblem(tokens, {COMPOSED: weights, PLAIN: plain}, config, settings.dtype, step, backward)


def case(problem: ModelProblem, settings: Settings, *, logits: int) -> Case:
    """A case of a step that needs the logits of as many tokens of each sequence."""
    return Case(
        passes="forward+backward" if problem.backward else "forward",
        problem=problem,
        truth=problem.truth,
        flops=cache(lambda function: problem.flops(function, logits) * (3 if problem.backward else 1)),
        tokens=problem.tokens.numel(),
        window=settings.window,
    )


def training_cases(shape: Shape, settings: Settings) -> Iterator[Case]:
    """One case."""
    problem = make_problem(shape, settings, training_step, settings.layers, backward=True)
    yield case(problem, settings, logits=shape.length)


def prefill_cases(shape: Shape, settings: Settings) -> Iterator[Case]:
    """One case."""
    yield case(make_problem(shape, settings, prefill_step, settings.layers), settings, logits=1)


def block_cases(shape: Shape, settings: Settings) -> Iterator[Case]:
    """Forward, then forward with backward."""
    for backward in (False, True):
        problem = make_problem(shape, settings, partial(block_step, backward=backward), layers=1, backward=backward)
        yield case(problem, settings, logits=0)


def subject(name: str, cases: Callable[[Shape, Settings], Iterator[Case]], shapes: Sequence[str]) -> Subject:
    """A subject on models; all have the same contestants."""
    return Subject(name, COMPOSED, shapes, ("4x32@256",), contestants, cases)


BLOCK = subject("block", block_cases, ("16x64@512", "32x128@512"))
# With 2,048 tokens all contestants together grew beyond 22 GB: each keeps its model, and some keep maps of all pairs.
TRAINING = subject("training", training_cases, ("16x64@512", "16x64@1024"))
PREFILL = subject("prefill", prefill_cases, ("16x64@512", "16x64@2048"))
