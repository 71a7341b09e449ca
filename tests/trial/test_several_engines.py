"""Several engines in a trial: each has its own DeepSpeed configuration, and all share the batch."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from determined_ds.config.accelerator import Accelerator
from determined_ds.config.reconcile import ResolvedConfig, reconcile
from determined_ds.documents.document import Document
from determined_ds.errors import ConfigError
from determined_ds.experiment.experiment import load_experiment
from determined_ds.trial import of_context
from determined_ds.trial.several_engines import engine_configs, engine_hyperparameters
from tests.ranks import ROOT, Ranks

CPU = Accelerator(name="cpu", num_devices=2, bf16=False, fp16=False)
ENGINES = ("writer", "critic")
JSON = ROOT / "experiments/deepspeed/zero1.json"
HYPERPARAMETERS: dict[str, Any] = {
    "global_batch_size": 16,
    "deepspeed_config": str(JSON),
    "learning_rate": 0.1,
    "warmup_num_steps": 2,
    "overwrite_deepspeed_args": {"gradient_accumulation_steps": 2, "gradient_clipping": 3.0},
}


def configs(**more: Any) -> dict[str, dict[str, Any]]:
    document = Document(
        name="mine.yaml", data={**copy.deepcopy(HYPERPARAMETERS), **more}, prefix="hyperparameters"
    )
    return engine_configs(document, resolved(document), ENGINES)


def resolved(document: Document) -> ResolvedConfig:
    ds = Document(name="zero1.json", data=json.loads(JSON.read_text()))
    return reconcile(document, ds, slots=2, accelerator=CPU)


def test_alike_unless_told() -> None:
    found = configs()
    assert found["writer"] == found["critic"]
    assert found["writer"]["train_batch_size"] == 16
    assert found["writer"]["train_micro_batch_size_per_gpu"] == 4
    assert found["writer"]["optimizer"]["params"]["lr"] == 0.1


ONE_GPU = Accelerator(name="cuda", num_devices=1, bf16=True, fp16=True)


def test_engines_of_two_machines() -> None:
    """Each has room for one of the two ranks."""
    document = Document(name="mine.yaml", data=HYPERPARAMETERS, prefix="hyperparameters")
    ds = Document(name="zero1.json", data=json.loads(JSON.read_text()))
    shared = reconcile(document, ds, slots=2, accelerator=ONE_GPU, machines=2)
    assert engine_configs(document, shared, ENGINES)["writer"]["train_batch_size"] == 16


def test_two_machines_under_determineds_own_context(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(of_context, "detect_accelerator", lambda: ONE_GPU)
    ranks = SimpleNamespace(size=2, cross_size=2)
    context: Any = SimpleNamespace(get_hparams=lambda: HYPERPARAMETERS, distributed=ranks)
    assert of_context.resolved_of(context).machines == 2


def test_an_engine_of_its_own() -> None:
    """Its learning rate goes wherever "auto" asks for one, and its arguments over the shared ones."""
    found = configs(
        critic_learning_rate=0.2,
        critic_overwrite_deepspeed_args={"zero_optimization": {"stage": 2}},
        writer_deepspeed_config=str(JSON.with_name("zero0.json")),
    )
    writer, critic = found["writer"], found["critic"]
    assert critic["optimizer"]["params"]["lr"] == critic["scheduler"]["params"]["warmup_max_lr"] == 0.2
    assert writer["optimizer"]["params"]["lr"] == 0.1
    assert (writer["zero_optimization"]["stage"], critic["zero_optimization"]["stage"]) == (0, 2)
    assert writer["gradient_clipping"] == critic["gradient_clipping"] == 3.0
    for name in ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"):
        assert writer[name] == critic[name]


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (
            {"critic_overwrite_deepspeed_args": {"gradient_accumulation_steps": 4}},
            ["critic_overwrite_deepspeed_args", "micro-batch 2 x 4", "the data loader's is 4 x 2", "for all"],
        ),
        (
            {"critic_global_batch_size": 32},
            ["hyperparameters.critic_global_batch_size = 32", "set global_batch"],
        ),
        (
            {"critic_overwrite_deepspeed_args": {"zero_optimization": {"stagee": 2}}},
            ["critic_overwrite_deepspeed_args", "stagee", "did you mean"],
        ),
        (
            {"critic_torch_compile": True},
            ["hyperparameters.critic_torch_compile = true", "all compile, or none", "set torch_compile"],
        ),
        (
            {"writer_fit": {}, "critic_deepspeed_config": "nowhere.json"},
            ["writer_fit", "critic_deepspeed_config", "nowhere.json"],
        ),
    ],
)
def test_what_an_engine_cannot_have(more: dict[str, Any], said: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        configs(**more)
    assert all(problem.fix for problem in caught.value.problems)
    for words in said:
        assert words in str(caught.value)


def test_a_value_of_an_engine_knows_its_line(tmp_path: Path) -> None:
    text = (ROOT / "experiments/dcgan/const.yaml").read_text()
    text = text.replace("discriminator_learning_rate: ", "discriminator_learning_rate: -")
    (tmp_path / "mine.yaml").write_text(text)
    line = next(i for i, row in enumerate(text.splitlines(), start=1) if "discriminator_learning_rate" in row)
    document = load_experiment(tmp_path / "mine.yaml").hyperparameters
    origin = str(engine_hyperparameters(document, "discriminator").origin(("learning_rate",)))
    assert origin.startswith("discriminator_learning_rate, ")
    assert origin.endswith(f"mine.yaml:{line}")


def build(run_dir: Path) -> dict[str, Any]:
    """In a rank: what a trial of two engines is given."""
    import torch
    from determined.pytorch import DataLoader

    from determined_ds import open_context
    from determined_ds.trial.several_engines import SeveralEnginesTrial

    class Pair(SeveralEnginesTrial):
        def build_models(self) -> dict[str, torch.nn.Module]:
            return {"writer": torch.nn.Linear(2, 2), "critic": torch.nn.Linear(2, 1)}

        def train_batch(self, dataloader_iter: Any, epoch_idx: int, batch_idx: int) -> Any: ...

        def evaluate_batch(self, dataloader_iter: Any, batch_idx: int) -> Any: ...

        def build_training_data_loader(self) -> DataLoader: ...  # type: ignore[empty-body]

        def build_validation_data_loader(self) -> DataLoader: ...  # type: ignore[empty-body]

    hparams = {**HYPERPARAMETERS, "critic_learning_rate": 0.2, "torch_compile": True, "sdpa_kernel": "math"}
    with open_context(hparams=hparams, run_dir=run_dir, accelerator="cpu") as context:
        trial = Pair(context)
        first, second = trial.engines.values()
        written = {path.name: json.loads(path.read_text()) for path in run_dir.glob("*.json")}
        return {
            "names": list(trial.engines),
            "wrapped": context.models == [first, second],
            "engine": trial.engine is first,
            "compiled": [engine.is_compiled for engine in (first, second)],
            "kernels": [torch.backends.cuda.flash_sdp_enabled(), torch.backends.cuda.math_sdp_enabled()],
            "model": trial.build_model().out_features,
            "written": written
            == {
                "deepspeed_config.json": trial.resolved.ds_config,
                **{f"deepspeed_config.{name}.json": trial.ds_configs[name] for name in trial.engines},
            },
            "accumulation": [engine.gradient_accumulation_steps() for engine in (first, second)],
        }


def test_a_trial_of_two_engines(one_rank: Ranks, tmp_path: Path) -> None:
    found = one_rank.run(build, tmp_path)[0]
    assert found["names"] == ["writer", "critic"]
    assert found["wrapped"]
    assert found["engine"]
    assert found["compiled"] == [True, True]
    assert found["kernels"] == [False, True]
    assert found["model"] == 2
    assert found["written"]
    assert found["accumulation"] == [2, 2]
