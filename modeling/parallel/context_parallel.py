"""Context parallelism: processes share the tokens of each sequence, and each attends to the keys of all."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any
from weakref import WeakSet

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from transformers import PreTrainedModel

from ..common.input_checks import check_position_ids, check_tokens
from ..common.packed_documents import packed_starts
from ..ops.autocast import autocast
from ..ops.chunked_loss import IGNORED
from ..ops.dcmha.attention import Attention
from ..ops.dcmha.composition import Composition, pack_side, unpack_factors
from ..ops.dcmha.key_source import KeySource
from ..ops.distance_tables import DistanceTables
from ..positions.absolute import check_position_range
from ..positions.context_length import longest_readable
from ..serving.served_layers import no_mask
from .context_parallel_checks import check_mesh, check_model, parts_of_layers, unwrapped

# What belongs to the tokens of a sequence, and so is divided.
OF_TOKENS = ("input_ids", "inputs_embeds", "position_ids", "labels", "shift_labels")


class ContextParallel:
    """How the processes of a group divide sequences, and the exchange of what each of them has computed of its part.

    A sequence is cut into `2P` chunks for `P` processes, of which process `p` takes chunks `p` and `2P - 1 - p`. Under
    causality a chunk near the start has few keys to attend to and one near the end many, and so every process has the
    same work (Llama 3, arXiv 2407.21783, section 3.3.2).

    Composition mixes the scores of all heads, so heads cannot be divided instead, as DeepSpeed's Ulysses does.

    Args:
        mesh: the processes of the group, such as `init_device_mesh("cuda", (8,))`.

    Raises:
        ValueError: the mesh has several dimensions.
    """

    def __init__(self, mesh: DeviceMesh) -> None:
        if mesh.ndim != 1:
            raise ValueError(f"the mesh has {mesh.ndim} dimensions; give the one whose processes share sequences")
        self.mesh, self.processes, self.process = mesh, mesh.size(), mesh.get_local_rank()
        self._checked: WeakSet[PreTrainedModel] = WeakSet()
        self._has_compared = False

    def part(self, model: nn.Module, **whole: Tensor | None) -> dict[str, Any]:
        """The arguments of `model` for this process's part of whole sequences, the same in all processes of the group.

        The model then returns the logits of this part, `[B, T / P, V]`, and its share of the loss, which adds up to
        that of whole sequences if the model gets the same `num_items_in_batch` in all processes.

        Args:
            model: a DCFormer, a DCPythia or a decoder of `with_composed_heads`, with a language modeling head; perhaps
                in the wrappers that `unwrapped` knows.
            whole: `input_ids` `[B, T]` or `inputs_embeds` `[B, T, E]`; and perhaps `position_ids` `[B, T]`, which mark
                packed documents by restarting, and `labels` `[B, T]` or `shift_labels` `[B, T]`, in which the labels
                are at the places that predict them, and which come before `labels`.

        Raises:
            ValueError: see `check` and `take`; another argument is given, such as a mask; the model lacks some of the
                positions; or processes differ in the first sequences that they divide.
        """
        if unknown := sorted(whole.keys() - {*OF_TOKENS}):
            raise ValueError(
                f"{unknown} cannot be divided; give {', '.join(OF_TOKENS)}, mark packed documents by position_ids, and "
                "pad behind the text"
            )
        self.check(model)
        batch = {name: tensor for name, tensor in whole.items() if tensor is not None}
        check_tokens(batch.get("input_ids"), batch.get("inputs_embeds"))
        tokens, given = batch["input_ids" if "input_ids" in batch else "inputs_embeds"], batch.get("position_ids")
        shape = tokens.shape[:2]
        check_position_ids(given, tokens)
        positions = torch.arange(shape[1], device=tokens.device)[None] if given is None else given
        plain = unwrapped(model)
        if (limit := longest_readable(plain.config)) is not None:
            # Only the process that has such tokens would raise, and the others would wait for their keys.
            check_position_range(positions, limit)
        self._compare(tokens)
        starts = None if given is None else packed_starts(given, shape)
        if "shift_labels" in batch:  # without labels models compute no loss, and with both they read these alone
            batch.setdefault("labels", batch["shift_labels"])
        elif "labels" in batch:
            batch["shift_labels"] = F.pad(batch["labels"][:, 1:], (0, 1), value=IGNORED)
        batch["position_ids"] = positions
        mine: dict[str, Any] = {name: self.take(tensor) for name, tensor in batch.items()}
        shared = SharedAttention(self, shape[1], None if starts is None else self.take(starts))
        mask = no_mask(plain, mine["position_ids"].shape[1], plain.device)
        return mine | {"attention_mask": mask, "key_source": shared, "use_cache": False}

    def check(self, model: nn.Module) -> None:
        """Raises unless processes can share sequences of a model; a model of Transformers is run once, on one token.

        A model on the meta device, whose weights will come from another process, is left to that process to run.

        Raises:
            ValueError: processes cannot share the sequences of this model.
        """
        model = unwrapped(model)
        if model not in self._checked:
            if parts := parts_of_layers(model):
                check_mesh(model, parts, self.mesh)
            check_model(model)
            self._checked.add(model)

    def _compare(self, tokens: Tensor) -> None:
        """Raises ValueError unless all processes have the same tokens `[B, T]`, or embeddings of as many `[B, T, E]`.

        Loaders often give each process other data. Only the first sequences are compared, because that takes time.
        """
        if self._has_compared:
            return
        rows, length = tokens.shape[:2]
        ids = torch.zeros_like(tokens[..., 0], dtype=torch.long) if tokens.ndim == 3 else tokens.long()
        places = torch.arange(1, ids.numel() + 1, device=ids.device)
        mine = torch.stack([(ids.flatten() * places).sum(), ids.new_tensor(rows << 32 | length)])
        marks = self.gather(mine[None].to(self.mesh.device_type)).unflatten(1, (2, -1))[0]  # [2, P]
        if (marks != marks[:, :1]).any():
            raise ValueError(
                "the processes of a group have different sequences, and would mix them up; give all of them the same, "
                "for example by a sampler that divides data among groups"
            )
        self._has_compared = True

    def take(self, whole: Tensor, dim: int = 1) -> Tensor:
        """The part of this process, of a tensor with the tokens of whole sequences in dimension `dim`.

        Raises:
            ValueError: the sequences cannot be cut into chunks of the same length.
        """
        length, chunks = whole.shape[dim], 2 * self.processes
        if length % chunks or not length:
            raise ValueError(
                f"sequences of {length} tokens cannot be cut into {chunks} equal chunks, two for each process; give a "
                f"multiple of {chunks}"
            )
        mine = whole.chunk(chunks, dim)
        return torch.cat([mine[self.process], mine[-1 - self.process]], dim)

    def gather(self, part: Tensor, dim: int = 1) -> Tensor:
        """The inverse of `take`: whole sequences of the parts that all processes have; all call it at the same time.

        The gradient of a part is the sum of those that the processes have of it.
        """
        # Here, because a build of PyTorch without distributed training lacks it.
        from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

        shared = DTensor.from_local(part, self.mesh, [Shard(dim)], run_check=False)
        joined = shared.redistribute(placements=[Replicate()]).to_local(grad_placements=[Partial()])
        chunks = joined.chunk(2 * self.processes, dim)
        return torch.cat([*chunks[::2], *chunks[::-2]], dim)

    def chunks(self, length: int) -> Iterator[tuple[slice, int]]:
        """Where each chunk of this process is in its part of `length` tokens, and where it ends in the whole."""
        half = length // 2
        for index, chunk in enumerate((self.process, 2 * self.processes - 1 - self.process)):
            yield slice(index * half, (index + 1) * half), (chunk + 1) * half


@dataclass
class SharedAttention(KeySource):
    """The `key_source` of a model that reads parts of sequences: attention to the keys of all processes of the group.

    Attributes:
        length: tokens of a whole sequence.
        first_keys: `[B, T]`, for the tokens of this process: the first key that each of them sees; None for all.
    """

    context: ContextParallel
    length: int
    first_keys: Tensor | None

    def to(self, *args: Any, **kwargs: Any) -> "SharedAttention":
        """The same on another device, as of a tensor; Accelerate calls it."""
        return replace(self, first_keys=None if self.first_keys is None else self.first_keys.to(*args, **kwargs))

    def key_count(self, layer: int) -> int:
        return self.length

    def attend(
        self,
        layer: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        pre: Composition | None,
        post: Composition | None,
        scaling: float,
        sliding_window: int | None,
        attend: Attention,
        tables: DistanceTables,
    ) -> Tensor:
        """As in `KeySource`, for the tokens of this process; all processes call it at the same time.

        Raises:
            ValueError: the layer does not attend to just the tokens of this process.
        """
        part = self.length // self.context.processes
        if query.shape[2] != part or key.shape[2] != part:
            raise ValueError(
                f"layer {layer} attends with {query.shape[2]} queries and {key.shape[2]} keys, and a part has {part} "
                "tokens; give the model no cache, and leave out logits_to_keep"
            )
        key, value = (self.context.gather(states, dim=2) for states in autocast(key, value))
        stages = [None if stage is None else self._with_all_keys(stage) for stage in (pre, post)]
        outputs = []
        for chunk, end in self.context.chunks(query.shape[2]):
            pre, post = (None if stage is None else stage.narrow(chunk, slice(end)) for stage in stages)
            output, _ = attend(
                query[:, :, chunk],
                key[:, :, :end],
                value[:, :, :end],
                pre=pre,
                post=post,
                scaling=scaling,
                attention_mask=None,
                is_causal=True,
                sliding_window=sliding_window,
                first_keys=None if self.first_keys is None else self.first_keys[:, chunk],
                tables=tables,
            )
            outputs.append(output)
        return torch.cat(outputs, dim=1)

    def _with_all_keys(self, stage: Composition) -> Composition:
        """A stage with the factors of the keys of all processes."""
        if (terms := pack_side(stage, "key")) is None:
            return stage
        packed = {"query": pack_side(stage, "query"), "key": self.context.gather(terms)}
        return unpack_factors(packed, stage.static, stage.groups)
