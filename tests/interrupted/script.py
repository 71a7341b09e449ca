"""A plain script with a session, killed by tests: what it has at its end, and what it draws, must not depend on that.

The entrypoint is ``python3 script.py FORM``; the environment says where to die.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from typing import Any

import deepspeed
import torch

import determined_ds

FORM = sys.argv[1]
EPOCHS = 3
SAMPLES = 44  # 5 steps of 8, and a rest that is dropped


class Data(torch.utils.data.Dataset[Any]):
    """Samples that are drawn anew each time, as by an augmentation."""

    def __init__(self, size: int) -> None:
        self.inputs = torch.randn(size, 4, generator=torch.Generator().manual_seed(0))

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, index: int) -> Any:
        return self.inputs[index] + 0.1 * torch.randn(4), self.inputs[index, :2]


def loader_of(s: Any, data: str) -> Any:
    """A session's loader over each kind of data that it takes; a stream has the same samples in their order."""
    samples = Data(SAMPLES)
    if data == "stream":
        return s.loader(Stream(samples), num_workers=2)
    if data == "torch":
        size = s.resolved.batch.micro_batch_size
        return s.loader(torch.utils.data.DataLoader(samples, size, shuffle=True, num_workers=2))
    return s.loader(samples)


class Stream(torch.utils.data.IterableDataset[Any]):
    """Samples one after another."""

    def __init__(self, samples: Data) -> None:
        self.samples = samples

    def __len__(self) -> int:
        return SAMPLES

    def __iter__(self) -> Any:
        return (self.samples[index] for index in range(SAMPLES))


def own(parameter: Any) -> Any:
    """A parameter, or this rank's part of it under ZeRO 3."""
    return getattr(parameter, "ds_tensor", parameter).detach()


class Average:
    """An average of the weights, and how often it was updated."""

    def __init__(self, model: Any) -> None:
        self.mean = [own(parameter).clone() for parameter in model.parameters()]
        self.updates = 0

    def update(self, model: Any) -> None:
        self.updates += 1
        for mean, parameter in zip(self.mean, model.parameters(), strict=True):
            mean.lerp_(own(parameter), 0.1)

    def state_dict(self) -> dict[str, Any]:
        return {"mean": self.mean, "updates": self.updates}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.mean, self.updates = state["mean"], state["updates"]


def die_at(place: str) -> None:
    """Be killed, or be asked to stop, where the environment says so."""
    for name, number in (("KILL_AT", signal.SIGKILL), ("STOP_AT", signal.SIGTERM)):
        if os.environ.get(name) == place and int(os.environ.get("RANK", "0")) == 0:
            del os.environ[name]
            os.kill(os.getpid(), number)


def step(s: Any, engine: Any, average: Average, batch: Any) -> None:
    inputs, targets = batch
    loss = torch.nn.functional.mse_loss(engine(inputs.to(s.device)), targets.to(s.device))
    engine.backward(loss)
    engine.step()
    average.update(engine.module)
    s.report({"loss": loss})
    SEEN.append(loss.item())
    die_at(f"micro:{engine.global_steps}")


def validate(s: Any, engine: Any, held: Any) -> None:
    engine.eval()
    die_at(f"validating:{engine.global_steps}")
    with torch.no_grad():
        for inputs, targets in held:
            loss = torch.nn.functional.mse_loss(engine(inputs.to(s.device)), targets.to(s.device))
            s.report({"validation_loss": loss}, validation=True)
    engine.train()
    torch.randn(3)  # whatever a script draws between two passes
    die_at(f"validated:{engine.global_steps}")


SEEN: list[float] = []


def main(s: Any) -> None:
    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(4, 16), torch.nn.Dropout(0.2), torch.nn.Linear(16, 2))
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=s.ds_config)
    loader = loader_of(s, os.environ.get("DATA", "indexed"))
    held = s.validation_loader(Data(13))
    average = Average(model)
    s.checkpoint(engine, average=average)
    if FORM == "steps":
        for batches in s.steps(5 * EPOCHS):
            for batch in batches:
                step(s, engine, average, batch)
            if engine.global_steps % 5 == 0:
                validate(s, engine, held)
    else:
        for _ in range(EPOCHS) if FORM == "range" else s.epochs(EPOCHS):
            for batch in loader:
                step(s, engine, average, batch)
            validate(s, engine, held)
    if s.stop_requested:
        return
    words = {
        "weights": [own(parameter).tolist() for parameter in engine.module.parameters()],
        "average": [mean.tolist() for mean in average.mean],
        "updates": average.updates,
        "steps": engine.global_steps,
        "drawn": torch.rand(3).tolist(),
        "last": SEEN[-4:],
    }
    (s.run_dir / f"words{s.rank}.json").write_text(json.dumps(words))


if __name__ == "__main__":
    with determined_ds.session() as s:
        main(s)
