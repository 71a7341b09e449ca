"""What a GPU is given trains here too, on a CPU that is said to have fp16; and the loop makes no GPU wait.

On a GPU each reading of a number waits for all that is queued. On a CPU readings are counted by torch's own operations:
what makes a number or a shape of a tensor is dispatched by a name; ``cpu`` and its like are seen as called.
"""

from __future__ import annotations

import contextlib
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from tests.harness.ranks import Ranks
from tests.package import CUDA, decide, records, train_in_fp16_on_cpus

ACCUMULATION, NUM_BATCHES = 2, 6
DISPATCHED = {"_local_scalar_dense", "nonzero", "masked_select", "_unique2", "equal"}
CALLED = {"cpu", "tolist", "numpy"}
# The order of an epoch's samples is drawn and read on the host; no device holds it.
LOADER = "/torch/utils/data/"


def of_gpus(stage: int, **sections: Any) -> dict[str, Any]:
    """All that DeepSpeed is given on one GPU."""
    ds = {
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
        "gradient_accumulation_steps": ACCUMULATION,
        "zero_optimization": {"stage": stage},
        **sections,
    }
    return decide({"global_batch_size": 8}, ds, slots=1, accelerator=CUDA).ds_config


def train(
    run_dir: Path | None,
    ds_config: dict[str, Any],
    *,
    batches: int = NUM_BATCHES,
    report: int = 1,
    engine: str = "deepspeed",
    stages: int = 1,
    reads_loss: bool = False,
) -> tuple[list[int], dict[str, int]]:
    """In a rank: train; synchronizations of the device in each call of ``train_batch``, and who reads how often."""
    from deepspeed.accelerator import get_accelerator
    from determined.pytorch import Batch

    from determined_ds import DataParallelTrial, PipelineTrial, Trainer, open_context

    train_in_fp16_on_cpus()
    steps: list[int] = []
    synchronize = mock.patch.object(type(get_accelerator()), "synchronize").start()

    class Data:
        def build_training_data_loader(self: Any) -> Any:
            inputs = torch.randn(64, 4, generator=torch.Generator().manual_seed(0))
            return self.training_loader(torch.utils.data.TensorDataset(inputs, inputs.clone()))

        def build_validation_data_loader(self: Any) -> Any:
            return self.validation_loader(
                torch.utils.data.TensorDataset(torch.randn(8, 4), torch.randn(8, 4))
            )

    class Whole(Data, DataParallelTrial):
        def build_model(self) -> torch.nn.Module:
            return torch.nn.Linear(4, 4)

        def loss(self, model: Any, batch: Any) -> Any:
            inputs, targets = batch
            outputs = model(inputs.to(next(model.parameters()).dtype)).float()
            mean = outputs.mean().item() if reads_loss else outputs.detach().mean()
            return {"loss": torch.nn.functional.mse_loss(outputs, targets), "mean": mean}

        def train_batch(self, *given: Any) -> Any:
            before = synchronize.call_count
            metrics = super().train_batch(*given)
            steps.append(synchronize.call_count - before)
            return metrics

    class Stages(Data, PipelineTrial):
        def build_layers(self) -> list[Any]:
            return [torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)]

        def loss(self, outputs: Any, targets: Any) -> torch.Tensor:
            return torch.nn.functional.mse_loss(outputs, targets)

    kind: Any = Stages if stages > 1 else Whole
    hparams = {"global_batch_size": 8, "pipe_parallel_size": stages, "deepspeed_config": ds_config}
    with open_context(hparams=hparams, run_dir=run_dir, engine=engine) as context:
        trial = kind(context)
        with counted_readings() as readers:
            Trainer(trial, context).fit(max_length=Batch(batches), reporting_period=Batch(report))
    return steps, dict(readers)


