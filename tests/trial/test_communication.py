"""What ranks hand to each other in a step, to the byte, by the settings that docs/communication.md speaks of."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch

from determined_ds.trial.engine import check_sparse_gradients
from tests.making import refusal
from tests.ranks import Ranks

SIZE = 64 * 256 + 256  # parameters, which two ranks divide evenly
FLOATS, HALVES = 4 * SIZE, 2 * SIZE
STEPS = 4  # ZeRO 3 compares what its ranks do in the first ones
ZERO = "zero_optimization"
BF16 = {"communication_data_type": "bf16"}
# Every parameter is divided, and let go after its use in the forward pass.
THREE: dict[str, Any] = {
    "stage": 3,
    "stage3_param_persistence_threshold": 0,
    "stage3_max_live_parameters": 0,
    "stage3_max_reuse_distance": 0,
    "overlap_comm": False,
}
SETTINGS: dict[str, dict[str, Any]] = {
    "fp32": {},
    "bf16": BF16,
    "ZeRO 1": {ZERO: {"stage": 1}},
    "ZeRO 1, bf16": {ZERO: {"stage": 1}, **BF16},
    "ZeRO 2, in parts": {ZERO: {"stage": 2, "use_multi_rank_bucket_allreduce": False}},
    "ZeRO 2, gathered in parts": {ZERO: {"stage": 2, "allgather_bucket_size": 100}},
    "ZeRO 3": {ZERO: THREE},
    "ZeRO 3, bf16": {ZERO: THREE, **BF16},
    "ddp": {},
    "ddp, bf16": BF16,
}
# (operation, dtype) -> bytes of the whole in a step; what is smaller than a kilobyte is left out.
EXPECTED: dict[str, dict[tuple[str, str], int]] = {
    "fp32": {("all_reduce", "float32"): FLOATS},
    "bf16": {("all_reduce", "bfloat16"): HALVES},
    "ZeRO 1": {("all_reduce", "float32"): FLOATS, ("all_gather_into_tensor", "float32"): FLOATS},
    "ZeRO 1, bf16": {("all_reduce", "bfloat16"): HALVES, ("all_gather_into_tensor", "float32"): FLOATS},
    "ZeRO 2, in parts": {("reduce", "float32"): FLOATS, ("all_gather_into_tensor", "float32"): FLOATS},
    "ZeRO 2, gathered in parts": {
        ("all_reduce", "float32"): FLOATS,
        ("all_gather_into_tensor", "float32"): FLOATS,
    },
    "ZeRO 3": {
        ("all_gather_into_tensor", "float32"): 2 * FLOATS,
        ("reduce_scatter_tensor", "float32"): FLOATS,
    },
    "ZeRO 3, bf16": {
        ("all_gather_into_tensor", "float32"): 2 * FLOATS,
        ("reduce_scatter_tensor", "bfloat16"): HALVES,
    },
    "ddp": {},  # by torch's reducer, which asks nobody
    "ddp, bf16": {("all_reduce", "bfloat16"): HALVES},
}


def sent(settings: dict[str, dict[str, Any]]) -> dict[str, tuple[dict[tuple[str, str], int], float, float]]:
    """In a rank: the large operations of each setting's last step; all bytes by us, and by the library's meter."""
    import deepspeed

    from determined_ds.trial.comms_logger import CommunicationMeter
    from determined_ds.trial.ddp import initialize_ddp
    from tests.communication import recorded_calls

    deepspeed.init_distributed("gloo", auto_mpi_discovery=False)
    found = {}
    for name, changes in settings.items():
        model = torch.nn.Sequential(
            torch.nn.Linear(64, 256, bias=False), torch.nn.Tanh(), torch.nn.Linear(256, 1, bias=False)
        )
        ds = {
            "train_batch_size": 8,
            "train_micro_batch_size_per_gpu": 4,
            "gradient_accumulation_steps": 1,
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
            **changes,
        }
        if name.startswith("ddp"):
            engine: Any = initialize_ddp(model, None, model.parameters(), ds, torch.device("cpu"))
        else:
            engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=ds)
        meter = CommunicationMeter(torch.device("cpu"), prints=False)
        with recorded_calls() as calls:
            meter.attach()
            for _ in range(STEPS):
                calls.clear()
                meter.take()
                engine.backward(engine(torch.ones(4, 64)).float().pow(2).mean())
                engine.step()
            metered = meter.take()[1]
            meter.detach()
        large: Counter[tuple[str, str]] = Counter()
        for call in calls:
            large[call.operation, call.dtype] += call.num_bytes if call.num_bytes > 1000 else 0
        found[name] = (
            {key: size for key, size in large.items() if size},
            sum(c.num_bytes for c in calls),
            metered,
        )
    return found


@pytest.fixture(scope="module")
def measured(two_ranks: Ranks) -> dict[str, Any]:
    found: dict[str, Any] = two_ranks.run(sent, SETTINGS)[0]
    return found


@pytest.mark.parametrize("name", SETTINGS)
def test_bytes_of_a_step(measured: dict[str, Any], name: str) -> None:
    large, every, metered = measured[name]
    assert large == EXPECTED[name]
    if not name.startswith("ddp"):  # which goes past DeepSpeed's communication
        assert metered == every


def test_sparse_gradients_are_refused_under_zero() -> None:
    model = torch.nn.Sequential(torch.nn.Embedding(8, 2, sparse=True), torch.nn.Linear(2, 1))
    check_sparse_gradients(model, {ZERO: {"stage": 0}})
    problem = refusal(lambda: check_sparse_gradients(model, {ZERO: {"stage": 1}}))
    assert (problem.key, problem.value, problem.code) == ("build_model", "0", "zero-sparse-gradients")
