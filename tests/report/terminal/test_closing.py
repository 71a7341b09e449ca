"""The block at the end of a run: what came of it, from its directory alone, and commands that can be pasted."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from determined_ds.protocol.checkpoint_files import Checkpoint
from determined_ds.protocol.conclusion import RunResult
from determined_ds.protocol.launches import Launch
from determined_ds.protocol.recorded_run import RecordedRun
from determined_ds.report.terminal.closing import closing_block

RESUME = "det-ds run runs/gpt2/experiment.yaml . --run-dir runs/gpt2 --resume"
REPORT = {"peak_memory_gib": 0.71, "peak_memory_gib_min": 0.68, "samples_per_second": 164.0}
LAUNCH = Launch(
    time=1000.0,
    slots=2,
    strategy="ZeRO 3 with the optimizer offloaded",
    global_batch_size=32,
    micro_batch_size=8,
    accumulation=2,
    replicas=2,
    trial_seed=441365315,
    ds_config={"bf16": {"enabled": True}, "zero_optimization": {"offload_optimizer": {"device": "cpu"}}},
)


def record(group: str, batch: int, time: float, **metrics: Any) -> dict[str, Any]:
    return {"group": group, "steps_completed": batch, "time": time, "metrics": metrics}


def completed() -> RecordedRun:
    return RecordedRun(
        path=Path.cwd() / "runs" / "gpt2",
        config={
            "name": "gpt2",
            "searcher": {"metric": "validation_loss"},
            "hyperparameters": {"fit": {"max_length": {"batches": 200}}},
        },
        ds_config={},
        launches=(LAUNCH,),
        records=(
            record("training", 100, 1030, loss=5.531, **{**REPORT, "samples_per_second": 90.0}),
            record("validation", 100, 1031, validation_loss=2.25, batches=100),
            record("training", 200, 1060, loss=2.1084, **REPORT),
            record("validation", 200, 1063, validation_loss=2.5, batches=200),
        ),
        checkpoints=(Checkpoint(uuid="uuid-2", path=Path("checkpoints/uuid-2"), steps_completed=200),),
        result=RunResult(status="completed", steps_completed=200, continued_by=RESUME),
        is_running=False,
    )


def test_of_a_complete_run_it_has_everything() -> None:
    assert closing_block(completed()) == [
        "gpt2: completed, 200 of 200 batches",
        "  loss        5.531 -> 2.108",
        "  validation  validation_loss 2.25 at batch 100, the best; 2.5 at batch 200",
        "  time        63 s, 164 samples/s",
        "  memory      0.68..0.71 GiB a rank at most, as a process",
        "  strategy    ZeRO 3 with the optimizer offloaded, bf16, 2 slots on cpu, batch",
        "              32 = 8 x 2 x 2",
        "  offload     the optimizer to cpu",
        "  seed        441365315",
        "  run dir     runs/gpt2",
        "  checkpoint  batch 200, uuid-2",
        f"  longer      {RESUME} --set hyperparameters.fit.max_length.batches=400",
        "  export      det-ds checkpoint export last --run-dir runs/gpt2 --to safetensors",
        "  report      det-ds report runs/gpt2 --open",
    ]


def test_memory_stands_beside_what_was_expected() -> None:
    """On a GPU both are of tensors on it; on a CPU the process has more than tensors."""
    memory = {
        "total_bytes": 2**30,
        "model_states_bytes": 2**29,
        "host_bytes": 2**28,
        "has_activations": True,
    }
    on_gpu = replace(LAUNCH, accelerator="cuda")
    for launch, known, line in (
        (on_gpu, memory, "0.68..0.71 GiB a rank at most; all estimated at 1 GiB"),
        (on_gpu, {**memory, "has_activations": False}, "at most; model states estimated at 512 MiB"),
        (LAUNCH, memory, "at most, as a process; model states estimated at 768 MiB"),
    ):
        lines = closing_block(replace(completed(), launches=(launch,), memory=known), columns=200)
        assert next(each for each in lines if "  memory" in each).endswith(line)


def test_of_a_stopped_one_it_says_how_to_resume() -> None:
    result = RunResult(status="stopped", steps_completed=201, resume=RESUME, continued_by=RESUME)
    lines = closing_block(replace(completed(), result=result))
    assert lines[0] == "gpt2: stopped, 201 of 200 batches"
    assert f"  resume      {RESUME}" in lines
    assert not any(line.startswith("  longer") for line in lines)


def test_of_a_failed_one_it_says_why() -> None:
    reason = "loss is nan at batch 150: nothing is saved of it; lower the learning rate, or try another seed"
    result = RunResult(status="failed", cause="error", reason=reason, steps_completed=150)
    lines = closing_block(replace(completed(), result=result, checkpoints=()))
    assert (
        " ".join(line.strip() for line in lines[:2]) == f"gpt2: failed, 200 of 200 batches; error: {reason}"
    )
    assert not any(line.startswith(("  export", "  checkpoint", "  resume", "  longer")) for line in lines)


def test_where_nothing_was_reported_there_is_none() -> None:
    assert closing_block(replace(completed(), records=())) == []


def test_time_and_speed_leave_out_what_was_between_two_launches() -> None:
    again = replace(LAUNCH, time=9000.0, kind="resume", slots=4)
    late = (
        *(record("training", 210, 9010, loss=2.0, samples_per_second=80.0), record("training", 220, 9020)),
        record("training", 230, 9037, loss=1.9, samples_per_second=300.0),
    )
    run = completed()
    lines = closing_block(replace(run, launches=(LAUNCH, again), records=(*run.records, *late)))
    assert "  time        100 s, 300 samples/s" in lines
    assert any("4 slots on cpu" in line for line in lines)


def test_a_run_of_an_earlier_version_is_described_as_far_as_is_known() -> None:
    lines = closing_block(replace(completed(), launches=(), result=None, config={}, checkpoints=()))
    assert lines == [
        "gpt2: ended, 200 batches",
        "  loss        5.531 -> 2.108",
        "  validation  validation_loss 2.5 at batch 200",
        "  time        164 samples/s",
        "  memory      0.68..0.71 GiB a rank at most",
        "  run dir     runs/gpt2",
        "  report      det-ds report runs/gpt2 --open",
    ]


def test_it_fits_80_columns_but_for_commands() -> None:
    facts = [line for line in closing_block(completed()) if "det-ds" not in line]
    assert max(map(len, facts)) <= 80


def test_a_length_in_epochs_is_doubled_too_and_an_unknown_one_is_not() -> None:
    run = completed()
    for length, longer in (
        ({"epochs": 3}, f"{RESUME} --set hyperparameters.fit.max_length.epochs=6"),
        (None, ""),
    ):
        config = {"hyperparameters": {"fit": {"max_length": length}}}
        lines = [line for line in closing_block(replace(run, config=config)) if line.startswith("  longer")]
        assert lines == ([f"  longer      {longer}"] if longer else [])


def test_a_pipelines_bubble_stands_beside_what_its_schedule_alone_costs() -> None:
    """The first report has the start in it."""
    reports = [
        record("training", 100 * number, 1000 + number, loss=2.0, bubble=bubble, bubble_ideal=0.2)
        for number, bubble in enumerate((0.9, 0.25, 0.21, 0.23), start=1)
    ]
    lines = closing_block(replace(completed(), records=tuple(reports)))
    assert "  bubble      23.0% of the time; 20.0% by the schedule alone" in lines
