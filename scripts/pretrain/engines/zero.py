"""ZeRO stages 1 to 3, by DeepSpeed: optimizer state, gradients and weights in shards.

DeepSpeed is called directly and not through Accelerate's plugin. The plugin makes the update inside the backward pass,
before a bad gradient can be found, and it does not find the other processes on a CPU.
"""

import logging
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import deepspeed
import torch
from accelerate import Accelerator
from accelerate.utils import convert_outputs_to_fp32
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.utils import combine_grad_norm_groups
from torch import Tensor, nn
from torch.optim import Optimizer
from transformers import PreTrainedModel

from ...common.errors import UserError
from ..arguments import PretrainArguments
from ..outputs.training_state import WEIGHTS
from ..weight_average import WeightAverage
from .interface import BUCKET_ELEMENTS, Engine, OptimizerBuilder
from .zero_state import ZeroState

# Weights with fewer elements stay whole in stage 3, because gathering them would cost more than sharding them saves.
PERSISTENT_ELEMENTS = 100_000


class ZeroEngine(Engine):
    """DeepSpeed's ZeRO. Weights are always float32; bf16 is autocast, as in DDP.

    Args:
        arguments: the arguments of the run, which has the batch size and the norm to clip to.
    """

    reads_earlier_format = False

    def __init__(self, name: str, accelerator: Accelerator, arguments: PretrainArguments) -> None:
        super().__init__(name, accelerator)
        self.arguments, self.stage = arguments, int(name.removeprefix("zero"))
        # In stage 3 a forward pass gathers weights from all processes.
        self.is_collective = self.stage == 3

    def prepare(
        self, model: PreTrainedModel, build: OptimizerBuilder, *, compiled: bool
    ) -> tuple[nn.Module, Optimizer]:
        """Hands the model to DeepSpeed, which shards what the stage says; `build_zero` has refused `compiled`.

        Raises:
            UserError: stage 3 with frozen weights, of which DeepSpeed keeps no float32 shards.
        """
        frozen = [name for name, weight in model.named_parameters() if not weight.requires_grad]
        if frozen and self.stage == 3:
            raise UserError(f"engine=zero3 cannot hold {frozen[0]}, a weight that does not learn; use zero2 or fsdp2")
        if self.accelerator.mixed_precision == "bf16":
            cast = torch.autocast(self.accelerator.device.type, torch.bfloat16)
            model.forward = convert_outputs_to_fp32(cast(model.forward))
        if self.stage < 3:
            model = model.to(self.accelerator.device)  # before `build`: the optimizer depends on the weights' device
        elements = sum(weight.numel() for weight in model.parameters())
        # Neither compile an operator for inference at the start of a run, nor log every step.
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
        deepspeed.utils.logger.setLevel(logging.WARNING)
        self._engine, *_ = deepspeed.initialize(model=model, optimizer=build(model), config=self._config(elements))
        return self._engine, ZeroOptimizer(self._engine)

    def accumulating(self, model: nn.Module, is_last: bool) -> AbstractContextManager[None]:
        """The context of a forward and backward pass; stage 1 exchanges gradients in the last one of an update."""
        self._engine.set_gradient_accumulation_boundary(is_last)
        return nullcontext()

    def backward(self, loss: Tensor) -> None:
        """The backward pass of this process's share `[]` of the update's loss."""
        # Gradients are averaged over processes, while each loss is already a share of the sum over them.
        self._engine.backward(loss * self.accelerator.num_processes)

    def scorer(self, model: nn.Module) -> nn.Module:
        """The module that scores batches without gradients: in stage 3 DeepSpeed's engine, which gathers weights."""
        return model if self.stage == 3 else super().scorer(model)

    def clip(self, model: nn.Module, limit: float) -> Tensor:
        """The norm `[]` of the gradient over all shards; NaN counts as infinite. The update itself clips it."""
        zero = self._engine.optimizer
        return combine_grad_norm_groups(zero._get_norm_groups()) if self.stage == 3 else zero.scaled_global_norm()

    def gradient(self, weight: nn.Parameter) -> Tensor | None:
        """The whole gradient of a weight; all processes have to call this together."""
        return deepspeed.utils.safe_get_full_grad(weight)

    def training_tensors(
        self, model: nn.Module, optimizer: Optimizer, average: WeightAverage | None
    ) -> dict[str, Tensor]:
        """The tensors that this process writes into a checkpoint, in one piece and in the memory of the CPU."""
        return ZeroState(self._engine).collect()

    def load_tensors(self, folder: Path, model: nn.Module, optimizer: Optimizer, average: WeightAverage | None) -> None:
        ZeroState(self._engine).restore(folder)

    def full_weights(self, model: nn.Module) -> dict[str, Tensor]:
        """All weights gathered into the memory of the main process's CPU; empty on the others."""
        tensors = ZeroState(self._engine).collect(WEIGHTS, owners=1)
        return {name.removeprefix(WEIGHTS): tensor for name, tensor in tensors.items()}

    def sharding(self) -> str:
        shared = ("optimizer state", "gradients and optimizer state", "weights, gradients and optimizer state")
        return f"{shared[self.stage - 1]} in {self.accelerator.num_processes} shards"

    def _config(self, elements: int) -> dict[str, Any]:
        """DeepSpeed's configuration for a model whose weights have `elements` elements."""
        bucket = min(BUCKET_ELEMENTS, elements)
        return {
            "train_micro_batch_size_per_gpu": self.arguments.batch_size,
            # `accumulating` tells DeepSpeed which backward pass ends an update.
            "gradient_accumulation_steps": 1,
            "gradient_clipping": self.arguments.max_grad_norm,
            "zero_allow_untested_optimizer": True,
            "zero_optimization": {
                "stage": self.stage,
                "reduce_bucket_size": bucket,
                "allgather_bucket_size": bucket + bucket % 2,
                "stage3_prefetch_bucket_size": bucket // 2,
                "stage3_param_persistence_threshold": PERSISTENT_ELEMENTS,
                # With it DeepSpeed replaces `torch.nn.functional.linear` in the whole process.
                "memory_efficient_linear": False,
            },
        }


class ZeroOptimizer(Optimizer):
    """DeepSpeed's optimizer with the interface of torch's.

    Its groups and states are DeepSpeed's own and hold shards of weights; `ZeroState` knows which.
    """

    def __init__(self, engine: DeepSpeedEngine) -> None:
        self.engine = engine

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        """DeepSpeed's groups; the next update uses the learning rates in them."""
        return self.engine.optimizer.param_groups

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Clips the gradient and makes the update; there is no closure."""
        self.engine.step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drops the gradients of an update that is skipped; `step` drops those of an update that is made."""
        zero = self.engine.optimizer
        zero.zero_grad()
        if not self.engine.zero_optimization_partition_weights():
            # Gradients that stages 1 and 2 have averaged over processes; stage 3 overwrites its own.
            zero.averaged_gradients.clear()
