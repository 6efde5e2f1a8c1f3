"""Transformers' continuous batching as methods of models, without what only the servers of this package need."""

from inspect import signature
from typing import Any

from transformers import GenerationConfig

from .requirements import (
    check_paged_cache,
    check_prompts,
    check_request,
    check_transformers,
    new_token_limit,
    with_defaults_of,
)
from .served_layers import configured_windows


class BatchedGeneration:
    """Mixed in front of a class that generates, to serve it by a paged cache that also keeps composition factors."""

    config: Any
    attends_to_paged_cache: bool

    def init_continuous_batching(self, *args: Any, **kwargs: Any) -> Any:
        """As in Transformers, whose `generate_batch` and server also call it.

        Raises:
            ValueError: the model needs more of earlier tokens than a paged cache keeps, or serving does not support
                the settings.
            ImportError: this version of Transformers does not serve models with composed heads.
        """
        check_paged_cache(self)
        if not self.attends_to_paged_cache:
            return super().init_continuous_batching(*args, **kwargs)  # type: ignore[misc]
        check_transformers()
        # Imported only here, because it builds on parts of Transformers that differ between versions.
        from .continuous_batching import start_batching

        return start_batching(self, *args, **kwargs)  # type: ignore[arg-type]

    def generate_batch(
        self,
        inputs: list[list[int]],
        generation_config: GenerationConfig | None = None,
        *args: Any,
        max_new_tokens: int | None = None,
        **kwargs: Any,
    ) -> dict[str, Any]:
        """As in Transformers, but raises an error for requests that cannot be served, which Transformers would drop.

        Without a `generation_config` it is that of a persistent manager that is kept, if there is one.

        Raises:
            TypeError: `inputs` is no list of prompts.
            ValueError: a request cannot be served, see `check_request` and `new_token_limit`; or the model cannot; or a
                keyword is one of `generate`, which Transformers' method takes and ignores.
        """
        if self.attends_to_paged_cache:
            known = signature(super().generate_batch).parameters  # type: ignore[misc]
            if ignored := sorted(kwargs.keys() - known):
                raise ValueError(
                    f"generate_batch would ignore {ignored}; set fields of a GenerationConfig, or use generate()"
                )
            check_prompts(inputs)
            configured_windows(self)  # raises for models that may lack the limits by which requests are checked
            kept = getattr(self, "_cached_continuous_batching_manager", None)
            generation_config = with_defaults_of(self, generation_config or getattr(kept, "generation_config", None))
            for input_ids in inputs:
                limit = new_token_limit(generation_config, len(input_ids)) if max_new_tokens is None else max_new_tokens
                check_request(self.config.get_text_config(decoder=True), input_ids, limit)
        return super().generate_batch(  # type: ignore[misc]
            inputs, generation_config, *args, max_new_tokens=max_new_tokens, **kwargs
        )
