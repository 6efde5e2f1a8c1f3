"""Which engine a run uses: the one of `--engine`, or the one that `accelerate launch` was configured for."""

import logging
import os
from collections.abc import Mapping, MutableMapping

from accelerate import Accelerator

from ...common.errors import UserError, first_line
from ..arguments import PretrainArguments
from .fsdp import FSDPEngine
from .interface import Engine
from .sequence_groups import SequenceGroups

logger = logging.getLogger(__name__)

# Environment variables by which `accelerate launch` passes its configuration on to the processes.
LAUNCHED_FSDP = "ACCELERATE_USE_FSDP"
LAUNCHED_DEEPSPEED = "ACCELERATE_USE_DEEPSPEED"
LAUNCHED_STAGE = "ACCELERATE_DEEPSPEED_ZERO_STAGE"
LAUNCHED_ACCUMULATION = "ACCELERATE_GRADIENT_ACCUMULATION_STEPS"
# Variables with settings of DeepSpeed that runs here ignore: for each the name of the setting, and the value that asks
# for nothing.
IGNORED_OF_DEEPSPEED = {
    "ACCELERATE_DEEPSPEED_CONFIG_FILE": ("deepspeed_config_file", "none"),
    "ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE": ("offload_optimizer_device", "none"),
    "ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_DEVICE": ("offload_param_device", "none"),
    "ACCELERATE_GRADIENT_CLIPPING": ("gradient_clipping", "none"),
    LAUNCHED_ACCUMULATION: ("gradient_accumulation_steps", "1"),
}
LAUNCHED_MESH = "ACCELERATE_USE_PARALLELISM_CONFIG"
LAUNCHED_PRECISION = "ACCELERATE_MIXED_PRECISION"
LAUNCHED_COMPILER = "ACCELERATE_DYNAMO_BACKEND"


def build_engine(arguments: PretrainArguments, accelerator: Accelerator, launched: str | None) -> Engine:
    """The engine of a run whose process group is initialized.

    Args:
        launched: the result of `launched_engine`, which must be called before the accelerator is built.

    Raises:
        UserError: the arguments contradict the launcher, or the processes cannot be divided as asked for.
    """
    engine = choose_engine(arguments, accelerator, launched)
    engine.groups = SequenceGroups(accelerator, arguments.context_processes)
    return engine


def choose_engine(arguments: PretrainArguments, accelerator: Accelerator, launched: str | None) -> Engine:
    """As `build_engine`, before processes are grouped."""
    check_launcher(arguments, os.environ)
    name = arguments.engine or launched or "ddp"
    if launched not in (None, name):
        raise UserError(
            f"engine={name}, but `accelerate launch` is configured for {launched}; leave one of them out, or let both "
            "say the same"
        )
    if arguments.shard_processes is not None and name != "hsdp":
        raise UserError(f"shard_processes={arguments.shard_processes} is for engine=hsdp, not {name}; leave it out")
    warn_of_missing_processes(accelerator, os.environ)
    holds_all = name == "ddp" or accelerator.num_processes == 1
    if arguments.cuda_graphs:
        check_graphs(name, accelerator.device.type, holds_all)
    if holds_all:
        return Engine(name, accelerator, cuda_graphs=arguments.cuda_graphs)
    if name.startswith("zero"):
        return build_zero(name, arguments, accelerator)
    return FSDPEngine(name, accelerator, shards_of(name, arguments, accelerator.num_processes))


def check_launcher(arguments: PretrainArguments, environment: Mapping[str, str]) -> None:
    """Refuses settings of `accelerate launch` which the arguments of the run decide, unless they say the same or no."""
    precision = environment.get(LAUNCHED_PRECISION, "no").lower()
    if precision not in ("no", arguments.mixed_precision):
        raise UserError(
            f"`accelerate launch` is configured for mixed_precision={precision}, and the run for "
            f"{arguments.mixed_precision}; give --mixed_precision to dynattn pretrain"
        )
    if (compiler := environment.get(LAUNCHED_COMPILER, "no").lower()) != "no":
        raise UserError(
            f"`accelerate launch` is configured for dynamo_backend={compiler}; leave it out, and give --compile to "
            "dynattn pretrain"
        )


def forget_launcher(environment: MutableMapping[str, str]) -> None:
    """Removes the variables by which Accelerate would shard models and divide losses itself.

    The engines here do that. Accelerate would do it a second time, or on a CPU ignore its configuration.
    """
    for name in (LAUNCHED_FSDP, LAUNCHED_DEEPSPEED, LAUNCHED_MESH, LAUNCHED_ACCUMULATION):
        environment.pop(name, None)


