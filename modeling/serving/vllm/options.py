"""Which of vLLM's options models with composed heads can be served with."""

from typing import Any

from vllm.model_executor.models.config import VerifyAndUpdateConfig

from ..requirements import check_model


class ComposedOptions(VerifyAndUpdateConfig):
    """Checks vLLM's options; vLLM calls it before it starts any process."""

    @staticmethod
    def verify_and_update_config(vllm_config: Any) -> None:
        """Refuses options that would silently change a model's outputs, or that its layers do not support.

        vLLM itself refuses pipeline parallelism, adapters, and requests beyond the positions of the model.

        Raises:
            ValueError: an option is not supported.
        """
        model, parallel = vllm_config.model_config, vllm_config.parallel_config
        check_model(model.hf_config)
        dtype, cache_dtype = str(model.dtype).removeprefix("torch."), vllm_config.cache_config.cache_dtype
        if parallel.tensor_parallel_size > 1:
            raise ValueError(
                f"tensor_parallel_size={parallel.tensor_parallel_size} would split the heads of a token, and "
                "composition reads all of them; use 1, and data_parallel_size for more devices"
            )
        if model.quantization is not None:
            raise ValueError(
                f"quantization={model.quantization!r} would not be applied to models with composed heads; leave it out"
            )
        if cache_dtype not in ("auto", dtype):
            raise ValueError(
                f"kv_cache_dtype={cache_dtype!r} would round the composition factors of a {dtype} model; use 'auto'"
            )
        if vllm_config.kv_transfer_config is not None:
            raise ValueError(
                "kv_transfer_config is set, but pages of composed heads cannot be transferred; leave it out"
            )
