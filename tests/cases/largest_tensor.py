"""How much memory the operators of a computation take at once."""

from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode


class LargestTensor(TorchDispatchMode):
    """Remembers the most elements that any operator's result has; those of an expanded view are in memory only once."""

    elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        """Runs an operation and looks at what it returns."""
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, tuple | list) else [result]:
            if isinstance(tensor, Tensor):
                in_memory = tensor.untyped_storage().nbytes() // tensor.element_size()
                self.elements = max(self.elements, min(tensor.numel(), in_memory))
        return result
