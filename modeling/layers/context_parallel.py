"""Context parallelism: processes share the tokens of each sequence, and each attends to the keys of all."""

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh


class ContextParallel:
    """How the processes of a group divide sequences, and the exchange of what each of them has computed of its part.

    A sequence is cut into `2P` chunks for `P` processes, of which process `p` takes chunks `p` and `2P - 1 - p`. Under
    causality a chunk near the start has few keys to attend to and one near the end many, and so every process has the
    same work (Llama 3, arXiv 2407.21783, section 3.3.2).

    Composition mixes the scores of all heads, so heads cannot be divided instead, as DeepSpeed's Ulysses does.

    Args:
        mesh: the processes of the group, such as `init_device_mesh("cuda", (8,))`.

    Raises:
        ValueError: the mesh has several dimensions.
    """

    def __init__(self, mesh: DeviceMesh) -> None:
        if mesh.ndim != 1:
            raise ValueError(f"the mesh has {mesh.ndim} dimensions; give the one whose processes share sequences")
        self.mesh, self.processes, self.process = mesh, mesh.size(), mesh.get_local_rank()

    def take(self, whole: Tensor, dim: int = 1) -> Tensor:
        """The part of this process, of a tensor with the tokens of whole sequences in dimension `dim`.

        Raises:
            ValueError: the sequences cannot be cut into chunks of the same length.
        """
        length, chunks = whole.shape[dim], 2 * self.processes
        if length % chunks or not length:
            raise ValueError(
                f"sequences of {length} tokens cannot be cut into {chunks} equal chunks, two for each process; give a "
                f"multiple of {chunks}"
            )
        mine = whole.chunk(chunks, dim)
        return torch.cat([mine[self.process], mine[-1 - self.process]], dim)

    def gather(self, part: Tensor, dim: int = 1) -> Tensor:
        """The inverse of `take`: whole sequences of the parts that all processes have; all call it at the same time.

        The gradient of a part is the sum of those that the processes have of it.
        """
        # Here, because a build of PyTorch without distributed training lacks it.
        from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

        shared = DTensor.from_local(part, self.mesh, [Shard(dim)], run_check=False)
        joined = shared.redistribute(placements=[Replicate()]).to_local(grad_placements=[Partial()])
        chunks = joined.chunk(2 * self.processes, dim)
        return torch.cat([*chunks[::2], *chunks[::-2]], dim)

    def chunks(self, length: int) -> Iterator[tuple[slice, int]]:
        """Where each chunk of this process is in its part of `length` tokens, and where it ends in the whole."""
        half = length // 2
        for index, chunk in enumerate((self.process, 2 * self.processes - 1 - self.process)):
            yield slice(index * half, (index + 1) * half), (chunk + 1) * half
