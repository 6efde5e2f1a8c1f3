"""Groups of processes that share the tokens of each sequence (context parallelism)."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from accelerate import Accelerator
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from transformers import PreTrainedModel

from dynattn.modeling.layers.context_parallel import ContextParallel

from ...common.errors import UserError
from ..data.objectives import with_shifted_labels


class SequenceGroups:
    """Which processes read the same sequences, and the part of them that belongs to this process.

    Attributes:
        size: processes in a group, which follow each other.
        group, groups: the group of this process, and how many there are. Each group reads sequences of its own.
        context: how the processes of a group divide sequences; None if each process is a group.
    """

    def __init__(self, accelerator: Accelerator, size: int = 1) -> None:
        """Divides the processes into groups; all processes have to call it together.

        Raises:
            UserError: they cannot be divided into groups of this size.
        """
        processes = accelerator.num_processes
        if processes % size:
            raise UserError(f"context_processes={size} does not divide the {processes} processes; give a divisor")
        self.size, self.groups, self.group = size, processes // size, accelerator.process_index // size
        self.context: ContextParallel | None = None
        if size > 1:
            names = ("groups", "context")
            mesh = init_device_mesh(accelerator.device.type, (self.groups, size), mesh_dim_names=names)
            self.context = ContextParallel(mesh["context"])

    @property
    def is_first(self) -> bool:
        """Whether this process is the first one of its group."""
        return self.context is None or self.context.process == 0

    def divide(self, model: PreTrainedModel, lengths: Iterable[int]) -> None:
        """As `divide_sequences`, for this process's part of sequences; a process that reads whole ones does nothing."""
        if self.context is not None:
            divide_sequences(model, self.context, lengths)

    def part(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        """The part of a batch of tensors `[B, T]` that belongs to this process, `[B, T / size]`."""
        if self.context is None:
            return batch
        return {name: self.context.take(tensor) for name, tensor in with_shifted_labels(batch).items()}

    @contextmanager
    def whole(self, model: PreTrainedModel) -> Iterator[None]:
        """Within it every process reads whole sequences by itself."""
        if (context := self.context) is None:
            yield
            return
        divided: Any = model
        self.context = None
        divided.set_context_parallel(None)
        try:
            yield
        finally:
            self.context = context
            divided.set_context_parallel(context)


def divide_sequences(model: PreTrainedModel, context: ContextParallel, lengths: Iterable[int]) -> None:
    """Makes a model read the parts of sequences of these `lengths` that `context` divides among processes.

    Raises:
        UserError: the model cannot do that, or the sequences cannot be divided.
    """
    option, chunks = f"context_processes={context.processes}", 2 * context.processes
    for length in lengths:
        if length % chunks:
            raise UserError(
                f"{option} cut sequences into {chunks} chunks, and {length} tokens cannot be; give lengths that are "
                f"multiples of {chunks}"
            )
    divided: Any = model
    if not hasattr(model, "set_context_parallel"):
        raise UserError(f"{option} is for dcformer and dcpythia, and this is a {model.config.model_type}; leave it out")
    try:
        divided.set_context_parallel(context)
    except ValueError as error:
        raise UserError(f"{option}: {error}") from error
