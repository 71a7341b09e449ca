"""Between two reports our loop reads no number of the device: on a GPU each reading would wait for all that is queued.

Counted on a CPU, by torch's own operations: whatever makes a number of a tensor (``item``, ``bool``, ``float``) is
dispatched as ``aten._local_scalar_dense``; what makes a shape of one is ``nonzero`` and its like; ``cpu``, ``tolist``
and ``numpy`` are seen as they are called.
"""

from __future__ import annotations

import contextlib
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from deepspeed.pipe import LayerSpec
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from tests.ranks import Ranks
from tests.runtime.test_as_on_gpus import config_of_gpus, fp16_and_counted

PERIOD, NUM_BATCHES = 4, 8
DISPATCHED = {"_local_scalar_dense", "nonzero", "masked_select", "_unique2", "equal"}
CALLED = {"cpu", "tolist", "numpy"}
# The order of an epoch's samples is drawn and read on the host; no device holds it.
LOADER = "/torch/utils/data/"


@contextlib.contextmanager
def counted_readings() -> Iterator[Counter[str]]:
    """Who reads how often while a batch is trained: ``deepspeed``, or a function of ours."""
    readers: Counter[str] = Counter()

    def note(name: str) -> None:
        reader, in_step = "", False
        frame: Any = sys._getframe(2)
        while frame is not None:
            path, function = frame.f_code.co_filename, frame.f_code.co_name
            if LOADER in path:
                return
            if not reader and not function.startswith("__torch_"):
                if "/deepspeed/" in path:
                    reader = "deepspeed"
                elif "/determined_ds/" in path or path == __file__:
                    reader = f"{function}: {name}"
            in_step = in_step or function == "_train_one"
            frame = frame.f_back
        readers.update([reader] if in_step else [])

    class Dispatched(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func.overloadpacket.__name__ in DISPATCHED:
                note(func.overloadpacket.__name__)
            return func(*args, **(kwargs or {}))

    class Called(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if getattr(func, "__name__", "") in CALLED:
                note(func.__name__)
            return func(*args, **(kwargs or {}))

    with Dispatched(), Called():
        yield readers


def train_and_count(
    run_dir: str, hparams: dict[str, Any], engine: str = "deepspeed", read_loss: bool = False
) -> dict[str, int]:
    """In a rank: train, report every fourth batch, and count.

    Args:
        run_dir: The run directory.
        hparams: Hyperparameters.
        engine: ``deepspeed`` or ``ddp``.
        read_loss: The author's loss does what it should not.
    """
    from determined.pytorch import Batch

    from determined_ds import DataParallelTrial, PipelineTrial, Trainer, open_context

    class Data:
        def build_training_data_loader(self: Any) -> Any:
            inputs = torch.randn(32, 4)
            return self.training_loader(torch.utils.data.TensorDataset(inputs, inputs.clone()))

        def build_validation_data_loader(self: Any) -> Any:
            inputs = torch.randn(8, 4)
            return self.validation_loader(torch.utils.data.TensorDataset(inputs, inputs.clone()))

    class Whole(Data, DataParallelTrial):
        def build_model(self) -> torch.nn.Module:
            return torch.nn.Linear(4, 4)

        def loss(self, model: Any, batch: Any) -> Any:
            inputs, targets = batch
            outputs = model(inputs.to(next(model.parameters()).dtype)).float()
            mean = outputs.mean().item() if read_loss else outputs.detach().mean()
            return {"loss": torch.nn.functional.mse_loss(outputs, targets), "mean": mean}

    class Stages(Data, PipelineTrial):
        def build_layers(self) -> list[Any]:
            return [LayerSpec(torch.nn.Linear, 4, 4) for _ in range(2)]

        def loss(self, outputs: Any, targets: Any) -> torch.Tensor:
            return torch.nn.functional.mse_loss(outputs, targets)

    kind: Any = Stages if "pipe_parallel_size" in hparams else Whole
    with fp16_and_counted(), open_context(hparams=hparams, run_dir=run_dir, engine=engine) as context:
        trial = kind(context)
        with counted_readings() as readers:
            Trainer(trial, context).fit(max_length=Batch(NUM_BATCHES), reporting_period=Batch(PERIOD))
    return dict(readers)


def hparams_of(stage: int, **more: Any) -> dict[str, Any]:
    ds_config = config_of_gpus(stage, bf16={"enabled": True}, gradient_clipping=1.0)
    return {"global_batch_size": 8, "deepspeed_config": ds_config, **more}


# What DeepSpeed 0.19.8 reads by itself: whether each gradient and their norm are finite, and the norm without ZeRO.
BY_DEEPSPEED_A_STEP = {0: 5, 1: 3, 2: 3, 3: 1}
# ZeRO 3 compares the parameters of its ranks in the first passes.
BY_DEEPSPEED_AT_FIRST = {3: 30}


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_no_batch_is_read_between_reports(stage: int, one_rank: Ranks, tmp_path: Path) -> None:
    (readers,) = one_rank.run(train_and_count, str(tmp_path), hparams_of(stage))
    most = BY_DEEPSPEED_A_STEP[stage] * NUM_BATCHES + BY_DEEPSPEED_AT_FIRST.get(stage, 0)
    assert readers.pop("deepspeed") <= most
    assert readers == {}


def test_no_batch_of_a_pipeline_is_read_between_reports(two_ranks: Ranks, tmp_path: Path) -> None:
    """Whatever DeepSpeed reads: two numbers a batch, and at first the shapes that one stage sends another."""
    ds_config = {
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01, "torch_adam": True}},
        "gradient_accumulation_steps": 2,
    }
    hparams = {"global_batch_size": 8, "pipe_parallel_size": 2, "deepspeed_config": ds_config}
    for readers in two_ranks.run(train_and_count, str(tmp_path), hparams):
        assert readers.pop("deepspeed") <= 3 * NUM_BATCHES
        assert readers == {}


def test_nothing_at_all_is_read_by_torch_alone(one_rank: Ranks, tmp_path: Path) -> None:
    (readers,) = one_rank.run(train_and_count, str(tmp_path), hparams_of(0), "ddp")
    assert readers == {}


def test_what_an_author_reads_is_counted(one_rank: Ranks, tmp_path: Path) -> None:
    """So the count counts: two micro-batches a batch."""
    (readers,) = one_rank.run(train_and_count, str(tmp_path), hparams_of(0), read_loss=True)
    del readers["deepspeed"]
    assert readers == {"loss: _local_scalar_dense": 2 * NUM_BATCHES}
