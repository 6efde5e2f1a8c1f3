"""Groups of processes that share the tokens of each sequence (context parallelism)."""

from collections.abc import Iterable
from typing import Any

from accelerate import Accelerator
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from transformers import PreTrainedModel

from dynattn.modeling.parallel.context_parallel import ContextParallel

from ...common.errors import UserError


class SequenceGroups:
    """Which processes read the same sequences, and the part of them that belongs to this process.

    Attributes:
        size: processes in a group, which follow each other.
        index, number: which group this process is in, and how many there are. Each reads sequences of its own.
        context: how the processes of a group divide sequences; None if each process is a group.
        model: the model that reads the parts, without an engine's wrapper.
    """

    model: PreTrainedModel

    def __init__(self, accelerator: Accelerator, size: int = 1) -> None:
        """Divides the processes into groups; all processes have to call it together.

        Raises:
            UserError: they cannot be divided into groups of this size.
        """
        processes = accelerator.num_processes
        if processes % size:
            raise UserError(
                f"context_processes={size} does not divide the number of processes, {processes}; give a divisor, or "
                "start more by torchrun --nproc_per_node"
            )
        self.size, self.number, self.index = size, processes // size, accelerator.process_index // size
        self.context: ContextParallel | None = None
        if size > 1:
            names = ("groups", "context")
            mesh = init_device_mesh(accelerator.device.type, (self.number, size), mesh_dim_names=names)
            self.context = ContextParallel(mesh["context"])

    @property
    def is_first(self) -> bool:
        """Whether this process is the first one of its group."""
        return self.context is None or self.context.process == 0

    def divide(self, model: PreTrainedModel, lengths: Iterable[int]) -> None:
        """Chooses the model that `part` makes arguments for, after `check_division` of it."""
        self.model = model
        if self.context is not None:
            check_division(model, self.context, lengths)

    def part(self, batch: dict[str, Tensor]) -> dict[str, Any]:
        """The model's arguments for the part of a batch of tensors `[B, T]` that belongs to this process."""
        return batch if self.context is None else self.context.part(self.model, **batch)


def check_division(model: PreTrainedModel, context: ContextParallel, lengths: Iterable[int]) -> None:
    """Refuses models and lengths of sequences that `context` cannot divide among processes.

    Raises:
        UserError: it is one of them.
    """
    option, chunks = f"context_processes={context.processes}", 2 * context.processes
    for length in lengths:
        if length % chunks:
            raise UserError(
                f"{option} cut sequences into {chunks} chunks, and {length} tokens cannot be; give lengths that are "
                f"multiples of {chunks}"
            )
    try:
        context.check(model)
    except ValueError as error:
        raise UserError(f"{option}: {error}") from error
