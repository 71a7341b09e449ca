"""What ranks send in a step, under each setting of communication that runs on a CPU, and what it does to the loss.

python -c "from tests.benchmarks.communication import table; print(table())"

The tiny GPT-2 (828,416 parameters) learns the bytes of this project's licence for 100 steps of 8 sequences, on two
ranks; a secondary partition of ZeRO++ is measured on four. Two runs of one setting give the same losses.
"""

from __future__ import annotations

import statistics
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

from tests.ranks import ROOT, Ranks, compile_nothing

STEPS, SEQUENCES, SEQUENCE_LENGTH, SEED = 100, 8, 64, 0
LAST = 10  # the loss is the mean of the last ones
ZERO = "zero_optimization"
BF16, FP16, FP32 = ({"communication_data_type": name} for name in ("bf16", "fp16", "fp32"))
IN_BF16 = {"bf16": {"enabled": True}}
AUTOCAST = {"torch_autocast": {"enabled": True, "dtype": "bfloat16"}}


def zero(stage: int, **keys: Any) -> dict[str, Any]:
    return {ZERO: {"stage": stage, **keys}}


# As in a large model: every parameter is divided, and let go after its use in the forward pass.
THREE: dict[str, Any] = zero(
    3, stage3_param_persistence_threshold=0, stage3_max_live_parameters=0, stage3_max_reuse_distance=0
)
# What is measured -> DeepSpeed JSON; each list in processes of its own, since an autocast stays in its process.
TWO_RANKS: list[dict[str, dict[str, Any]]] = [
    {
        "fp32, ZeRO 0": {},
        "fp32, ZeRO 0, `communication_data_type: bf16`": BF16,
        "fp32, ZeRO 0, `communication_data_type: fp16`": FP16,
        "fp32, ZeRO 1": zero(1),
        "fp32, ZeRO 1, `communication_data_type: bf16`": zero(1) | BF16,
        "fp32, ZeRO 2": zero(2),
        "fp32, ZeRO 2, `communication_data_type: bf16`": zero(2) | BF16,
        "fp32, ZeRO 2, `reduce_bucket_size: 100000`": zero(2, reduce_bucket_size=100_000),
        "fp32, ZeRO 2, `allgather_bucket_size: 100000`": zero(2, allgather_bucket_size=100_000),
        "fp32, ZeRO 2, `overlap_comm: true`": zero(2, overlap_comm=True),
        "fp32, ZeRO 2, `use_multi_rank_bucket_allreduce: false`": zero(
            2, use_multi_rank_bucket_allreduce=False
        ),
    },
    {
        "fp32, ZeRO 3": THREE,
        "fp32, ZeRO 3, `communication_data_type: bf16`": THREE | BF16,
        "fp32, ZeRO 3, `reduce_scatter: false`": {ZERO: {**THREE[ZERO], "reduce_scatter": False}},
        "fp32, ZeRO 3, `stage3_use_all_reduce_for_fetch_params: true`": {
            ZERO: {**THREE[ZERO], "stage3_use_all_reduce_for_fetch_params": True}
        },
        "bf16, ZeRO 0": IN_BF16,
        "bf16, ZeRO 1": zero(1) | IN_BF16,
        "bf16, ZeRO 1, `communication_data_type: fp32`": zero(1) | IN_BF16 | FP32,
        "bf16, ZeRO 1, `data_types.grad_accum_dtype: fp32`": zero(1)
        | IN_BF16
        | {"data_types": {"grad_accum_dtype": "fp32"}},
        "bf16, ZeRO 3": THREE | IN_BF16,
    },
    {"autocast to bf16, ZeRO 0": AUTOCAST, "autocast to bf16, ZeRO 1": zero(1) | AUTOCAST},
]
FOUR_RANKS = [
    {
        "four ranks, fp32, ZeRO 3": THREE,
        "four ranks, fp32, ZeRO 3, `zero_hpz_partition_size: 2`": {
            ZERO: {**THREE[ZERO], "zero_hpz_partition_size": 2}
        },
    }
]
WITH_DDP = {"ddp": {}, "ddp, `communication_data_type: bf16`": BF16}


