"""Which composer serves a call: the one on the tensor cores, or the one that mixes heads one after another."""

from ..arguments import MapInputs, MapSettings
from ..devices import shared_memory_of
from ..tuning import composes_on_tensor_cores, filled_up
from .head_by_head import HeadByHeadComposer
from .interface import KernelComposer
from .tensor_cores import TensorCoreComposer

# Kernels on the tensor cores count the elements of the matrices of an item in 32 bits; half of that leaves room for
# padding.
MOST_ELEMENTS = 1 << 30


def composer_class_for(inputs: MapInputs, settings: MapSettings) -> type[KernelComposer]:
    """Returns `TensorCoreComposer` where it serves and `composes_on_tensor_cores` says that it pays.

    It does not serve:

    * static matrices beside several groups, since these mix heads of different items;
    * a composed bias, which it would round to the float16 of scores, where far distances are no longer told apart;
    * sequences whose matrices have more elements than its kernels count.
    """
    statics = [static for static in (inputs.pre_static, inputs.post_static) if static is not None]
    terms = [terms for terms in inputs.terms if terms is not None]
    mixes_heads = bool(statics) or any(side.shape[2] > 1 for side in terms)  # a single term is a gate, which does not
    _, heads, queries, _ = inputs.query.shape
    elements = max(queries, inputs.key.shape[2]) * filled_up(heads) ** 2
    memory = shared_memory_of(inputs.query.device)
    fits_tensor_cores = composes_on_tensor_cores(heads, inputs.query.dtype, memory, mixes_heads=mixes_heads)
    fits_tensor_cores = fits_tensor_cores and inputs.composed_bias is None and elements <= MOST_ELEMENTS
    if (terms or statics) and fits_tensor_cores and not (statics and settings.groups > 1):
        return TensorCoreComposer
    return HeadByHeadComposer
