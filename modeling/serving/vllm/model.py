"""Causal models with composed heads as vLLM runs them: our modules and weights, vLLM's scheduler and paged cache."""

import copy
import os
from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn
from transformers import AutoModelForCausalLM
from transformers.distributed import DistributedConfig
from transformers.initialization import no_init_weights
from transformers.modeling_outputs import BaseModelOutput
from vllm.config import VllmConfig
from vllm.distributed import get_world_group
from vllm.model_executor.models.utils import AutoWeightsLoader, WeightsMapper, maybe_prefix

from ..paged_attention import LayerRows, PagedAttention
from ..served_layers import run_on_pages, served_layers
from .backend import ComposedPages
from .options import is_quantized


class ComposedForCausalLM(nn.Module):
    """A causal model of any DCMHA family with vLLM's interface. `decoder` is the model as Transformers runs it."""

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__()
        implementation = "triton" if vllm_config.device_config.device_type == "cuda" else "chunked"
        self.processes = vllm_config.parallel_config.tensor_parallel_size
        self.download_folder = vllm_config.load_config.download_dir
        self.has_weights = False  # whether the decoder has them when it is made, so that vLLM loads none
        self.decoder: Any = self.make_decoder(vllm_config.model_config, implementation)
        layers = served_layers(self.decoder)
        self.pages = nn.ModuleList(
            ComposedPages(layers.layout, window, maybe_prefix(prefix, f"pages.{index}"), vllm_config)
            for index, window in enumerate(layers.windows)
        )
        self.paged = PagedAttention(layers.layout, self._rows_of_layer)

    def make_decoder(self, options: Any, implementation: str) -> Any:
        """The model, whose weights vLLM loads if they are whole and not quantized.

        Args:
            options: vLLM's `ModelConfig`.
        """
        if self.processes > 1 or is_quantized(options):
            return self.load_decoder(options, attn_implementation=implementation)
        with no_init_weights():
            decoder = AutoModelForCausalLM.from_config(
                options.hf_config, dtype=options.dtype, attn_implementation=implementation
            )
        decoder.tie_weights()  # which Transformers does along with drawing initial weights
        return decoder

    def load_decoder(self, options: Any, **given: Any) -> Any:
        """The model with its weights, or with this process's part of them, as Transformers loads it.

        Raises:
            ValueError: the checkpoint lacks weights, for which Transformers would draw random ones.
        """
        if self.processes > 1:
            os.environ["LOCAL_RANK"] = str(get_world_group().local_rank)  # of the device that Transformers chooses
            given["distributed_config"] = DistributedConfig(tp_size=self.processes)
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            options.model,
            revision=options.revision,
            cache_dir=self.download_folder,
            config=options.hf_config,
            dtype=options.dtype,
            output_loading_info=True,
            **given,
        )
        decoder, report = loaded
        if missing := sorted(report["missing_keys"]):
            raise ValueError(
                f"the checkpoint {options.model} lacks weights ({len(missing)}), such as {missing[0]}; load it by "
                "with_composed_heads in Transformers, which makes new ones, and save that"
            )
        self.has_weights = True
        return decoder.eval()

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
        tokens = {"input_ids": input_ids} if inputs_embeds is None else {"inputs_embeds": inputs_embeds}
        tokens = {name: tensor[None] for name, tensor in tokens.items()}
        outputs = run_on_pages(self.decoder.base_model, self.paged, position_ids=positions[None], **tokens)
        return outputs.last_hidden_state[0]

    def compute_logits(self, hidden_states: Tensor) -> Tensor:
        """Logits `[T, V]` of hidden states `[T, E]`."""
        return self.decoder.lm_head(hidden_states)

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        """Loads the tensors of a checkpoint, if it must, and returns the names of the parameters that have theirs."""
        if self.has_weights:
            return {name for name, _ in self.named_parameters()}
        return AutoWeightsLoader(self).load_weights(weights, mapper=WeightsMapper(orig_to_new_prefix={"": "decoder."}))


class ComposedInPlaceForCausalLM(ComposedForCausalLM):
    """A causal model of Transformers whose heads `with_composed_heads` composes."""

    def make_decoder(self, options: Any, implementation: str) -> Any:
        """The model with its weights: many checkpoints have other tensors than modules, which Transformers converts."""
        return self.load_decoder(options)

    def compute_logits(self, hidden_states: Tensor) -> Tensor:
        """Logits `[T, V]` of hidden states `[T, E]`, which some models scale, bound or normalize besides."""
        head = copy.copy(self.decoder)
        head._modules = {**head._modules, head.base_model_prefix: GivenStates(hidden_states[None])}
        return head().logits[0]


class HiddenStates(BaseModelOutput):
    """The output of a model, in which all other fields that its head may read are None."""

    def __getattr__(self, name: str) -> None:
        return None


class GivenStates(nn.Module):
    """Takes the place of a model under its head."""

    def __init__(self, hidden_states: Tensor) -> None:
        super().__init__()
        self.hidden_states = hidden_states  # [1, T, E]

    @property
    def decoder(self) -> "GivenStates":
        """The module within the model that OPT's head calls."""
        return self

    def forward(self, *_: Any, **__: Any) -> HiddenStates:
        """The hidden states, whatever the head passes on."""
        return HiddenStates(last_hidden_state=self.hidden_states)
