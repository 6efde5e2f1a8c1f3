"""Whether a tensor tells its values, to check them or to leave out work that they make needless."""

from torch import Tensor
from transformers.utils.import_utils import is_tracing

from .function_transforms import are_transforms_active


def is_readable(tensor: Tensor) -> bool:
    """Whether the values of `tensor` can be read.

    They cannot while a graph is traced, nor on the meta device, nor under transforms of functions: inside
    `torch.func.vmap` a tensor stands for many.
    """
    return not (tensor.is_meta or is_tracing(tensor) or are_transforms_active())
