"""``fit.breakdown`` in a session: the script makes its engine, and validates within its steps."""

from __future__ import annotations

import contextlib
import io
import statistics
import time
from pathlib import Path
from typing import Any

import pytest

from tests.ranks import Ranks
from tests.session.test_own_run import DS, data, linear, records, step

FORWARD_S = 0.04


def session(run_dir: str, breakdown: bool, config_of_script: bool) -> tuple[list[float], str]:
    """In a rank: the losses, and what was printed once the engine is made."""
    import determined_ds

    fit = {"reporting_period": {"batches": 2}, "breakdown": breakdown}
    # Accumulated twice: each step has two forward passes.
    hparams = {"global_batch_size": 8, "deepspeed_config": DS, "fit": fit}
    losses, out = [], io.StringIO()
    with (
        contextlib.redirect_stdout(out),
        determined_ds.session(hparams, run_dir=run_dir, accelerator="cpu") as s,
    ):
        engine = linear(s, {**DS, "train_batch_size": 8} if config_of_script else None)
        engine.module.register_forward_pre_hook(lambda *_: time.sleep(FORWARD_S))
        loader, held = s.loader(data()), s.validation_loader(data(7))
        s.checkpoint(engine)
        for _ in s.epochs(2):
            for number, batch in enumerate(loader):
                losses.append(float(step(engine, batch)))
                if number % 2:
                    engine.eval()
                    for inputs, _ in held:
                        s.report({"mean": engine(inputs).mean()}, validation=True)
                    engine.train()
    return losses, out.getvalue()


@pytest.mark.parametrize("config_of_script", [False, True], ids=["ours", "its own"])
def test_its_steps_are_taken_apart_without_what_it_validates(
    two_ranks: Ranks, tmp_path: Path, config_of_script: bool
) -> None:
    (plain, _), _ = two_ranks.run(session, str(tmp_path / "plain"), False, config_of_script)
    (losses, printed), _ = two_ranks.run(session, str(tmp_path / "parts"), True, config_of_script)
    assert losses == plain
    reports: list[dict[str, Any]] = [record["metrics"] for record in records(tmp_path / "parts", "training")]
    forwards = [metrics["forward_s"] for metrics in reports]
    assert min(forwards) >= 2 * FORWARD_S
    assert statistics.median(forwards) < 3.5 * FORWARD_S
    for metrics in reports:
        assert all(metrics[name] > 0 for name in ("backward_s", "optimizer_s", "communication_bytes", "mfu"))
    assert not any(word in printed for word in ("time (ms)", "Max_MA", "Comm. Op"))
