"""A DCFormer: one block, a training step of the whole model, and prefill of a cache."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import cache, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import Qwen3Config, Qwen3ForCausalLM

from dynattn import DCFormerConfig, DCFormerForCausalLM, with_composed_heads
from dynattn.configuration.composed_config import repeat_layer_types
from dynattn.configuration.mixers import NO_COMPOSITION
from dynattn.modeling.common.activation_checkpointing import checkpoint_activations

from ...common.flops import ModelFlops
from ..baselines.dcmha import IN_MODELS
from ..harness.accuracy import Results, with_gradients
from ..harness.inputs import COMPOSED, PLAIN
from ..harness.interface import GLOBAL, GRAPH, Candidate, Case, Role, Subject, passes_of
from ..harness.settings import BenchmarkSettings
from ..harness.shapes import Shape
from .attention import compiling_as, ours

# Weights large enough that an error in composition or attention shows in the logits.
INITIALIZATION = {"initializer_range": 0.05, "compose_init_scale": 20.0}
NO_WINDOW = {"sliding_window": None, "layer_types": None}
PLAIN_GLOBAL = PLAIN + GLOBAL
FUNCTIONS: dict[str, dict[str, Any]] = {COMPOSED: {}, PLAIN: NO_COMPOSITION, PLAIN_GLOBAL: NO_COMPOSITION | NO_WINDOW}
# A Qwen3 whose heads are composed in place: its weights and results are those of a DCFormer.
IN_PLACE = "in-place"
QWEN3_FIELDS = (
    *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "layer_types", "sliding_window"),
    *("num_attention_heads", "num_key_value_heads", "head_dim"),
    *("max_position_embeddings", "rope_parameters", "rms_norm_eps"),
)
# Candidates that a GPU also runs in CUDA graphs.
IN_GRAPHS = ("triton", "sdpa", f"sdpa{GLOBAL}")
# The number of last tokens whose logits are compared with the reference.
COMPARED = 256
# The reference op holds a few maps of all pairs at a time, and keeps dozens of them for the backward pass of a layer.
# If one map of one layer has more elements than this, the reference is `chunked`, which is tested against the reference
# op. If the maps of all layers, one for each, together have more, the backward pass recomputes layers.
REFERENCE, LARGE_REFERENCE = "eager", "chunked"
FORWARD_ELEMENTS, BACKWARD_ELEMENTS = 1 << 28, 1 << 25


class ModelProblem(NamedTuple):
    """What the candidates of the model subjects share.

    Attributes:
        weights: of each function, in the dtype that is measured.
        config: arguments of the configuration that all functions share, the implementation excepted.
        functions: those of each function.
        step: makes the call that is timed from a model and the tokens.
    """

    tokens: Tensor  # [B, T]
    weights: dict[str, dict[str, Tensor]]
    config: dict[str, Any]
    functions: Mapping[str, dict[str, Any]]
    dtype: torch.dtype
    step: "Step"
    backward: bool

    def model(self, function: str, implementation: str | None, dtype: torch.dtype | None = None) -> Any:
        """A model with the problem's weights; its implementation is the configuration's own choice if it is None."""
        model: Any
        is_baseline = implementation in IN_MODELS
        settings = {**self.config, **self.functions[function]}
        settings["attn_implementation"] = REFERENCE if is_baseline else implementation
        with torch.device(self.tokens.device):
            model = (
                in_place(settings) if implementation == IN_PLACE else DCFormerForCausalLM(DCFormerConfig(**settings))
            )
        if is_baseline:  # the model class refuses implementations that are not its own
            model.config._attn_implementation = implementation
        model.load_state_dict(self.weights[function])
        return model.to(dtype or self.dtype)

    def call(self, function: str, implementation: str | None, step: "Step | None" = None) -> Callable[[], Results]:
        """The call that is timed, of the problem's own step or of another one."""
        return (step or self.step)(self.model(function, implementation), self.tokens)

    def reference(self, function: str, dtype: torch.dtype) -> Results:
        """Results of the model with the reference op in a dtype."""
        batch, length = self.tokens.shape
        elements = batch * self.config["num_attention_heads"] * length**2
        limit = BACKWARD_ELEMENTS if self.backward else FORWARD_ELEMENTS
        model = self.model(function, LARGE_REFERENCE if elements > limit else REFERENCE, dtype)
        if self.backward and elements * self.config["num_hidden_layers"] > limit:
            checkpoint_activations(model)
        # By PyTorch's operators alone: compiled code is what the reference judges.
        return compiling_as("0")(self.step(model, self.tokens))()

    def flops(self, function: str, positions: Tensor, logits: int) -> float:
        """FLOPs of a forward pass over tokens at `positions` `[N]` of each sequence, `logits` of which get logits."""
        return len(self.tokens) * ModelFlops.of(self.model(function, REFERENCE)).forward(positions, logits)


