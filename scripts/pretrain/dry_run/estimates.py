"""`dynattn pretrain RECIPE --dry_run --on h100:64`: what the run would need, without data, weights or GPUs."""

import copy
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from ...common.checkpoint_loading import highest_id
from ...common.errors import UserError, in_one_line
from ...common.flops import ModelFlops
from ..arguments import PretrainArguments
from ..data.length_warmup import LengthWarmup
from ..data.tokenizer import load_tokenizer
from ..engines.choice import check_zero, obstacle_to_zero
from ..engines.sequence_groups import check_division
from ..model import checkpoint_activations_if_asked, count_parameters
from ..model_config import pad_vocabulary, plan_config
from ..optimizer import moment_bytes
from ..options.sweep import Sweep
from .hardware import Gpu, parse_cluster
from .memory import EngineMemory, ImaginedGroup, engine_memory, rehearse

ZERO = ("zero1", "zero2", "zero3")
ENGINES = ("ddp", *ZERO, "hsdp", "fsdp2")
# Measured in model_cards/records/benchmark-gpu/h100/training-405m (16 heads x 64, 2,048 tokens, without torch.compile):
# the share of the GPU's rate of matrix products that a plain model reached, and the time of a training step with
# composition, by `triton`, divided by the time of the plain one.
RECORDED_MFU, RECORDED_RATIO = 0.17, 2.1
# The composed op works on chunks of this many queries, and its backward pass holds this many maps of a chunk.
CHUNK_QUERIES, CHUNK_MAPS = 64, 5
# Implementations of attention whose operators a CPU has. In place of any other the default one is simulated.
SIMULATED = ("eager", "sdpa", "chunked")
HOURS_A_DAY = 24


