"""``EMA``: the average of the weights after each step, in parts, under every ZeRO stage; validated, saved, resumed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from determined_ds.callbacks import EMA
from determined_ds.errors import ConfigError, DeterminedDSError
from tests.harness.ranks import Ranks, RanksOf
from tests.package import checkpoints
from tests.trial.regression import train, trial_class

STEPS, DECAY = 6, 0.8
ADAMW = {"type": "AdamW", "params": {"lr": 0.1, "torch_adam": True}}


@pytest.mark.parametrize("decay", [0, 1, "0.9"])
def test_a_decay_is_between_0_and_1(decay: Any) -> None:
    with pytest.raises(ConfigError, match="between 0 and 1"):
        EMA(decay)


def refused(run_dir: Path) -> str:
    """In this rank: the words that refuse an EMA where no checkpoint of ours would hold it."""

    class Averaged:
        def build_callbacks(self) -> Any:
            return {"ema": EMA(DECAY)}

        def save(self, context: Any, path: Path) -> None:
            """Write the engine in another way than the library's."""

    with pytest.raises(DeterminedDSError) as found:
        train(run_dir, trial_class("", Averaged), {"deepspeed_config": {"optimizer": ADAMW}}, steps=1)
    return str(found.value)


def test_an_average_that_no_checkpoint_would_hold_is_refused(one_rank: Ranks, tmp_path: Path) -> None:
    """Where DeepSpeed writes experts: ``tests/model_defs/causal_lm``."""
    (words,) = one_rank.run(refused, tmp_path / "run")
    assert "EMA" in words
    assert "save" in words


def run(run_dir: Path, kind: str, half: str, steps: int, resume: str | None = None) -> dict[str, Any]:
    """Train in this rank. Returns the weights after each step, those that were validated, and the newest checkpoint."""
    import deepspeed
    from determined.pytorch import Batch

    found: dict[str, Any] = {"first": [], "after": [], "validated": []}

    def note(name: str, engine: Any) -> None:
        parameters = dict(engine.module.named_parameters())
        with deepspeed.zero.GatheredParameters(list(parameters.values()), enabled=kind in ("3", "offload")):
            found[name].append(
                {name: each.detach().float().numpy().copy() for name, each in parameters.items()}
            )

    class Averaged:
        engine: Any

        def __init__(self, context: Any) -> None:
            super().__init__(context)  # type: ignore[call-arg]
            note("first", self.engine)

        def on_step_end(self, batch_idx: int, metrics: Any) -> None:
            note("after", self.engine)

        def evaluate_batch(self, dataloader_iter: Any, batch_idx: int) -> Any:
            if len(found["validated"]) < len(found["after"]):
                note("validated", self.engine)
            return super().evaluate_batch(dataloader_iter, batch_idx)  # type: ignore[misc]

        def build_callbacks(self) -> Any:
            return {"ema": EMA(DECAY)}

    zero: dict[str, Any] = {"stage": int(kind) if kind.isdigit() else 0}
    if kind == "3" and half == "bf16":
        zero["stage3_param_persistence_threshold"] = 10  # one of each
    if kind == "offload":
        zero = {"stage": 3, "offload_param": {"device": "cpu"}, "offload_optimizer": {"device": "cpu"}}
    optimizer = {"type": "AdamW", "params": {"lr": 0.1}} if kind == "offload" else ADAMW
    ds_config = {"optimizer": optimizer, "zero_optimization": zero, "bf16": {"enabled": half == "bf16"}}
    train(
        run_dir,
        trial_class(kind, Averaged),
        {"pipe_parallel_size": 2 if kind == "pipeline" else 1, "deepspeed_config": ds_config},
        steps=steps,
        engine="ddp" if kind == "ddp" else "deepspeed",
        validation_period=Batch(1),
        checkpoint_policy="none",
        latest_checkpoint=resume,
    )
    return {**found, "uuid": checkpoints(run_dir)[0].name}


STAND = pytest.mark.long("ZeRO 1 and 3 stand for a whole and a split model, one rank for other ranks")
MORE = [(kind, "fp32", kind, 2) for kind in ("0", "2", "3", "offload", "pipeline", "ddp")]
MORE += [("3", "fp32", "1", 4)]


@pytest.mark.parametrize(
    ("kind", "half", "then", "ranks"),
    [
        ("1", "fp32", "1", 2),
        ("3", "bf16", "3", 2),
        ("1", "fp32", "3", 1),
        *(pytest.param(*case, marks=STAND) for case in MORE),
    ],
)
def test_validated_is_the_average_and_trained_on_are_the_weights(
    kind: str, half: str, then: str, ranks: int, ranks_of: RanksOf, tmp_path: Path
) -> None:
    """Also where it continues after two steps, on as many ranks to the bit."""
    whole = ranks_of(2).run(run, tmp_path / "whole", kind, half, STEPS)
    stopped = ranks_of(2).run(run, tmp_path / "stopped", kind, half, 2)
    resumed = ranks_of(ranks).run(run, tmp_path / "stopped", then, half, STEPS, stopped[0]["uuid"])
    close = {"rtol": 1e-6, "atol": 1e-7} if half == "fp32" else {"rtol": 1e-2, "atol": 1e-3}
    continued = {"rtol": 1e-5, "atol": 1e-6} if ranks != 2 else {"rtol": 0, "atol": 0}
    for before, now, later in zip(whole, stopped, resumed, strict=ranks == 2):
        [average] = before["first"]
        for after, validated in zip(before["after"], before["validated"], strict=True):
            average = {name: DECAY * average[name] + (1 - DECAY) * after[name] for name in average}
            for name, value in average.items():
                np.testing.assert_allclose(validated[name], value, **close)
            assert not all(np.array_equal(validated[name], after[name]) for name in average)
        for key in ("after", "validated"):
            for one, other in zip(before[key], [*now[key], *later[key]], strict=True):
                for name in one:
                    np.testing.assert_allclose(other[name], one[name], **continued)


def files_read(run_dir: Path, uuid: str) -> list[str]:
    """In this rank: the parts of ranks that a resume loads; their checksums are read by other threads."""
    import sys
    import threading

    opened: list[str] = []

    def note(event: str, arguments: Any) -> None:
        is_loading = event == "open" and threading.current_thread() is threading.main_thread()
        if is_loading and uuid in str(arguments[0]) and str(arguments[0]).endswith(".pth"):
            opened.append(Path(arguments[0]).name)

    sys.addaudithook(note)
    run(run_dir, "1", "fp32", 3, uuid)
    return opened


def test_ranks_that_take_over_read_one_part_each_and_not_that_of_every_rank(
    two_ranks: Ranks, four_ranks: Ranks, tmp_path: Path
) -> None:
    """What each needs of the average is a slice of the engine's files, as of the weights."""
    uuid = two_ranks.run(run, tmp_path, "1", "fp32", 2)[0]["uuid"]
    for opened in four_ranks.run(files_read, tmp_path, uuid):
        assert opened == ["det_state_dict_rank0.pth"]