class Measured(NamedTuple):
    """Of one setting.

    Args:
        sent: Bytes that a rank sends in its last step, by ring algorithms; by the size of the group.
        calls: Operations in that step.
        losses: Of every step, the mean of all ranks'.
    """

    sent: dict[int, float]
    calls: int
    losses: list[float]

    @property
    def loss(self) -> float:
        return statistics.fmean(self.losses[-LAST:])


def measure(settings: dict[str, dict[str, Any]]) -> dict[str, Measured]:
    """In a rank: each setting in turn, from the same weights."""
    import deepspeed

    deepspeed.init_distributed("gloo", auto_mpi_discovery=False)
    return {name: _trained(name, ds) for name, ds in settings.items()}


def _trained(name: str, settings: dict[str, Any]) -> Measured:
    import deepspeed
    import torch
    import torch.distributed as dist
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

    from determined_ds.trial.ddp import initialize_ddp
    from model_defs.common.text import load_text, next_token_loss
    from model_defs.gpt2.model import GPT2, gpt2_config, load_initial_weights
    from tests.communication import recorded_calls

    text = load_text({"path": str(ROOT / "LICENSE"), "validation_fraction": 0.1}, SEQUENCE_LENGTH)
    config = gpt2_config("tiny", vocab_size=text.vocab_size, sequence_length=SEQUENCE_LENGTH)
    model = GPT2(config)
    load_initial_weights(model, config, SEED)
    ranks, rank = dist.get_world_size(), dist.get_rank()
    own = SEQUENCES // ranks
    ds = {
        "train_batch_size": SEQUENCES,
        "train_micro_batch_size_per_gpu": own,
        "gradient_accumulation_steps": 1,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
        "gradient_clipping": 1.0,
        **settings,
    }
    if name.startswith("ddp"):
        engine: Any = initialize_ddp(model, None, model.parameters(), ds, torch.device("cpu"))
        if not settings:  # the same sum, asked for where it can be recorded
            engine._replica.register_comm_hook(None, default_hooks.allreduce_hook)
    else:
        engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=ds)
    drawn = torch.Generator().manual_seed(SEED)
    losses = []
    with recorded_calls() as calls:
        for _ in range(STEPS):
            indices = torch.randint(len(text.train), (SEQUENCES,), generator=drawn).tolist()
            samples = [text.train[index] for index in indices[rank * own : (rank + 1) * own]]
            inputs, targets = (torch.stack(part) for part in zip(*samples, strict=True))
            before = len(calls)
            loss = next_token_loss(engine(inputs), targets)
            engine.backward(loss)
            engine.step()
            last = calls[before:]
            total = loss.detach().float().clone()
            dist.all_reduce(total)
            losses.append(total.item() / ranks)
    sent: dict[int, float] = {}
    for call in last:
        sent[call.ranks] = sent.get(call.ranks, 0) + call.sent_bytes
    return Measured(sent, len(last), losses)


def table() -> str:
    """Measure, and return the table."""
    rows = [
        "| setting | sent by a rank in a step, MB | operations | loss | against fp32's |",
        "|---|---|---|---|---|",
    ]
    print("\n".join(rows), flush=True)
    base: dict[int, float] = {}
    with tempfile.TemporaryDirectory() as folder:
        for size, lists in ((2, [*TWO_RANKS, WITH_DDP]), (4, FOUR_RANKS)):
            ranks = Ranks(size, Path(folder) / "logs", first=compile_nothing)
            for settings in lists:
                for name, found in ranks.run(measure, settings)[0].items():
                    base.setdefault(size, found.loss)
                    groups = ", ".join(
                        f"{num_bytes / 1e6:.2f}" + (f" among {ranks_of}" if ranks_of != size else "")
                        for ranks_of, num_bytes in sorted(found.sent.items(), reverse=True)
                    )
                    change = 100 * (found.loss / base[size] - 1)
                    rows.append(f"| {name} | {groups} | {found.calls} | {found.loss:.4f} | {change:+.2f} % |")
                    print(rows[-1], flush=True)
    return "\n".join(rows)