Step = Callable[[Any, Tensor], Callable[[], Results]]


def in_place(settings: dict[str, Any]) -> Any:
    """The model of `IN_PLACE` with the sizes of a DCFormer that has these arguments of its configuration."""
    config = DCFormerConfig(**{**settings, "attn_implementation": None})
    composed = with_composed_heads(Qwen3ForCausalLM, compose_rank=config.compose_rank)
    return composed(Qwen3Config(**{name: getattr(config, name) for name in QWEN3_FIELDS}, use_sliding_window=True))


def candidates(device: torch.device) -> list[Candidate]:
    """The model with every composing implementation, in the official style, and without composition."""
    found = [make_candidate(name, "ours", COMPOSED, implementation, mode) for name, implementation, mode in ours()]
    found += [make_candidate("sdpa", "plain", PLAIN, "sdpa"), make_candidate("matmul", "plain", PLAIN, "eager")]
    found += [make_candidate(f"sdpa{GLOBAL}", "plain", PLAIN_GLOBAL, "sdpa")]
    if device.type == "cpu":  # on a GPU time is short, and attention is the same
        found.append(make_candidate(IN_PLACE, "ours", COMPOSED, IN_PLACE))
    return found + [make_candidate(name, "other", COMPOSED, name) for name in IN_MODELS]


def make_candidate(name: str, role: Role, function: str, implementation: str, mode: str = "auto") -> Candidate:
    """A model with an implementation; `mode` is what our op compiles."""

    def prepare(problem: ModelProblem) -> Callable[[], Results]:
        return compiling_as(mode)(problem.call(function, implementation))

    return Candidate(name, role, function, prepare)


def training_candidates(device: torch.device) -> list[Candidate]:
    """The candidates of all subjects on models and, on a GPU, compiled models that replay CUDA graphs."""
    found = candidates(device)
    return found + [in_graphs(one) for one in found if device.type == "cuda" and one.name in IN_GRAPHS]


def in_graphs(candidate: Candidate) -> Candidate:
    """A candidate whose model is compiled and replays CUDA graphs."""

    def prepare(problem: ModelProblem) -> Callable[[], Results]:
        def step(model: Any, tokens: Tensor) -> Callable[[], Results]:
            model.compile(mode="reduce-overhead")
            return problem.step(model, tokens)

        return candidate.prepare(problem._replace(step=step))

    return replace(candidate, name=f"{candidate.name}{GRAPH}", prepare=prepare)


def training_step(model: Any, tokens: Tensor) -> Callable[[], Results]:
    """Forward, loss, backward and AdamW on `tokens` `[B, T]`; the learning rate is 0, so that weights stay the same."""
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0, weight_decay=0.0)

    def step() -> Results:
        outputs = model(input_ids=tokens, labels=tokens, use_cache=False)
        outputs.loss.backward()
        optimizer.step()
        gradients = {f"grad {name}": weight.grad for name, weight in model.named_parameters()}
        optimizer.zero_grad(set_to_none=True)  # here, so that no gradient is in memory before the next step
        return {"output": outputs.logits[:, -COMPARED:].detach().clone(), **gradients}

    return step


def prefill_step(model: Any, tokens: Tensor) -> Callable[[], Results]:
    """One pass over the prompt `tokens` `[B, T]` that fills a new cache and computes the last token's logits."""
    model.eval()

    def step() -> Results:
        with torch.no_grad():
            return {"output": model(input_ids=tokens, use_cache=True, logits_to_keep=1).logits}

    return step


