"""An experiment YAML means here what it means to Determined, and what Determined would refuse is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from determined_ds import load_experiment
from tests.package import CPU, ENTRYPOINT, experiment, refusal, resolved_of


def test_a_trial_in_determineds_own_form_trains_as_long_as_the_experiment_says() -> None:
    """What ``fit`` says stays; 0 is no period; a length in records, which nothing here counts, is refused."""
    config = {
        "entrypoint": "python3 -m determined.launch.deepspeed --trial trial:Trial",
        "searcher": {"name": "single", "metric": "loss", "max_length": {"batches": 10}},
        "min_validation_period": {"batches": 5},
        "min_checkpoint_period": {"batches": 0},
        "scheduling_unit": 4,
        "hyperparameters": {"global_batch_size": 8, "fit": {"validation_period": {"batches": 2}}},
    }
    read = experiment(config)
    periods = {"validation_period": {"batches": 2}, "reporting_period": {"batches": 4}}
    assert read.hyperparameters.data["fit"] == {**periods, "max_length": {"batches": 10}}
    config["searcher"] = {"name": "single", "metric": "loss", "max_length": {"records": 87}}
    problem = refusal(lambda: resolved_of(experiment(config), CPU))
    assert problem.key.startswith("hyperparameters.fit.max_length")
    assert "searcher.max_length" in problem.origin


LAUNCH, FORM = "python3 -m determined.launch.", "python3 -m determined_ds.train"
# An entrypoint, whichever launcher of Determined is before it -> its trial, Determined's own form of one, or a script.
RUNS = {
    ENTRYPOINT: "trial:Trial",
    f"{LAUNCH}deepspeed --trial x -- python3 -m determined_ds.train 'trial:Trial'": "trial:Trial",
    f"{FORM} trial:Trial --engine=ddp": "trial:Trial --engine ddp",
    "trial:Trial": "legacy trial:Trial",
    f"{LAUNCH}deepspeed --trial trial:Trial": "legacy trial:Trial",
    "/usr/bin/python3.11 -u -X dev src/train.py --lr 1 -- a:B": "script src/train.py --lr 1 -- a:B",
    f"{LAUNCH}torch_distributed --nnodes=1 -- python3 train.py --b": "script train.py --b",
    f"{LAUNCH}deepspeed python3 -m package": "script -m package",
}


def test_an_entrypoint_names_its_trial_or_script() -> None:
    for entrypoint, expected in RUNS.items():
        found = experiment({"entrypoint": entrypoint}).entrypoint
        kind = "script " if found.is_script else "legacy " if found.is_legacy else ""
        assert kind + " ".join(found.words) == expected


BASE = f"""
name: base
entrypoint: {ENTRYPOINT}
resources: {{slots_per_trial: 2}}
hyperparameters: {{fit: {{max_length: {{batches: 200}}}}, nothing: null}}
data: {{path: x, tokenizer: null}}
"""
OVERRIDES = [
    "hyperparameters.fit={reporting_period: {batches: 5}}",
    "hyperparameters.lr=1e-3",
    "hyperparameters.list=[1, [2, 3], {a: b}]",
    "hyperparameters.date=2024-01-01",
    "hyperparameters.answer=yes",
]


@pytest.mark.parametrize("override", OVERRIDES)
def test_set_means_what_config_means_to_det(tmp_path: Path, override: str) -> None:
    """What `det experiment create --config` sends, as the master reads it."""
    from determined.cli.ntsc import parse_config_overrides
    from determined.common.util import yaml_safe_dump, yaml_safe_load

    sent = yaml_safe_dump(parse_config_overrides(yaml_safe_load(BASE), [override]))
    assert sent is not None
    (tmp_path / "a.yaml").write_text(BASE)
    assert load_experiment(tmp_path / "a.yaml", [override]).config == experiment(sent).config
