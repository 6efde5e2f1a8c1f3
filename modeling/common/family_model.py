"""What the models of all families share: flags for Transformers, initial weights, and the code that is saved."""

from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers import initialization as init
from transformers.utils import logging

from ...configuration.portable_config import writes_its_code
from ..caches.names import NEW_NAME, OLD_NAME
from ..positions.learned_tables import DistanceTable

logger = logging.get_logger(__name__)


class FamilyPreTrainedModel(PreTrainedModel):
    """Flags and methods that hold for every family."""

    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _skip_keys_device_placement = [OLD_NAME, NEW_NAME]
    _can_compile_fullgraph = True
    # Accelerate's context parallelism splits the keys over devices and drops the mask. Composed heads, relative
    # positions and convolutions need all keys that a query sees on one device, as `ContextParallel` provides them.
    _supports_context_parallel = False

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        """As in Transformers, which would take an `initializer_range` of 0 for none and draw with 0.02."""
        # Frequencies or sinusoids. Transformers' own way does not know all of our variants.
        fill_buffers = getattr(module, "fill_buffers", None)
        if fill_buffers is not None:
            fill_buffers()
            return
        super()._init_weights(module)
        if self.config.initializer_range == 0 and isinstance(module, nn.Linear | nn.Conv2d | nn.Embedding):
            init.zeros_(module.weight)
        if isinstance(module, DistanceTable):
            module.reset_parameters()

    @classmethod
    def _can_set_attn_implementation(cls) -> bool:
        """True: a model looks its implementation up in the configuration at every call.

        Transformers would look for that in the source of the class, and a class that is defined in a notebook has none.
        """
        return True

    @classmethod
    def register_for_auto_class(cls, auto_class: str = "AutoModel") -> None:
        """As in Transformers; the configuration of the installed package writes the code of all its classes."""
        if writes_its_code(cls):
            assert cls.config_class is not None
            cls.config_class.register_for_auto_class()
        else:
            super().register_for_auto_class(auto_class)

    # The override is ignored because type checkers see Transformers' wrapped method as a plain function.
    def push_to_hub(self, repo_id: str, *args: Any, **kwargs: Any) -> str:  # type: ignore[override]
        """As in Transformers, which uploads the model's code only if the configuration names some (`auto_map`)."""
        if not (self.config.auto_map or getattr(self.config, "code_registered", False)):
            logger.warning(
                f"{repo_id} gets weights and configuration but no code: it loads only where dynattn is imported. "
                "`dynattn publish FOLDER --repo NAME` uploads the code too"
            )
        return super().push_to_hub(repo_id, *args, **kwargs)  # type: ignore[arg-type]
