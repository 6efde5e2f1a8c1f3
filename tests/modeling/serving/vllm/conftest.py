"""vLLM in this process, with little memory. Without vLLM, nothing of this folder is collected."""

import os
from importlib.util import find_spec

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedModel

if find_spec("vllm") is None:
    collect_ignore_glob = ["test_*.py"]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Any]]:
    """Starts `vllm.LLM` with a model, or the folder of one, and options; the engine ends with the test."""
    from vllm import LLM
    from vllm.distributed import cleanup_dist_env_and_memory

    def start(model: PreTrainedModel | Path, **options: Any) -> LLM:
        folder = model if isinstance(model, Path) else tmp_path
        if not isinstance(model, Path):
            model.save_pretrained(folder)
        defaults = {"dtype": "float32", "enforce_eager": True, "skip_tokenizer_init": True, "disable_log_stats": False}
        defaults["kv_cache_memory_bytes"] = 1 << 28
        return LLM(str(folder), **{**defaults, **options})

    yield start
    cleanup_dist_env_and_memory()