def block_step(model: Any, tokens: Tensor, *, backward: bool) -> Callable[[], Results]:
    """The decoder on the embeddings of `tokens` `[B, T]`, without its head: a single layer and the final norm."""
    decoder = model.model.train()
    rows = decoder.embed_tokens(tokens).detach().requires_grad_(backward)
    weights = {name: weight for name, weight in decoder.named_parameters() if not name.startswith("embed_tokens")}
    leaves = {"hidden_states": rows, **weights}

    def step() -> Results:
        with torch.set_grad_enabled(backward):
            output = decoder(inputs_embeds=rows, use_cache=False).last_hidden_state
        if not backward:
            return {"output": output}
        return with_gradients(output, leaves, rows.detach())

    return step


def make_problem(
    shape: Shape,
    settings: BenchmarkSettings,
    step: Step,
    layers: int,
    *,
    backward: bool = False,
    functions: Mapping[str, dict[str, Any]] = FUNCTIONS,
) -> ModelProblem:
    """Random tokens and weights; the models of all `functions` have those of the composed one that they know."""
    hidden = shape.heads * shape.width
    config: dict[str, Any] = {
        "vocab_size": settings.vocabulary,
        "hidden_size": hidden,
        "intermediate_size": 128 * -(-8 * hidden // 384),  # 8/3 of the width, aligned as GPUs like it
        "num_hidden_layers": layers,
        "num_attention_heads": shape.heads,
        "max_position_embeddings": shape.length,
        "sliding_window": settings.window,
        "layer_types": repeat_layer_types("G" if settings.window is None else settings.layer_types, layers),
        **INITIALIZATION,
    }
    torch.manual_seed(settings.seed)
    drawn = DCFormerForCausalLM(DCFormerConfig(**config)).state_dict()
    tokens = torch.randint(settings.vocabulary, (settings.batch_size, shape.length)).to(settings.device)
    weights: dict[str, dict[str, Tensor]] = {}
    for function, fields in functions.items():
        own = DCFormerForCausalLM(DCFormerConfig(**config | fields)).state_dict()
        shared = {name: drawn.get(name, weight) for name, weight in own.items()}
        weights[function] = {name: weight.to(settings.device, settings.dtype) for name, weight in shared.items()}
    return ModelProblem(tokens, weights, config, functions, settings.dtype, step, backward)


def make_case(problem: ModelProblem, settings: BenchmarkSettings, *, logits: int, first: int = 0) -> Case:
    """A case of a step over the tokens of each sequence from `first` on; the last `logits` of them get logits."""
    batch, length = problem.tokens.shape
    positions, passes = torch.arange(first, length), 3 if problem.backward else 1
    return Case(
        passes=passes_of(problem.backward),
        problem=problem,
        reference=problem.reference,
        flops=cache(lambda function: problem.flops(function, positions, logits) * passes),
        tokens=batch * len(positions),
        window=settings.window,
        note="" if settings.layer_types == "L" else f"layers {settings.layer_types}",
    )


def training_cases(shape: Shape, settings: BenchmarkSettings) -> Iterator[Case]:
    """One case."""
    problem = make_problem(shape, settings, training_step, settings.layers, backward=True)
    yield make_case(problem, settings, logits=shape.length)


def prefill_cases(shape: Shape, settings: BenchmarkSettings) -> Iterator[Case]:
    """One case."""
    yield make_case(make_problem(shape, settings, prefill_step, settings.layers), settings, logits=1)


def block_cases(
    shape: Shape, settings: BenchmarkSettings, functions: Mapping[str, dict[str, Any]] = FUNCTIONS
) -> Iterator[Case]:
    """Forward, then forward with backward."""
    for backward in (False, True):
        step = partial(block_step, backward=backward)
        problem = make_problem(shape, settings, step, layers=1, backward=backward, functions=functions)
        yield make_case(problem, settings, logits=0)


QUICK_SHAPES = ("4x32@256",)
BLOCK = Subject("block", COMPOSED, ("16x64@512", "32x128@512"), QUICK_SHAPES, candidates, block_cases)
# No more than 1,024 tokens by default: every candidate keeps its model, and some keep maps of all pairs of tokens.
TRAINING = Subject("training", COMPOSED, ("16x64@512", "16x64@1024"), QUICK_SHAPES, training_candidates, training_cases)
PREFILL = Subject("prefill", COMPOSED, ("16x64@512", "16x64@2048"), QUICK_SHAPES, candidates, prefill_cases)