class Estimate:
    """What a run would need.

    Attributes:
        parameters: parameters of the model.
        flops: FLOPs per token of a training step, averaged over a sequence that is one document.
        composition_share: the share of these FLOPs that composition needs.
        memory: memory of one process, for each engine that can make the run.
        precision: the dtype of matrix products.
        tokens_per_second: estimated speed of all GPUs together.
        tokens_per_update: tokens of all processes in an update.
        updates: number of updates; None if it depends on the data.
        runs: number of runs of a sweep, which are made one after the other.
    """

    def __init__(self, arguments: PretrainArguments, gpu: Gpu, count: int) -> None:
        """Counts FLOPs, runs an update on tensors without contents to measure its memory, and estimates the speed."""
        engines = possible_engines(arguments, count)
        config, bf16 = plan_config(arguments, expected_vocabulary(arguments)), arguments.mixed_precision == "bf16"
        model, length, sharing = _shapes_of(config), arguments.sequence_length, arguments.context_processes
        if count % sharing:
            raise UserError(f"context_processes={sharing} does not divide the {count} GPUs; give a divisor")
        plain = plain_flops(config, length)
        rehearsal = rehearse(
            lambda layers: _build(with_layers(config, layers), arguments),
            config.num_hidden_layers,
            arguments.batch_size,
            length,
            bf16=bf16,
            workspace=chunk_bytes(config, length),
            period=period_of(config),
            context=ImaginedGroup(sharing) if sharing > 1 else None,
        )
        averages = 0 if arguments.ema_decay is None else rehearsal.weights
        optimizer, group = moment_bytes(model, arguments) + averages, arguments.shard_processes or gpu.node
        rate = count * (gpu.bfloat16_rate if bf16 else gpu.float32_rate) * RECORDED_MFU / plain
        self.parameters, self.flops = count_parameters(model), _token_flops(model, length)
        self.composition_share = 1 - plain / self.flops
        self.memory = {
            name: engine_memory(name, rehearsal, count, group, bf16=bf16, optimizer=optimizer) for name in engines
        }
        self.precision = "bfloat16" if bf16 else "float32"
        self.tokens_per_second = rate / (RECORDED_RATIO if composes(config) else 1.0)
        batch = arguments.batch_size * arguments.gradient_accumulation_steps * (count // sharing)
        self.tokens_per_update = batch * length
        self.updates = arguments.max_steps
        self.runs = 1 if arguments.sweep is None else len(Sweep.parse(arguments.sweep).values)

    @property
    def days(self) -> float | None:
        """Days of training in all runs, without validation and saving; None if the number of updates is not known."""
        if self.updates is None:
            return None
        return self.runs * self.updates * self.tokens_per_update / self.tokens_per_second / 3600 / HOURS_A_DAY


def dry_run(arguments: PretrainArguments) -> str:
    """The estimate as text for the terminal; nothing is written, and only the configuration of `init_from` is read.

    Raises:
        UserError: the arguments name no model or GPU that is known, a model whose operations are not, or an engine
            that cannot make the run.
    """
    gpu, count = parse_cluster(arguments.on)
    return describe(Estimate(arguments, gpu, count), arguments, gpu, count)


def expected_vocabulary(arguments: PretrainArguments) -> dict[str, int]:
    """The `vocab_size` that the run would give a new model; empty where only a tokenizer of the Hub could tell it.

    A tokenizer that is trained on little text may have fewer tokens than it is allowed to. Some token of the vocabulary
    stands for padding, since the default of the model type, such as GLM-4's 151,329, may be beyond it.
    """
    if arguments.tokenizer == "bpe":
        needed = arguments.vocab_size
    elif arguments.init_from or arguments.tokenizer is None or not Path(arguments.tokenizer).is_dir():
        return {}
    else:
        needed = highest_id(load_tokenizer(arguments.tokenizer)) + 1
    return {"vocab_size": pad_vocabulary(needed), "pad_token_id": 0}


def possible_engines(arguments: PretrainArguments, count: int) -> list[str]:
    """Those of `ENGINES` that can make the run on `count` GPUs; a single process needs nothing of ZeRO's.

    Raises:
        UserError: the engine of the arguments is none of them.
    """
    if count == 1:
        return list(ENGINES)
    if arguments.engine in ZERO:
        check_zero(str(arguments.engine), arguments)
    return [name for name in ENGINES if name not in ZERO or obstacle_to_zero(name, arguments) is None]


def describe(found: Estimate, arguments: PretrainArguments, gpu: Gpu, count: int) -> str:
    """The estimate as text."""
    refused = [name for name in ZERO if name not in found.memory]
    lines = [
        f"model: {found.parameters.total:,} parameters, {found.parameters.non_embedding:,} of them not embeddings",
        f"operations: {found.flops / 1e9:,.2f} GFLOPs for each token of an update, {found.composition_share:.1%} of "
        "them for composition",
        f"update: {found.tokens_per_update:,} tokens on {count} x {gpu.name}",
        f"memory of a GPU in GiB, of {gpu.gib} (estimated):",
        f"  {'engine':8}{'weights':>9}{'gradients':>11}{'optimizer':>11}{'buffers':>9}{'activations':>13}{'total':>8}",
        *(_memory_line(name, memory, gpu) for name, memory in found.memory.items()),
        *([f"  {', '.join(refused)} cannot run this: {obstacle_to_zero(refused[0], arguments)}"] if refused else []),
        f"speed: {found.tokens_per_second:,.0f} tokens/s (an estimate: {RECORDED_MFU:.0%} of the GPU's FLOP/s in "
        f"{found.precision} for a plain model, {RECORDED_RATIO} times its time for a composed one, as one H100 took "
        "for the 405M shape without torch.compile)",
        *_time_lines(found, arguments, count),
    ]
    return "\n".join(lines)


def chunk_bytes(config: PreTrainedConfig, length: int) -> int:
    """Bytes of float32 maps that the composed op holds during its backward pass; 0 without composition."""
    return CHUNK_MAPS * config.num_attention_heads * min(CHUNK_QUERIES, length) * length * 4 if composes(config) else 0


def with_layers(config: PreTrainedConfig, layers: int) -> PreTrainedConfig:
    """The configuration of the same model with only its first `layers` layers."""
    short = copy.deepcopy(config)
    short.num_hidden_layers = layers
    if "layer_types" in vars(config):
        short.layer_types = config.layer_types[:layers]
    return short


def period_of(config: PreTrainedConfig) -> int:
    """After how many layers the pattern of `layer_types` repeats; the number of layers if it does not."""
    layers = config.num_hidden_layers
    kinds = getattr(config, "layer_types", None) or [None] * layers
    repeats = (n for n in range(1, layers) if layers % n == 0 and kinds[:n] * (layers // n) == list(kinds))
    return next(repeats, layers)


def composes(config: PreTrainedConfig) -> bool:
    """Whether a model of this configuration composes heads."""
    return bool(getattr(config, "composes", False))


def _shapes_of(config: PreTrainedConfig) -> PreTrainedModel:
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config)


def _build(config: PreTrainedConfig, arguments: PretrainArguments) -> PreTrainedModel:
    asked = arguments.attn_implementation
    options = {"attn_implementation": asked} if asked in SIMULATED else {}
    try:
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, **options)
    except ValueError as error:
        raise UserError(f"cannot build the model {config.model_type!r}: {in_one_line(error)}") from error
    if arguments.context_processes > 1:
        check_division(model, ImaginedGroup(arguments.context_processes), LengthWarmup.of(arguments).lengths)
    checkpoint_activations_if_asked(model, arguments)
    return model


def plain_flops(config: PreTrainedConfig, length: int) -> float:
    """FLOPs per token of a training step of the model without composition, for sequences of `length` tokens."""
    plain = copy.deepcopy(config)
    if composes(config):
        plain.compose_pre = plain.compose_post = plain.differential_heads = False
    return _token_flops(_shapes_of(plain), length)


def _token_flops(model: PreTrainedModel, length: int) -> float:
    try:
        flops = ModelFlops.of(model)
    except TypeError as error:
        raise UserError(f"a dry run counts operations, but {error}") from error
    return flops.training(torch.arange(length)) / length


def _memory_line(name: str, memory: EngineMemory, gpu: Gpu) -> str:
    parts = (memory.weights, memory.gradients, memory.optimizer, memory.buffers, memory.activations, memory.total)
    widths = (9, 11, 11, 9, 13, 8)
    cells = "".join(f"{part / 2**30:>{width}.1f}" for part, width in zip(parts, widths, strict=True))
    return f"  {name:8}{cells}{'' if memory.total < gpu.gib * 2**30 else '  does not fit'}"


def _time_lines(found: Estimate, arguments: PretrainArguments, count: int) -> list[str]:
    if found.days is None or found.updates is None:
        return ["time: give max_steps to estimate it; the number of updates is not known without the data"]
    tokens, gpu_hours = found.updates * found.tokens_per_update, found.days * HOURS_A_DAY * count
    each = f" in each of {found.runs} runs" if found.runs > 1 else ""
    lines = [f"time: {tokens:,} tokens in {found.updates:,} updates{each} take {found.days:,.2f} days (estimated)"]
    if (price := arguments.price_per_gpu_hour) is None:
        return [*lines, f"cost: {gpu_hours:,.0f} GPU hours; give price_per_gpu_hour for a sum"]
    return [*lines, f"cost: {gpu_hours:,.0f} GPU hours at {price:g} are {gpu_hours * price:,.0f} (estimated)"]
