"""A small DCFormer as a whole: a training step, and reading a prompt into the cache."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from dynattn import DCFormerConfig, DCFormerForCausalLM
from dynattn.modeling.ops.dcmha import COMPOSING

from .accuracy import Results
from .arguments import Settings
from .attention import self_compiling
from .contest import COMPILED, Case, Contestant, Role, Subject
from .flops import attention_flops, projection_flops
from .problem import COMPOSED, PLAIN
from .shapes import Shape

LAYERS, VOCABULARY = 2, 2048
# Weights large enough that composition and attention matter: an error in either then shows in the logits.
INITIAL = {"initializer_range": 0.05, "compose_init_scale": 20.0}
UNCOMPOSED = {"compose_pre": False, "compose_post": False}


class ModelProblem(NamedTuple):
    """Tokens `[B, T]`, the weights of each function in the dtype measured, and how to build a model for them."""

    tokens: Tensor
    weights: dict[str, dict[str, Tensor]]
    config: dict[str, Any]
    dtype: torch.dtype

    def model(self, function: str, implementation: str, dtype: torch.dtype | None = None) -> nn.Module:
        """A model with the problem's weights."""
        composition = UNCOMPOSED if function == PLAIN else {}
        settings = {**self.config, **composition, "attn_implementation": implementation}
        with torch.device(self.tokens.device):
            model: nn.Module = DCFormerForCausalLM(DCFormerConfig(**settings))
        model.load_state_dict(self.weights[function])
        return model.to(dtype or self.dtype)


Step = Callable[[nn.Module, Tensor], Callable[[], Results]]


def contestants(device: torch.device, *, step: Step) -> list[Contestant]:
    """Every composing implementation that models can be asked for, and the same model without composition."""
    usable = [name for name in COMPOSING if name == "eager" or name in ALL_ATTENTION_FUNCTIONS]
    entries: list[tuple[str, Role, str, str]] = [(name, "ours", COMPOSED, name) for name in usable]
    entries += [(f"{name}{COMPILED}", "ours", COMPOSED, name) for name in usable if name != "eager"]
    entries += [("sdpa", "plain", PLAIN, "sdpa"), ("matmul", "plain", PLAIN, "eager")]

    def prepare(problem: ModelProblem, function: str, implementation: str, compiles: bool) -> Callable[[], Results]:
        run = step(problem.model(function, implementation), problem.tokens)
        return self_compiling(compiles)(run)

    return [
        Contestant(
            name,
            role,
            function,
            partial(prepare, function=function, implementation=implementation, compiles=name.endswith(COMPILED)),
        )
        for name, role, function, implementation in entries
    ]


def training_step(model: nn.Module, tokens: Tensor) -> Callable[[], Results]:
    """Forward, loss, backward and AdamW; a learning rate of 0 lets it do all its work and leave the weights alone."""
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0, weight_decay=0.0)

    def step() -> Results:
        optimizer.zero_grad(set_to_none=True)
        outputs = model(input_ids=tokens, labels=tokens, use_cache=False)
        outputs.loss.backward()
        optimizer.step()
        gradients = {f"grad {name}": weight.grad for name, weight in model.named_parameters()}
        return {"output": outputs.logits.detach(), **gradients}

    return step


def prefill_step(model: nn.Module, tokens: Tensor) -> Callable[[], Results]:
    """One pass over the prompt that fills a new cache and gives the last token's logits."""
    model.eval()

    def step() -> Results:
        with torch.no_grad():
            return {"output": model(input_ids=tokens, use_cache=True, logits_to_keep=1).logits}

    return step


def make_problem(shape: Shape, settings: Settings) -> ModelProblem:
    """Random tokens and weights; the uncomposed model has the composed one's weights without the generators'."""
    hidden = shape.heads * shape.width
    config: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "hidden_size": hidden,
        "intermediate_size": 8 * hidden // 3,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": shape.heads,
        "max_position_embeddings": shape.length,
        "sliding_window": settings.window,
        "layer_types": ["full_attention" if settings.window is None else "sliding_attention"] * LAYERS,
        **INITIAL,
    }
    torch.manual_seed(settings.seed)
    drawn = DCFormerForCausalLM(DCFormerConfig(**config)).state_dict()
    weights = {name: weight.to(settings.device, settings.dtype) for name, weight in drawn.items()}
    plain = {name: weight for name, weight in weights.items() if ".composition." not in name}
    tokens = torch.randint(VOCABULARY, (settings.batch_size, shape.length)).to(settings.device)
    return ModelProblem(tokens, {COMPOSED: weights, PLAIN: plain}, config, settings.dtype)


def cases(shape: Shape, settings: Settings, *, step: Step) -> Iterator[Case]:
    """One case."""
    problem = make_problem(shape, settings)
    trains = step is training_step
    head = 2 * shape.heads * shape.width * VOCABULARY  # FLOPs of a token's logits

    def flops(function: str) -> float:
        attention = LAYERS * attention_flops(shape, settings.window, function)
        projections = projection_flops(problem.model(function, "eager")) * shape.length
        unread = 0 if trains else head * (shape.length - 1)
        return settings.batch_size * (attention + projections - unread) * (3 if trains else 1)

    yield Case(
        passes="forward+backward" if trains else "forward",
        problem=problem,
        truth=lambda function, dtype: step(problem.model(function, "eager", dtype), problem.tokens)(),
        flops=flops,
        tokens=problem.tokens.numel(),
    )


TRAINING, PREFILL = (
    Subject(
        name=name,
        function=COMPOSED,
        shapes=("16x64@512", "16x64@2048"),
        quick_shapes=("4x32@256",),
        contestants=partial(contestants, step=step),
        cases=partial(cases, step=step),
    )
    for name, step in (("training", training_step), ("prefill", prefill_step))
)
