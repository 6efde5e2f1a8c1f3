"""Which engine a run uses: the one of `--engine`, or the one that `accelerate launch` was configured for."""

import logging
import os
from collections.abc import Mapping

from accelerate import Accelerator

from ...common.errors import UserError
from ..arguments import PretrainArguments
from .interface import Engine
from .sharded import ShardedEngine

logger = logging.getLogger(__name__)

# What `accelerate launch` sets where its configuration says FSDP.
LAUNCHED_FSDP = "ACCELERATE_USE_FSDP"
LAUNCHED_DEEPSPEED = "ACCELERATE_USE_DEEPSPEED"
LAUNCHED_MESH = "ACCELERATE_USE_PARALLELISM_CONFIG"


def build_engine(arguments: PretrainArguments, accelerator: Accelerator, launched: str | None) -> Engine:
    """The engine of a run whose processes have found each other.

    Args:
        launched: what `launched_engine` found before there was an accelerator.

    Raises:
        UserError: `--engine` contradicts the launcher, or the processes cannot be divided as asked for.
    """
    name = arguments.engine or launched or "ddp"
    if launched not in (None, name):
        raise UserError(
            f"engine={name}, but `accelerate launch` is configured for {launched}; leave one of them out, or let both "
            "say the same"
        )
    warn_of_missing_processes(accelerator, os.environ)
    if name == "ddp" or accelerator.num_processes == 1:
        return Engine(name, accelerator)
    return ShardedEngine(name, accelerator, shards_of(name, arguments, accelerator.num_processes))


def launched_engine(environment: Mapping[str, str]) -> str | None:
    """The engine in the configuration of `accelerate launch`; None if it names none, or if there is no such launcher.

    Raises:
        UserError: it is FSDP 1, or DeepSpeed.
    """
    if environment.get(LAUNCHED_DEEPSPEED, "false").lower() == "true":
        raise UserError(
            "`accelerate launch` is configured for DeepSpeed, which is not an engine here; fsdp2 shards weights, "
            "gradients and optimizer state as ZeRO 3 does: set distributed_type: FSDP and fsdp_version: 2 in its "
            "configuration"
        )
    if environment.get(LAUNCHED_FSDP, "false").lower() != "true":
        return None
    if environment.get("FSDP_VERSION", "1") != "2":
        raise UserError("`accelerate launch` is configured for FSDP 1; set fsdp_version: 2 in its configuration")
    replicas = int(environment.get("PARALLELISM_CONFIG_DP_REPLICATE_SIZE", "1"))
    return "hsdp" if replicas > 1 else "fsdp2"


def shards_of(name: str, arguments: PretrainArguments, processes: int) -> int:
    """Processes that share the weights out: all, or for HSDP those that are asked for, or those of a machine.

    Raises:
        UserError: they do not divide the processes.
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
    """Tells where `accelerate launch` was asked for several processes on a CPU, of which it started one.

    Its launcher for one process then leaves an address of the first process behind, and no number of processes.
    """
    if "MASTER_PORT" in environment and "WORLD_SIZE" not in environment and accelerator.num_processes == 1:
        logger.warning(
            "only one process runs: on a CPU, `accelerate launch --num_processes N` starts one alone; use `torchrun "
            "--nproc_per_node N`, or a configuration of recipes/accelerate"
        )
