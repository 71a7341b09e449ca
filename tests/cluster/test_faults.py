"""A master that fails for a while, or answers oddly, costs a trial nothing."""

from __future__ import annotations

from tests.cluster.cluster import FakeCluster
from tests.cluster.scenarios import CONST, TINY

TRIAL = r"/api/v1/trials/[0-9]+/"
BEST = "/api/v1/experiments/[0-9]+/searcher/best_searcher_validation_metric"


def test_odd_answers_cost_a_trial_nothing(fake: FakeCluster) -> None:
    """Nor do nulls in the configuration for what was not said."""
    number = fake.create(CONST, *TINY, "max_restarts=0", paused=True)
    config = fake.master.experiments[number].config
    config.update(description=None, labels=None, bind_mounts=None)
    config["searcher"].update(max_length=None, smaller_is_better=None, source_trial_id=None)
    # Nothing that the next step does not need waits for a master.
    late = fake.inject("late", "POST", f"{TRIAL}progress")
    met = [
        late,
        # The report was taken, and its answer lost: sent again, a master refuses it even where it is the same.
        fake.inject("close after", "POST", f"{TRIAL}metrics"),
        fake.inject("answer after", "POST", "/api/v1/checkpoints", status=204),
        fake.inject("close after", "POST", "/api/v1/checkpoints"),
        fake.inject("answer", "POST", f"{TRIAL}progress", status=501, body={"error": "not implemented"}),
        fake.inject("answer", "POST", f"{TRIAL}runner/metadata", status=404),
        *(
            fake.inject("answer", "GET", BEST, body=body)
            for body in ({}, {"metric": None}, {"metric": "NaN"})
        ),
    ]
    fake.activate(number)
    [trial] = fake.wait(number)
    assert all(fault.is_met for fault in met)
    assert [steps for steps, _ in fake.reports(trial, "training")] == list(range(1, 7))
    assert fake.kept(trial).of_group("training")[1].at < late.answered
    assert [steps for steps, _ in fake.reports(trial, "validation")] == [2, 4, 6]
    assert [checkpoint.batch for checkpoint in fake.checkpoints(trial)] == [2, 4, 6]
    kept = fake.kept(trial)
    for found in kept.checkpoints.values():
        assert (fake.storage / found.uuid / "manifest.json").exists()
        # A trial that is killed just then would go on from the checkpoint, and its metrics would never be sent.
        assert all(each.at <= found.at for each in kept.of_group("training") if each.steps <= found.steps)
