"""What is ignored is named, with its place and what to write instead; what cannot be honoured is refused."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from determined_ds.cli.main import main
from tests.config.deciding import nested, told
from tests.package import ROOT

# ------------------------------------------------------------------------------------------- the experiment

ALL = ("check", "run", "search", "compare")
HERE = ALL[1:]  # what applies only on a cluster
S3 = {"type": "s3", "bucket": "mine", "save_trial_best": 2}
# Key -> a value that asks for something, one that does not, the commands that ignore it, and what the fix says.
KEYS: dict[str, tuple[Any, Any, tuple[str, ...], str]] = {
    "hyperparameters.global_batch_size": (7, 7, (), ""),  # is refused, so that nothing is trained
    "hyperparameters.fit.profiling_enabled": (True, False, HERE, ""),
    "searcher.source_checkpoint_uuid": ("abc", None, ("compare",), ""),
    "resources.slots_per_trial": (2, 2, (), ""),
    "resources.resource_pool": ("a100", None, HERE, ""),
    "resources.native_parallel": (True, False, ALL, "remove it"),
    "environment.environment_variables": (["A=1"], ["A=1"], (), ""),
    "checkpoint_storage": (S3, None, HERE, ""),
    "min_validation_period": ({"batches": 10}, None, ALL, "fit.validation_period"),
    "scheduling_unit": (10, 100, ALL, "fit.reporting_period"),
    "optimizations": ({"aggregation_frequency": 4}, None, ALL, "DeepSpeed JSON"),
    "profiling.enabled": (True, False, HERE, ""),
}


def experiment(
    of: int, entrypoint: str = "python3 -m determined_ds.train model_defs.gpt2.trial:GPT2Trial"
) -> str:
    """The first or the second value of every key, each on its own line."""
    config: dict[str, Any] = {"name": "mine", "entrypoint": entrypoint}
    config["searcher"] = {"name": "single", "metric": "validation_loss", "smaller_is_better": True}
    for key, values in KEYS.items():
        *above, last = key.split(".")
        section = config
        for name in above:
            section = section.setdefault(name, {})
        section[last] = values[of]
    return json.dumps(config, indent=1)


def said(command: str, text: str, folder: Path) -> str:
    (folder / "mine.yaml").write_text(text)
    words = [command, str(folder / "mine.yaml"), str(ROOT)]
    if command != "check":
        words += ["--accelerator", "cpu", "--run-dir", str(folder / "runs")]
    words += ["--strategies", "zero0"] if command == "compare" else []
    result = CliRunner().invoke(main, words)
    assert "Traceback" not in result.output
    return result.output


@pytest.mark.parametrize("command", ALL)
def test_every_key_that_a_command_ignores_is_named_and_no_other(command: str, tmp_path: Path) -> None:
    output = said(command, experiment(0), tmp_path)
    assert "error: hyperparameters.global_batch_size = 7" in output
    named = re.findall(r"warning: ([\w.]+)\b.* is ignored.*((?:\n +fix: .*)?)", output)
    of_clusters = "".join(re.findall("warning: applies only.*", output))
    named += [(key, "") for key in re.findall(r"([\w.]+) \(\S+mine.yaml:\d+\)", of_clusters)]
    fixes = dict(named)
    assert sorted(key for key, _ in named) == sorted(key for key, row in KEYS.items() if command in row[2])
    assert command == "check" or output.rindex("warning: ") < output.index("error: "), "which one reads last"
    assert [key for key, fix in fixes.items() if KEYS[key][3] not in fix] == []
    assert "warning: " not in said(command, experiment(1), tmp_path)


# --------------------------------------------------------------------------------------- the DeepSpeed JSON


@pytest.mark.parametrize(
    ("code", "key", "asking", "harmless"),
    [
        ("refused-key", "managed_gradient_accumulation", False, True),
        ("refused-key", "pipeline.stages", 2, "auto"),
        ("refused-key", "datastates_ckpt", {"enabled": True}, {}),
        ("ignored-key", "dataloader_drop_last", True, False),
        ("ignored-key", "weight_quantization", {"enabled": True}, {"enabled": False, "num_bits": 4}),
    ],
)
def test_what_is_not_honoured_is_refused_or_warned_of_unless_it_says_the_default(
    code: str, key: str, asking: Any, harmless: Any
) -> None:
    problems, warned_of = told(ds=nested(key, asking))
    (found,) = [*problems, *warned_of]
    assert (found.code, found.key.startswith(key), bool(problems)) == (code, True, code != "ignored-key")
    assert found.fix
    assert told(ds=nested(key, harmless)) == ([], [])


def test_an_old_name_that_asks_for_nothing_is_warned_of() -> None:
    key, new = "zero_optimization.cpu_offload", {"offload_optimizer": {"device": "none"}}
    problems, (warning,) = told(ds=nested(key, False))
    assert (problems, warning.code, warning.key) == ([], "ignored-key", key)
    for ds in (nested(key, True), {"zero_optimization": {"cpu_offload": False, **new}}):
        assert [(each.code, each.key) for each in told(ds=ds)[0]] == [("deprecated-key", key)]
