"""Options of a run about its execution: where it runs, what it writes, and what it does when something goes wrong."""

from dataclasses import dataclass, field
from typing import Literal

from ...common.arguments import option


@dataclass(kw_only=True)
class RunningOptions:
    """Where a run runs, what it writes, and what it does when something goes wrong."""

    output: str = field(metadata={"help": "folder of the run: checkpoints, metrics, final model"})

    seed: int = option(0, "seed of the initial weights, the order of the data and dropout")
    mixed_precision: Literal["no", "bf16"] = option("no", "no (float32) or bf16 (autocast; weights stay float32)")
    engine: Literal["ddp", "fsdp2", "hsdp", "zero1", "zero2", "zero3"] | None = option(
        None,
        "how processes share the model: ddp (each has all of it), fsdp2 (each a shard), hsdp (shards in a "
        "machine, replicas over machines) or zero1, zero2, zero3 (DeepSpeed); by default what `accelerate launch` "
        "is configured for, or ddp",
    )
    shard_processes: int | None = option(None, "hsdp: processes that share a replica; by default those of one machine")
    context_processes: int = option(
        1,
        "processes that share the tokens of each sequence, for sequences that are too long for one (context "
        "parallelism); batch_size is then that of these processes together",
    )
    gradient_checkpointing: bool = option(
        False, "save memory: recompute each layer in the backward pass, except the output of its attention"
    )
    compile: bool = option(False, "compile the model with torch.compile")
    cuda_graphs: bool = option(
        False,
        "with compile: replay the model's kernels as CUDA graphs, for updates that wait for the CPU to launch them "
        "(torch.compile's mode reduce-overhead)",
    )
    dataloader_workers: int = option(0, "processes that prepare batches")

    on_bad_update: Literal["stop", "skip", "rollback"] = option(
        "stop",
        "what to do if the loss or a gradient is not finite, or the loss is a spike: stop, skip the "
        "update, or rollback (go back to the newest checkpoint and leave out the data read since then)",
    )
    spike_threshold: float | None = option(
        None, "a loss this many standard deviations above the mean of the last 100 is a spike; by default none is"
    )
    max_bad_updates: int = option(10, "with skip and rollback: stop after more bad updates than this")

    trackers: list[Literal["wandb", "trackio"]] = option(
        [], "where to log besides metrics.jsonl and TensorBoard: wandb, trackio"
    )
    sweep: str | None = option(
        None,
        "make several runs in folders below output that differ in one number, and plot their validation "
        "losses; NAME=FIRST:LAST:COUNT, such as lr=1e-4:1e-2:7",
    )
    sweep_workers: int = option(1, "runs of a sweep that are made at the same time, each in a process of its own")
    dry_run: bool = option(False, "train nothing; print parameters, FLOPs, memory, time and cost of the run")
    on: str = option(
        "h100:1", "dry_run: kind (a100, h100, h200 or l40s) and number of GPUs to estimate for, such as h100:64"
    )
    price_per_gpu_hour: float | None = option(
        None, "dry_run: price of one GPU for an hour, to print the cost of the run"
    )

    log_every: int = option(10, "updates between two lines of training metrics")
    eval_every: int = option(100, "updates between two validations; the last update is always validated")
    save_every: int = option(100, "updates between two checkpoints; the last update is always saved")
    save_in_background: bool = option(
        False, "copy checkpoints to the memory of the CPU, and go on training while they are written"
    )
    max_seconds: float | None = option(
        None, "save a checkpoint and stop after the update during which the run has lasted this long"
    )
    keep_checkpoints: int = option(3, "newest checkpoints to keep; 0 keeps all")
    resume: str = option(
        "auto",
        "auto (newest checkpoint of the output folder), intact (the newest that is not damaged), never, or "
        "a checkpoint folder",
    )
    overwrite: bool = option(False, "replace the run that the output folder holds")