@contextlib.contextmanager
def counted_readings() -> Iterator[Counter[str]]:
    """Who reads how often: ``deepspeed``, ``trial`` or ``determined_ds``."""
    readers: Counter[str] = Counter()

    def note() -> None:
        frame: Any = sys._getframe(2)
        while frame is not None:
            path, function = frame.f_code.co_filename, frame.f_code.co_name
            if LOADER in path:
                return
            if not function.startswith("__torch_"):
                for name, part in (("deepspeed", "/deepspeed/"), ("determined_ds", "/determined_ds/")):
                    if part in path:
                        readers[name] += 1
                        return
                if path == __file__:
                    readers["trial"] += 1
                    return
            frame = frame.f_back

    class Dispatched(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func.overloadpacket.__name__ in DISPATCHED:
                note()
            return func(*args, **(kwargs or {}))

    class Called(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if getattr(func, "__name__", "") in CALLED:
                note()
            return func(*args, **(kwargs or {}))

    with Dispatched(), Called():
        yield readers


# -------------------------------------------------------------------------------------------------- fp16


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_fp16_reports_its_loss_scale_and_no_norm_of_a_skipped_step(
    stage: int, one_rank: Ranks, tmp_path: Path
) -> None:
    """The first scales overflow; each optimizer of DeepSpeed's keeps the scale in a place of its own."""
    fp16 = {"enabled": True, "initial_scale_power": 18, "hysteresis": 1}
    one_rank.run(train, tmp_path, of_gpus(stage, fp16=fp16))
    reports = [report for _, report in records(tmp_path, "training")]
    assert len(reports) == NUM_BATCHES
    assert reports[0]["skipped_steps"] == 1
    assert "grad_norm" not in reports[0]
    assert reports[-1]["skipped_steps"] < NUM_BATCHES
    assert 0 < reports[-1]["grad_norm"] < float("inf")
    assert reports[-1]["loss_scale"] == 2.0 ** (18 - reports[-1]["skipped_steps"])


def test_fp16_without_zero_is_the_same_training_as_with_it(one_rank: Ranks, tmp_path: Path) -> None:
    """By SGD, which shows the size of a gradient that Adam hides: what is divided by a scale was multiplied by it."""
    how = {"optimizer": {"type": "SGD", "params": {"lr": 0.2}}, "zero_allow_untested_optimizer": True}
    how |= {"fp16": {"enabled": True, "initial_scale_power": 10}, "gradient_clipping": 0.1}
    found = []
    for stage in (0, 1):
        one_rank.run(train, tmp_path / str(stage), of_gpus(stage, **how))
        found.append([report for _, report in records(tmp_path / str(stage), "training")])
    for name in ("loss", "grad_norm", "loss_scale"):
        expected = [report[name] for report in found[1]]
        assert [report[name] for report in found[0]] == pytest.approx(expected, rel=0.01), name


# ------------------------------------------------------------------------------------ no step waits for the device


# What DeepSpeed 0.19.8 reads by itself in a step: whether gradients and their norm are finite, the norm without ZeRO.
BY_DEEPSPEED = {0: 5, 1: 3, 2: 3, 3: 1}
PIPELINE = {
    "optimizer": {"type": "AdamW", "params": {"lr": 0.01, "torch_adam": True}},
    "gradient_accumulation_steps": ACCUMULATION,
}


@pytest.mark.parametrize("case", [0, 1, 2, 3, "pipeline", "ddp", "an author's loss"])
def test_no_step_waits_and_no_batch_is_read_between_reports(
    case: Any, one_rank: Ranks, two_ranks: Ranks
) -> None:
    """Eight batches before the one report are read as often as four, but for what DeepSpeed and the author read."""
    stage = case if isinstance(case, int) else 0
    how: dict[str, Any] = {"report": 100, "engine": "ddp" if case == "ddp" else "deepspeed"}
    ds_config = of_gpus(stage, bf16={"enabled": True}, gradient_clipping=1.0)
    ranks = one_rank
    if case == "pipeline":
        ranks, ds_config, how["stages"] = two_ranks, PIPELINE, 2
    how["reads_loss"] = case == "an author's loss"
    few, many = (ranks.run(train, None, ds_config, batches=batches, **how) for batches in (4, 8))
    for (_, before), (waits, after) in zip(few, many, strict=True):
        assert not any(waits)
        more = {name: after[name] - before.get(name, 0) for name in after}
        # Whether to stop is asked by the clock: on a busy machine once or twice between, and never at each batch.
        assert more.get("determined_ds", 0) < 4
        assert more.get("trial", 0) == (4 * ACCUMULATION if how["reads_loss"] else 0)
        assert more.get("deepspeed", 0) <= (0 if case == "ddp" else 4 * BY_DEEPSPEED[stage])
