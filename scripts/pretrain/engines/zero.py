"""ZeRO stages 1 to 3, by DeepSpeed: optimizer state, gradients and weights in shards.

DeepSpeed is called directly and not through Accelerate's plugin, which makes the update inside the backward pass,
before the gradient's norm can be judged, and which does not find the other processes on a CPU.
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

# Smaller weights stay whole in stage 3, for which gathering them would cost more than it saves.
PERSISTENT_ELEMENTS = 100_000


class ZeroEngine(Engine):
    """DeepSpeed's ZeRO; its weights are float32, with bf16 too, which is autocast as in DDP.

    Args:
        arguments: of the run; DeepSpeed wants to know the batch size and the norm to clip to.
    """

    reads_earlier_format = False

    def __init__(self, name: str, accelerator: Accelerator, arguments: PretrainArguments) -> None:
        super().__init__(name, accelerator)
        self.arguments, self.stage = arguments, int(name.removeprefix("zero"))
        # From stage 3 on, a forward pass gathers weights.
        self.is_collective = self.stage == 3

    def prepare(
        self, model: PreTrainedModel, build: OptimizerBuilder, *, compiled: bool
    ) -> tuple[nn.Module, Optimizer]:
        """Hands the model to DeepSpeed, which shards what its stage shards; compiled models are not for it.

        Raises:
            UserError: weights do not learn, of which stage 3 keeps no float32 shards.
        """
        frozen = [name for name, weight in model.named_parameters() if not weight.requires_grad]
        if frozen and self.stage == 3:
            raise UserError(f"engine=zero3 and {frozen[0]}, which does not learn; use zero2 or fsdp2")
        if self.accelerator.mixed_precision == "bf16":
            cast = torch.autocast(self.accelerator.device.type, torch.bfloat16)
            model.forward = convert_outputs_to_fp32(cast(model.forward))
        if self.stage < 3:
            model = model.to(self.accelerator.device)  # before the optimizer is made, which asks where the weights are
        elements = sum(weight.numel() for weight in model.parameters())
        leave_kernels_alone()
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
        """What scores batches without gradients: in stage 3 DeepSpeed's engine, which gathers the weights."""
        return model if self.stage == 3 else super().scorer(model)

    def clip(self, model: nn.Module, limit: float) -> Tensor:
        """The norm `[]` of the gradient over all shards, infinite also for NaN; the update itself scales gradients."""
        zero = self._engine.optimizer
        return combine_grad_norm_groups(zero._get_norm_groups()) if self.stage == 3 else zero.scaled_global_norm()

    def gradient(self, weight: nn.Parameter) -> Tensor | None:
        """The whole gradient of a weight; all processes have to ask for it."""
        return deepspeed.utils.safe_get_full_grad(weight)

    def training_tensors(
        self, model: nn.Module, optimizer: Optimizer, average: WeightAverage | None
    ) -> dict[str, Tensor]:
        """The whole tensors that fall to this process, in the memory of the CPU."""
        return ZeroState(self._engine).collect()

    def load_tensors(self, folder: Path, model: nn.Module, optimizer: Optimizer, average: WeightAverage | None) -> None:
        """Restores what any engine's `training_tensors` were; each file is read by one process."""
        ZeroState(self._engine).restore(folder)

    def full_weights(self, model: nn.Module) -> dict[str, Tensor]:
        """All weights gathered into the memory of the main process's CPU; empty on the others."""
        tensors = ZeroState(self._engine).collect(WEIGHTS, owners=1)
        return {name.removeprefix(WEIGHTS): tensor for name, tensor in tensors.items()}

    def sharding(self) -> str:
        """What a process holds, for the terminal."""
        shared = ("optimizer state", "gradients and optimizer state", "weights, gradients and optimizer state")
        return f"{shared[self.stage - 1]} in {self.accelerator.num_processes} shards"

    def _config(self, elements: int) -> dict[str, Any]:
        """DeepSpeed's configuration for a model of so many elements."""
        bucket = min(BUCKET_ELEMENTS, elements)
        return {
            "train_micro_batch_size_per_gpu": self.arguments.batch_size,
            # Where an update ends, `accumulating` says.
            "gradient_accumulation_steps": 1,
            "gradient_clipping": self.arguments.max_grad_norm,
            "zero_allow_untested_optimizer": True,
            "zero_optimization": {
                "stage": self.stage,
                "reduce_bucket_size": bucket,
                "allgather_bucket_size": bucket + bucket % 2,
                "stage3_prefetch_bucket_size": bucket // 2,
                "stage3_param_persistence_threshold": PERSISTENT_ELEMENTS,
                # It would replace `torch.nn.functional.linear` for whatever else the process does.
                "memory_efficient_linear": False,
            },
        }


class ZeroOptimizer(Optimizer):
    """DeepSpeed's optimizer under the interface of torch's.

    Its weights are shards, so its groups and states are DeepSpeed's own; `ZeroState` names what they hold.
    """

    def __init__(self, engine: DeepSpeedEngine) -> None:
        self.engine = engine

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        """The groups, whose learning rates the next update reads."""
        return self.engine.optimizer.param_groups

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Clips the gradient and makes the update; there is no closure."""
        self.engine.step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drops the gradients of an update that is left out; a step drops them itself."""
        zero = self.engine.optimizer
        zero.zero_grad()
        if not self.engine.zero_optimization_partition_weights():
            # What stages 1 and 2 have averaged over processes; stage 3 overwrites it.
            zero.averaged_gradients.clear()


def leave_kernels_alone() -> None:
    """Keeps DeepSpeed from compiling an operator for inference when a run starts, and from telling all that it does."""
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.utils.logger.setLevel(logging.WARNING)
