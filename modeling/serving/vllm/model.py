"""Causal models with composed heads as vLLM runs them: our modules and weights, vLLM's scheduler and paged cache."""

from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn
from transformers import AutoModelForCausalLM
from transformers.initialization import no_init_weights
from vllm.config import VllmConfig
from vllm.model_executor.models.utils import AutoWeightsLoader, WeightsMapper, maybe_prefix

from ..paged_attention import LayerRows, PagedAttention
from ..paged_rows import row_layout
from .backend import ComposedPages


class ComposedForCausalLM(nn.Module):
    """A causal model of any DCMHA family with vLLM's interface. `decoder` is the model as Transformers runs it."""

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__()
        config, dtype = vllm_config.model_config.hf_config, vllm_config.model_config.dtype
        implementation = "triton" if vllm_config.device_config.device_type == "cuda" else "chunked"
        with no_init_weights():
            self.decoder: Any = AutoModelForCausalLM.from_config(
                config, dtype=dtype, attn_implementation=implementation
            )
        self.decoder.tie_weights()  # which Transformers does along with drawing initial weights
        layout = row_layout(self.decoder.config)
        windows = (layer.self_attn.sliding_window for layer in self.decoder.model.layers)
        self.pages = nn.ModuleList(
            ComposedPages(layout, window, maybe_prefix(prefix, f"pages.{index}"), vllm_config)
            for index, window in enumerate(windows)
        )
        self.paged = PagedAttention(layout, self._rows_of_layer, implementation)

    def _rows_of_layer(self, index: int) -> LayerRows:
        pages: Any = self.pages[index]
        return pages.rows()

    def embed_input_ids(self, input_ids: Tensor) -> Tensor:
        """Embeddings `[T, E]` of tokens `[T]`."""
        return self.decoder.get_input_embeddings()(input_ids)

    def forward(
        self,
        input_ids: Tensor,
        positions: Tensor,
        intermediate_tensors: None = None,
        inputs_embeds: Tensor | None = None,
    ) -> Tensor:
        """Hidden states `[T, E]` of the new tokens of all requests, one request after the other.

        Args:
            input_ids: `[T]`; or `inputs_embeds` `[T, E]`.
            positions: `[T]`, of each token in its own request.
        """
        outputs = self.decoder.model(
            input_ids=input_ids[None] if inputs_embeds is None else None,
            inputs_embeds=None if inputs_embeds is None else inputs_embeds[None],
            position_ids=positions[None],
            attention_mask=dict.fromkeys(self.decoder.config.layer_types),  # `paged` knows what each token sees
            use_cache=False,
            paged=self.paged,
        )
        return outputs.last_hidden_state[0]

    def compute_logits(self, hidden_states: Tensor) -> Tensor:
        """Logits `[T, V]` of hidden states `[T, E]`."""
        return self.decoder.lm_head(hidden_states)

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        """Loads the tensors of a checkpoint, and returns the names of the parameters that got one."""
        return AutoWeightsLoader(self).load_weights(weights, mapper=WeightsMapper(orig_to_new_prefix={"": "decoder."}))
