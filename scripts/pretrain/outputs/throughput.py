"""Tokens per second, FLOP/s, and their share of what the hardware can do."""

import resource
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from torch import Tensor
from transformers import PreTrainedModel

from dynattn.families import family_of
from dynattn.modeling.common.decoder_heads import CausalLMHead
from dynattn.modeling.common.encoder_heads import MaskedLMHead
from dynattn.modeling.common.packed_documents import starts_by_positions
from dynattn.modeling.ops.chunked_loss import IGNORED

from ...common.flops import ModelFlops
from ...common.measuring import gemm_rate


@dataclass
class Throughput:
    """Counts tokens, FLOPs and seconds from one report to the next.

    Model FLOPs utilization (MFU; PaLM, arXiv 2204.02311, section 4.1) is the FLOPs that the model needs (composition
    included, recomputation not) divided by the FLOPs of large matrix products in the same time.

    Attributes:
        flops: FLOPs of the model; None for a model whose operations are not known, which has no MFU.
        gemm_rate: FLOP/s of a large matrix product in the dtype of training, all processes together.
        tokens, seconds, operations: counts since the last report; `operations` are the FLOPs of this process.
    """

    accelerator: Accelerator
    flops: ModelFlops | None
    gemm_rate: float
    tokens: int = 0
    seconds: float = 0.0
    operations: int = 0

    @classmethod
    def of(cls, model: PreTrainedModel, accelerator: Accelerator) -> "Throughput":
        """Measures the rate of matrix products. This draws random numbers, so it comes before the seed is set."""
        if not isinstance(model, CausalLMHead | MaskedLMHead) or family_of(model.config) is None:
            return cls(accelerator, None, 0.0)
        dtype = torch.bfloat16 if accelerator.mixed_precision == "bf16" else torch.float32
        rate = torch.tensor(gemm_rate(dtype, accelerator.device), device=accelerator.device)
        return cls(accelerator, ModelFlops.of(model), accelerator.reduce(rate, reduction="sum").item())

    def add(self, batches: Sequence[dict[str, Tensor]], tokens: int, seconds: float) -> None:
        """Counts an update: the `batches` of this process, of tensors `[B, T]`, and the `tokens` of all processes."""
        self.tokens += tokens
        self.seconds += seconds
        if self.flops is not None:
            for batch in batches:
                # An encoder computes logits for targets only.
                outputs = None if self.flops.is_causal else int((batch["labels"] != IGNORED).sum())
                self.operations += self.flops.training(positions(batch), outputs)

    def counts(self) -> dict[str, float]:
        """The counts since the last report, of all processes, which have to call it together; for a checkpoint."""
        return {"tokens": self.tokens, "seconds": self.seconds, "operations": sum(gather_object([self.operations]))}

    def restore(self, counts: Mapping[str, float]) -> None:
        """Goes on from the `counts` of a checkpoint; those of earlier versions have none, which are zero.

        Without them the next report would be of the updates after the checkpoint alone, and those of a run that was
        interrupted would not be the ones of an undisturbed run. The first process takes the operations of all.
        """
        self.tokens, self.seconds = int(counts.get("tokens", 0)), counts.get("seconds", 0.0)
        self.operations = int(counts.get("operations", 0)) if self.accelerator.is_main_process else 0

    def report(self) -> dict[str, float]:
        """The rates since the last report; all processes have to call it together."""
        rates = {"tokens_per_second": self.tokens / self.seconds, "memory_gib": peak_gib(self.accelerator.device)}
        if self.flops is not None:
            operations = torch.tensor(float(self.operations), device=self.accelerator.device)
            per_second = self.accelerator.reduce(operations, reduction="sum").item() / self.seconds
            rates |= {"flops_per_second": per_second, "gemm_flops_per_second": self.gemm_rate}
            rates["mfu"] = per_second / self.gemm_rate
        self.restore({})
        return rates


def peak_gib(device: torch.device) -> float:
    """The most GiB that this process has held: on a GPU the memory of tensors, otherwise all memory of the process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


def positions(batch: dict[str, Tensor]) -> Tensor:
    """How many earlier tokens of its document each token sees, `[B, T]`; memory of earlier segments is not counted."""
    given, places = batch.get("position_ids"), torch.arange(batch["input_ids"].shape[1])
    return places.expand_as(batch["input_ids"]) if given is None else places - starts_by_positions(given)