def launched_engine(environment: Mapping[str, str]) -> str | None:
    """The engine in the configuration of `accelerate launch`; None if it names none, or was not used.

    Raises:
        UserError: the configuration names FSDP 1, or a setting of DeepSpeed that is not supported here.
    """
    if environment.get(LAUNCHED_DEEPSPEED, "false").lower() == "true":
        return launched_stage(environment)
    if environment.get(LAUNCHED_FSDP, "false").lower() != "true":
        return None
    if environment.get("FSDP_VERSION", "1") != "2":
        raise UserError("`accelerate launch` is configured for FSDP 1; set fsdp_version: 2 in its configuration")
    replicas = int(environment.get("PARALLELISM_CONFIG_DP_REPLICATE_SIZE", "1"))
    return "hsdp" if replicas > 1 else "fsdp2"


def launched_stage(environment: Mapping[str, str]) -> str:
    """The ZeRO engine that the launcher's configuration of DeepSpeed names.

    Raises:
        UserError: it names none, or has a setting that would have no effect here (a file, offloading, accumulation).
    """
    stage = environment.get(LAUNCHED_STAGE, "2")
    if stage not in ("1", "2", "3"):
        raise UserError(f"`accelerate launch` is configured for zero_stage={stage}; give 1, 2 or 3, or --engine ddp")
    for name, (what, unset) in IGNORED_OF_DEEPSPEED.items():
        if (value := environment.get(name, unset)) not in (unset, "none"):
            raise UserError(
                f"`accelerate launch` is configured for {what}={value}, which runs here do not read; leave it out, and "
                "give dynattn pretrain what it has an option for"
            )
    return f"zero{stage}"


def check_graphs(name: str, device: str, holds_all: bool) -> None:
    """Raises UserError if CUDA graphs cannot run the model; `holds_all`: this process has all weights."""
    if device != "cuda":
        raise UserError(f"cuda_graphs need a GPU with CUDA, and this run is on {device}; leave them out")
    if not holds_all:
        raise UserError(
            f"cuda_graphs need weights that stay at one place in memory, and engine={name} moves them; leave "
            "cuda_graphs out, or use ddp"
        )


def build_zero(name: str, arguments: PretrainArguments, accelerator: Accelerator) -> Engine:
    """The engine of a stage of ZeRO.

    Raises:
        UserError: DeepSpeed is not installed, or cannot do what the arguments ask for.
    """
    check_zero(name, arguments)
    try:
        from .zero import ZeroEngine  # here, because DeepSpeed is an extra, and slow to import
    except ImportError as error:
        raise UserError(
            f"engine={name} needs DeepSpeed ({first_line(error)}): pip install 'dynattn[deepspeed]', or use fsdp2"
        ) from error
    return ZeroEngine(name, accelerator, arguments)


def check_zero(name: str, arguments: PretrainArguments) -> None:
    """Raises UserError if the stage `name` of ZeRO cannot do what the arguments ask for in several processes."""
    if obstacle := obstacle_to_zero(name, arguments):
        raise UserError(f"{obstacle} (engine={name}); leave it out, or use engine fsdp2")


def obstacle_to_zero(name: str, arguments: PretrainArguments) -> str | None:
    """The option that the stage `name` of ZeRO cannot follow in several processes, and why; None if there is none."""
    for option, is_asked, reason in (
        ("optimizer", arguments.optimizer == "muon", "makes updates of whole matrices, which lie in shards there"),
        ("ema_decay", arguments.ema_decay is not None, "averages weights, which the optimizer holds apart there"),
        ("freeze_parent_steps", arguments.freeze_parent_steps > 0, "leaves out weights, all of which it updates"),
        ("compile", arguments.compile, "was not tried with it"),
        ("z_loss", name == "zero3" and arguments.z_loss > 0, "needs the whole head, which lies in shards there"),
    ):
        if is_asked:
            return f"{option}={getattr(arguments, option)} {reason}"
    return None


def shards_of(name: str, arguments: PretrainArguments, processes: int) -> int:
    """How many processes share the weights of a replica.

    With FSDP2 these are all; with HSDP as many as the arguments or the launcher say, or else those of a machine.

    Raises:
        UserError: the number of processes is not a multiple of it.
    """
    if name == "fsdp2":
        return processes
    machine = os.environ.get("LOCAL_WORLD_SIZE", "1")
    shards = arguments.shard_processes or int(os.environ.get("PARALLELISM_CONFIG_DP_SHARD_SIZE", machine))
    if processes % shards:
        raise UserError(
            f"shard_processes={shards} does not divide the {processes} processes of engine=hsdp; give a divisor"
        )
    return shards


def warn_of_missing_processes(accelerator: Accelerator, environment: Mapping[str, str]) -> None:
    """Warns if `accelerate launch` was asked for several processes on a CPU, of which it starts only one.

    It then sets MASTER_PORT, which a single process does not need, but no WORLD_SIZE.
    """
    if "MASTER_PORT" in environment and "WORLD_SIZE" not in environment and accelerator.num_processes == 1:
        logger.warning(
            "only one process runs: on a CPU, `accelerate launch --num_processes N` starts one alone; use `torchrun "
            "--nproc_per_node N`, or a configuration of recipes/accelerate"
        )
