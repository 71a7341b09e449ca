"""Each mistake in an experiment's YAML is one problem, at its key and line, that says what to write."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

from determined_ds import Problem
from tests.package import experiment, refusals, schema_problems

# Behind each mistake, a comment has its key and a part of the fix.
JUDGED = [
    """
resources: {shm_size: 1.5 gb}  # resources.shm_size: write shm_size: 8589934592
searcher: {name: single, metrics: loss}  # searcher.metrics: did you mean 'metric'?
checkpoint_storage:
  type: shared_fs
  host_path: /a
  storage_path: /b  # checkpoint_storage.storage_path: a relative path without .., or one below host_path
log_policies: [{name: a, action: stop}]  # log_policies.0.action: use one of
hyperparameters: {a: {type: itn, minval: 1}}  # hyperparameters.a: did you mean int?
entrypoint: python3 train.py
""",
    """
entrypoint: python3 train.py
resources: {max_restarts: 1}  # resources.max_restarts: at the top level, beside resources
environment:
  pod_spec:
    spec:
      containers:
      - name: determined-container
        image: a  # environment.pod_spec.spec.containers.0.image: set environment.image
checkpoint_storage: {bucket_name: b}  # checkpoint_storage.bucket_name: did you mean 'bucket'?
searcher: {name: grid, metric: a}
hyperparameters:
  a: [{type: int}]  # hyperparameters.a.0: write count
  b: {type: int, minval: 1, maxval: 2}  # hyperparameters.b: write count
""",
]
READ = """
nam: x  # nam: 'name'
resources: {slots_per_trial: 0}  # resources.slots_per_trial: write the number
reproducibility: {experiment_seed: -1}  # reproducibility.experiment_seed: write 0 or more
searcher:
  name: asha  # searcher.name: adaptive_asha
  smaller_is_better: 1  # searcher.smaller_is_better: true or false
hyperparameters:
  lr: {type: lg}  # hyperparameters.lr: log
  wd: {type: double, minval: 2, maxval: 1}  # hyperparameters.wd.maxval: above 2
entrypoint: torchrun train.py  # entrypoint: resources.slots_per_trial
"""


def judged(text: str) -> Sequence[Problem]:
    """As ``check`` holds it against the master's schemas."""
    return schema_problems(text)[0]


def read(text: str) -> Sequence[Problem]:
    """As every command reads it."""
    return refusals(lambda: experiment(text))


@pytest.mark.parametrize(("problems_of", "text"), [*((judged, text) for text in JUDGED), (read, READ)])
def test_all_are_reported_at_once(problems_of: Callable[[str], Sequence[Problem]], text: str) -> None:
    wanted = [
        (f"const.yaml:{number:02}", *line.partition("  # ")[2].split(": ", 1))
        for number, line in enumerate(text.splitlines(), 1)
        if "  # " in line
    ]
    found = sorted((f"const.yaml:{each.origin.line:02}", each.key, each.fix) for each in problems_of(text))
    assert [each[:2] for each in found] == [each[:2] for each in wanted]
    assert [fix for (*_, said), (*_, fix) in zip(found, wanted, strict=True) if fix not in said] == []


@pytest.mark.parametrize("said", ["model_def:Trial", "python3 -m determined.launch.deepspeed --trial a:B"])
def test_an_entrypoint_that_names_a_class_is_a_warning_with_its_replacement(said: str) -> None:
    problems, (warning,) = schema_problems(f"entrypoint: {said}\nsearcher: {{name: single, metric: loss}}")
    assert problems == []
    assert (warning.key, warning.code, warning.origin) == ("entrypoint", "deprecated-key", "const.yaml:1")
    assert "determined_ds.train" in warning.fix
