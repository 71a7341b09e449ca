"""A DeepSpeed engine of its own loads the universal checkpoint of an export, under other ranks and another stage."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from determined_ds.errors import CheckpointError
from determined_ds.export.exporting import export
from determined_ds.export.wanted import ExportRequest
from determined_ds.protocol.checkpoint_files import checkpoints_in
from determined_ds.protocol.tensor_index import MASTER, WEIGHT
from determined_ds.runtime.checkpoints.any_layout import stored_engine
from tests.checkpoint.making import made
from tests.export import trained
from tests.model_defs.causal_lm import tiny
from tests.ranks import Ranks

STATES = ("exp_avg", "exp_avg_sq")


def loaded(folder: str, zero_stage: int, bf16: bool) -> dict[str, Any]:
    """In a rank: what an engine holds that DeepSpeed alone has made and loaded."""
    import deepspeed
    from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

    from model_defs.common.parameters import decay_groups
    from model_defs.gpt2.model import GPT2, gpt2_config

    model = GPT2(gpt2_config("tiny", vocab_size=256, sequence_length=32))
    groups = decay_groups(model)
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {"stage": zero_stage},
        "bf16": {"enabled": bf16},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
        "checkpoint": {"load_universal": True},
        "zero_allow_untested_optimizer": True,
    }
    deepspeed.init_distributed("gloo")
    engine, *_ = deepspeed.initialize(model=model, model_parameters=groups, config=config)
    engine.load_checkpoint(folder)
    found: dict[str, Any] = {"global_steps": engine.global_steps}
    for name, parameter in engine.module.named_parameters():
        found[f"{name}/fp32"] = safe_get_full_fp32_param(parameter).numpy()
        for state in STATES:
            found[f"{name}/{state}"] = safe_get_full_optimizer_state(parameter, state).numpy()
        with deepspeed.zero.GatheredParameters([parameter], enabled=zero_stage == 3):
            found[f"{name}/weight"] = parameter.detach().float().cpu().numpy()
    steps = [state["step"] for state in engine.optimizer.optimizer.state.values()]
    found["step"] = {float(step) for step in steps}
    found["weight_decay"] = [group["weight_decay"] for group in engine.optimizer.param_groups]
    return found


@pytest.fixture(scope="module")
def written(two_ranks: Ranks, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """By ZeRO 3 in fp32, and by ZeRO 1 in bf16; each on two ranks."""
    text = {"path": tiny.text_file(tmp_path_factory.mktemp("data")), "validation_fraction": 0.15}
    known: dict[int, Path] = {}

    def export_of(stage: int) -> Path:
        if stage not in known:
            known[stage] = run_dir = tmp_path_factory.mktemp(f"zero{stage}")
            bf16 = {"overwrite_deepspeed_args": {"bf16": {"enabled": stage == 1}}}
            hparams = trained.hyperparameters("gpt2", stage, **bf16)
            two_ranks.run(trained.train, "gpt2", str(run_dir), hparams, text)
            path = checkpoints_in(run_dir / "checkpoints")[0].path
            export(ExportRequest(path=path, to="universal", out=run_dir / "out"))
        return known[stage]

    return export_of


@pytest.mark.parametrize(
    ("then", "now", "ranks"), [(3, 1, 1), (3, 2, 2), (1, 3, 2), (1, 2, 1), (3, 3, 1), (1, 1, 2)]
)
def test_deepspeed_loads_it(
    then: int, now: int, ranks: int, written: Any, one_rank: Ranks, two_ranks: Ranks
) -> None:
    run_dir = written(then)
    stored = stored_engine(checkpoints_in(run_dir / "checkpoints")[0].path / "model0")
    assert stored is not None
    [found, *_] = (one_rank, two_ranks)[ranks - 1].run(loaded, str(run_dir / "out"), now, then == 1)
    assert found["global_steps"] == trained.BATCHES
    assert found["step"] == {float(trained.BATCHES)}
    assert found["weight_decay"] == ([0.1, 0.1] if now == 3 else [0.1, 0.0])  # as the command says
    for name, tensor in stored.index.tensors.items():
        master = stored.whole(name, MASTER if MASTER in tensor.states else WEIGHT)
        assert torch.equal(torch.from_numpy(found[f"{name}/fp32"]), master), name
        weight = master.bfloat16().float() if then == 1 else master
        assert torch.equal(torch.from_numpy(found[f"{name}/weight"]), weight), name
        for state in STATES:
            assert torch.equal(torch.from_numpy(found[f"{name}/{state}"]), stored.whole(name, state)), name


def test_a_checkpoint_without_optimizer_is_refused(tmp_path: Path) -> None:
    import numpy as np

    path = made(tmp_path / "uuid", {"a": {"weight": ("F32", np.ones(3, "<f4"))}})
    with pytest.raises(CheckpointError, match="no optimizer's states of"):
        export(ExportRequest(path=path, to="universal", out=tmp_path / "out"))
