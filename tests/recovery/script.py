"""A plain script with a session, which meets the faults that ``FAULTS`` names; see ``trials.py``."""

from __future__ import annotations

import json

import deepspeed
import torch

import determined_ds
from tests.interrupted.trials import FEATURES, OUTPUTS
from tests.recovery.trials import SAMPLES, Poisoned, meet_faults

if __name__ == "__main__":
    with determined_ds.session() as s:
        torch.manual_seed(1)
        layers = (
            torch.nn.Linear(FEATURES, FEATURES),
            torch.nn.Dropout(0.2),
            torch.nn.Linear(FEATURES, OUTPUTS),
        )
        model = torch.nn.Sequential(*layers)
        engine, *_ = deepspeed.initialize(
            model=model, model_parameters=model.parameters(), config=s.ds_config
        )
        loader = s.loader(Poisoned(SAMPLES, 0.1))
        s.checkpoint(engine)
        for inputs, targets in (batch for _ in range(4) for batch in loader):
            meet_faults(engine.global_steps + 1, s.rank, s.resolved.batch.micro_batch_size)
            loss = torch.nn.functional.mse_loss(engine(inputs), targets)
            engine.backward(loss)
            engine.step()
            s.report({"loss": loss})
        weights = [parameter.tolist() for parameter in model.parameters()]
        assert s.run_dir is not None
        if not s.stop_requested:
            (s.run_dir / f"words{s.rank}.json").write_text(json.dumps(weights))
