"""The size of the cache for continuous batching on a CPU."""

import copy
import os

from transformers.generation.configuration_utils import ContinuousBatchingConfig
from transformers.generation.continuous_batching.utils import WorkloadHints, get_device_and_memory_breakdown

from .served_model import ServedModel


def with_sizes(
    served: ServedModel, settings: ContinuousBatchingConfig, hints: WorkloadHints
) -> ContinuousBatchingConfig:
    """A copy of the settings without options that only FlashAttention supports, and on a CPU with a size of the cache.

    By default Transformers takes most of the memory for its cache, which suits a GPU but not a CPU.
    """
    settings = copy.copy(settings)
    settings.use_cuda_graph, settings.use_async_batching, settings.max_blocks_per_request = False, False, 0
    if settings.num_blocks is None and settings.max_memory_percent is None and served.device.type == "cpu":
        settings.num_blocks = default_pages(served, settings, hints)
    return settings


def default_pages(served: ServedModel, settings: ContinuousBatchingConfig, hints: WorkloadHints) -> int | None:
    """The number of pages for twice the announced requests, or twice 64 of the longest; None leaves it to Transformers.

    What the requests leave keeps prefixes of earlier ones. Transformers chooses where the pages would take more than a
    quarter of the memory. But it would choose by the memory of a GPU if the machine has one, so there the pages take a
    quarter of the smaller memory.
    """
    requests = min(hints.num_requests or 64, settings.max_requests_per_batch or 1024)
    answer = hints.max_generated_length  # 0 if not announced, as without `max_new_tokens`
    tokens = hints.max_prompt_length + answer if answer else served.config.max_position_embeddings
    pages = 2 * requests * (1 + tokens // settings.page_size)
    layout = served.layers.layout
    page_bytes = 2 * settings.page_size * layout.kv_heads * layout.width * served.dtype.itemsize
    room, is_beside_gpu = free_memory(served)
    fitting = room / 4 / (served.config.num_hidden_layers * page_bytes)
    if pages < fitting:
        return pages
    return max(1, int(fitting)) if is_beside_gpu else None


def free_memory(served: ServedModel) -> tuple[int, bool]:
    """How many bytes a model on a CPU leaves free, and whether there is a GPU in the machine.

    Then Transformers tells of the GPU's memory, and refuses a cache that is larger than it: the smaller one counts.
    """
    device, total, _, allocated = get_device_and_memory_breakdown()
    if device.type == "cpu":
        return total - allocated, False
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min(total - allocated, memory - served.get_memory_footprint()), True
