"""Which of vLLM's options models with composed heads can be served with."""

from typing import Any

from vllm.model_executor.models.config import VerifyAndUpdateConfig

from ..requirements import check_positions

# Methods of speculative decoding that draft tokens from earlier ones, without a model.
TOKEN_DRAFTS = ("ngram", "suffix")
# Ways to quantize weights that Transformers loads from a checkpoint, and that vLLM lets a model load by itself. The
# second is that of llm-compressor.
QUANTIZED = ("torchao", "compressed-tensors")


class ComposedOptions(VerifyAndUpdateConfig):
    """Checks vLLM's options; vLLM calls it before it starts any process."""

    @staticmethod
    def verify_and_update_config(vllm_config: Any) -> None:
        """Refuses options that would silently change a model's outputs, or that its layers do not support.

        vLLM itself refuses pipeline parallelism and adapters.

        Raises:
            ValueError: an option is not supported.
        """
        model, parallel = vllm_config.model_config, vllm_config.parallel_config
        check_positions(model.hf_text_config)
        _check_drafts(vllm_config.speculative_config)
        if model.runner_type != "generate":
            raise ValueError(
                f"{model.architecture} with runner={model.runner_type!r}: only models that generate text are served; "
                "save the model as one with a head for causal language modeling, or run it with Transformers"
            )
        _limit_length(model)
        dtype, cache_dtype = str(model.dtype).removeprefix("torch."), vllm_config.cache_config.cache_dtype
        _check_processes(parallel)
        _check_quantization(model, parallel.tensor_parallel_size)
        if cache_dtype not in ("auto", dtype):
            raise ValueError(
                f"kv_cache_dtype={cache_dtype!r} would round the composition factors of a {dtype} model; use 'auto'"
            )
        # vLLM makes a kv_transfer_config of kv_offloading_size, but only after this check.
        transfers = {"kv_transfer_config": vllm_config, "kv_offloading_size": vllm_config.cache_config}
        for name, owner in transfers.items():
            if getattr(owner, name) is not None:
                raise ValueError(f"{name} is set, but pages of composed heads cannot be transferred; leave it out")


def _check_processes(parallel: Any) -> None:
    """Raises ValueError for tensor beside data parallelism, and for context parallelism in decoding.

    vLLM itself refuses the latter only for its own attention layers that cannot serve it.
    """
    if parallel.tensor_parallel_size > 1 and parallel.data_parallel_size > 1:
        raise ValueError(
            f"data_parallel_size={parallel.data_parallel_size} beside tensor_parallel_size="
            f"{parallel.tensor_parallel_size} is not supported with composed heads; start an engine for each copy"
        )
    if parallel.decode_context_parallel_size > 1:
        raise ValueError(
            f"decode_context_parallel_size={parallel.decode_context_parallel_size} would give each process the pages "
            "of a part of the tokens, and composed heads need those of all; leave it out"
        )


def is_quantized(model: Any) -> bool:
    """Whether the checkpoint of vLLM's `ModelConfig` has quantized weights."""
    return getattr(model.hf_config, "quantization_config", None) is not None


def _check_quantization(model: Any, processes: int) -> None:
    """Raises ValueError for weights that vLLM would quantize, or that Transformers does not load as they are."""
    if model.quantization is None:
        return
    if not is_quantized(model) or model.quantization not in QUANTIZED:
        raise ValueError(
            f"quantization={model.quantization!r} would not be applied to models with composed heads; serve a "
            f"checkpoint that Transformers saved with weights quantized by {' or '.join(QUANTIZED)}"
        )
    if processes > 1:
        raise ValueError(f"tensor_parallel_size={processes} is not supported for quantized weights; use 1")


def _check_drafts(speculative_config: Any) -> None:
    """Raises ValueError if a model drafts tokens, be it with composed heads or for a model with them.

    vLLM takes one group of pages for all layers of a model that drafts, and gives rejected drafts row -1, the last one.
    """
    if speculative_config is not None and speculative_config.method not in TOKEN_DRAFTS:
        raise ValueError(
            f"speculative_config with method={speculative_config.method!r} lets a model draft tokens, which is not "
            f"supported with composed heads; use one of the methods {TOKEN_DRAFTS}, or leave it out"
        )


def _limit_length(model: Any) -> None:
    """Lets requests be no longer than the positions of the model, as in the package's other server.

    vLLM multiplies the positions by the factor of `rope_parameters`. Beyond the model's own, 'dynamic' angles depend on
    the longest request of a step, so that requests would change each other.

    Raises:
        ValueError: the user asked for more.
    """
    limit = model.hf_text_config.max_position_embeddings
    asked = model.original_max_model_len or 0
    if asked > limit:
        raise ValueError(
            f"max_model_len={asked} is more than the {limit} positions of the model (max_position_embeddings); "
            f"use at most {limit}"
        )
    model.max_model_len = min(model.max_model_len, limit)
