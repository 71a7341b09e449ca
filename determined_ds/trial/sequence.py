"""Ranks that share a sequence (Ulysses, arXiv 2309.14509), by DeepSpeed's own groups and attention.

1. The loader gives every rank of a group the same micro-batch; ``cut`` keeps this rank's slice of its tokens.
2. The model computes on the slice, at the ``positions`` that it has in the whole.
3. Attention alone needs all tokens: an all-to-all exchanges slices of all heads for all tokens of some heads, and back.
4. ``mean`` makes the loss of the group; DeepSpeed adds up its gradients, and averages over the replicas.

Source: deepspeed 0.19.8 ``runtime/sequence_parallel/ulysses_sp.py``, ``parallel_state_sp.py``; ``sequence/layer.py``.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import deepspeed.comm as dist
import torch
from determined.pytorch import deepspeed as det_ds
from torch import Tensor

from determined_ds.errors import Problem, TrainingError
from determined_ds.trial.returned import refused

KEY, CODE = "hyperparameters.sequence_parallel_size", "sequence-parallel"
TOKENS = 1  # the dimension of a batch's tensors that is cut


def DeepSpeedMPU(mpu: Any) -> det_ds.ModelParallelUnit:
    """Determined's unit for ``context.wrap_mpu``: this rank's replica, and whether it reads data and reports metrics.

    Args:
        mpu: ``engine.mpu`` of any engine: a pipeline engine's grid; an object with Megatron's methods, such as
            DeepSpeed's own of tensor parallel; DeepSpeed's ``parallel_state_sp``, whose ranks that share a sequence
            are one replica; or None, of a data-parallel one.
    """
    if hasattr(mpu, "get_pipe_parallel_rank"):
        return det_ds.make_deepspeed_mpu(mpu)
    if mpu is None or hasattr(mpu, "initialize_sequence_parallel"):
        size = 1 if mpu is None else mpu.get_sequence_parallel_world_size()
        rank, replicas = dist.get_rank() // size, dist.get_world_size() // size
    else:
        rank, replicas = mpu.get_data_parallel_rank(), mpu.get_data_parallel_world_size()
    reports = getattr(mpu, "get_tensor_model_parallel_rank", lambda: 0)() == 0
    how = {"should_report_metrics": reports, "should_build_data_loader": True}
    return det_ds.ModelParallelUnit(data_parallel_rank=rank, data_parallel_world_size=replicas, **how)


class SequenceGroup:
    """The ranks that share this rank's sequences.

    Attributes:
        size: Ranks of a group; 1: sequences are whole.
        rank: Which slice this rank has, from 0.
        process_group: Of ``torch.distributed``; None where sequences are whole.
        unit: What ``deepspeed.initialize(mpu=...)`` takes; None where sequences are whole.
    """

    def __init__(self, size: int = 1) -> None:
        self.size, self.rank = size, 0
        self.process_group: Any = None
        self.unit: Any = None
        if size == 1:
            return
        from deepspeed.runtime.sequence_parallel import parallel_state_sp

        self.unit = parallel_state_sp
        if parallel_state_sp._SEQUENCE_PARALLEL_GROUP is None:
            parallel_state_sp.initialize_sequence_parallel(size)
        self.process_group = parallel_state_sp.get_sequence_parallel_group()
        self.rank = parallel_state_sp.get_sequence_parallel_rank()
        assert dist.get_world_size(self.process_group) == size, "groups of another size are there already"

    def cut(self, batch: Any) -> Any:
        """This rank's slice of a micro-batch: of each tensor of two dimensions or more, a part of the second.

        Args:
            batch: Tensors in lists, tuples and mappings of any depth, ``(samples, tokens, ...)`` each.

        Raises:
            TrainingError: the tokens cannot be cut into slices of one length.
        """
        if self.size == 1:
            return batch
        if isinstance(batch, Mapping):
            return type(batch)({name: self.cut(value) for name, value in batch.items()})  # type: ignore[call-arg]
        if isinstance(batch, (list, tuple)):
            made = [self.cut(value) for value in batch]
            return type(batch)(*made) if hasattr(batch, "_fields") else type(batch)(made)
        if not isinstance(batch, Tensor) or batch.dim() <= TOKENS:
            return batch
        length, rest = divmod(batch.shape[TOKENS], self.size)
        if rest:
            message = f"a batch of {batch.shape[TOKENS]} tokens cannot be cut into {self.size} equal slices"
            fix = f"pad sequences to a multiple of {self.size}; or define split_sequence(batch) in the trial"
            raise TrainingError(Problem(key=KEY, value=self.size, message=message, fix=fix, code=CODE))
        return batch.narrow(TOKENS, self.rank * length, length).contiguous()

    def positions(self, num_tokens: int, device: Any = None) -> Tensor:
        """Positions of this rank's slice of ``num_tokens`` in the whole sequence: int64, ``(num_tokens,)``."""
        first = self.rank * num_tokens
        return torch.arange(first, first + num_tokens, device=device)

    def mean(self, total: Tensor, count: Tensor | int) -> Tensor:
        """A mean over the tokens of all slices, to descend and to report.

        Args:
            total: Sum over the tokens of this rank's slice, a scalar.
            count: How many of them it is the sum of: of a loss, those whose label is not ignored.

        Returns:
            The mean of the group, the same on each of its ranks, with the gradient of this rank's part.
        """
        if self.size == 1:
            return total / count
        own = total.detach()
        sums = torch.stack([own.double(), torch.as_tensor(count, device=own.device).double()])
        dist.all_reduce(sums, group=self.process_group)
        mean, part = (each.to(own.dtype) for each in (sums[0] / sums[1], total.double() / sums[1]))
        return mean + (part - part.detach())  # zero, with a gradient

    def attention(self, kernel: str = "sdpa") -> str:
        """The ``attn_implementation`` of a model of transformers: causal, over the tokens of all slices, unpadded.

        Args:
            kernel: Returned where sequences are whole; else only ``sdpa`` is taken, which has flash kernels on GPUs.
        """
        if self.size == 1:
            return kernel
        if kernel != "sdpa":
            message, fix = "ranks that share a sequence attend by sdpa alone", "attn_implementation: sdpa"
            raise refused("hyperparameters.attn_implementation", message, fix, CODE, value=kernel)
        from deepspeed.runtime.sequence_parallel.ulysses_sp import UlyssesSPAttentionHF
        from transformers import AttentionInterface

        how = {"attn": AttentionInterface()[kernel], "process_group": self.process_group}
        how |= {"num_hidden_layers": 1, "seq_length_is_variable": True}
        exchanging = functools.cache(
            functools.partial(UlyssesSPAttentionHF, **how)
        )  # by the shape of a batch

        def attend(module: Any, query: Any, key: Any, value: Any, _: Any, *args: Any, **kwargs: Any) -> Any:
            samples, heads, tokens, width = query.shape
            whole, window = tokens * self.size, kwargs.get("sliding_window")
            if window is not None and window < whole:
                message = f"the model attends to the last {window} of {whole} tokens, and ranks that share them to all"
                fix = f"use sequences of at most {window} tokens, or a model without a sliding window"
                raise refused(KEY, message, fix, "sequence-window")
            # It gathers positions for kernels that read them. Not all models hand theirs on.
            kwargs.setdefault("position_ids", self.positions(tokens, query.device)[None])
            sizes = {"batch_size": samples, "attn_head_count": heads, "attn_head_size": width}
            exchanged = exchanging(**sizes, kv_head_count=key.shape[1])
            output, weights = exchanged(module, query, key, value, None, *args, **kwargs)
            return output.view(samples, tokens, heads, width), weights

        AttentionInterface.register("ulysses_sdpa", attend)
        return "ulysses_sdpa"
