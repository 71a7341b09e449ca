"""Trials in Determined's own manner: each makes its engines from a configuration of its own."""

from __future__ import annotations

from typing import Any

import deepspeed
import numpy as np
import torch
from attrdict import AttrDict
from deepspeed.pipe import PipelineModule
from deepspeed.runtime.dataloader import RepeatingLoader
from determined.pytorch import DataLoader, PyTorchCallback

from determined_ds import deepspeed as det_ds

CONFIG: dict[str, Any] = {
    "train_batch_size": 16,
    "train_micro_batch_size_per_gpu": 4,
    "optimizer": {"type": "SGD", "params": {"lr": 0.05}},
}
TRAINING_SAMPLES, VALIDATION_SAMPLES = 32, 17


class Slope(torch.utils.data.Dataset[Any]):
    """Points of a plane."""

    def __init__(self, size: int, seed: int) -> None:
        self.inputs = torch.randn(size, 2, generator=torch.Generator().manual_seed(seed))

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, index: int) -> Any:
        point = self.inputs[index]
        return point, (3 * point[0] - point[1] + 1).reshape(1)


COUNTED = "trial_startup trial_shutdown training_start training_epoch_start training_epoch_end training_workload_end"
COUNTED += " validation_start validation_end checkpoint_write_end checkpoint_upload_end"


class Kept(PyTorchCallback):
    """Keeps what each of its methods is handed first."""

    def __init__(self) -> None:
        self.handed: dict[str, list[Any]] = {name: [] for name in COUNTED.split()}


def _keeping(name: str) -> Any:
    def keeping(self: Kept, *args: Any, **kwargs: Any) -> None:
        first = next(iter((*args, *kwargs.values())), None)
        self.handed[name].append(dict(first) if isinstance(first, dict) else first)

    return keeping


for _name in COUNTED.split():
    setattr(Kept, f"on_{_name}", _keeping(_name))


def mse(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.mse_loss(outputs, targets)


def plane() -> torch.nn.Linear:
    """The same on every rank, whatever was drawn before."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        return torch.nn.Linear(2, 1)


def engine_for(config: Any = CONFIG, model: torch.nn.Module | None = None, **options: Any) -> Any:
    model = model or plane()
    trained = [each for each in model.parameters() if each.requires_grad]
    return deepspeed.initialize(model=model, model_parameters=trained, config=config, **options)[0]


class Replicated(det_ds.DeepSpeedTrial):
    """A model on every rank."""

    def __init__(self, context: Any, config: Any = CONFIG) -> None:
        self.context = context
        self.kept = Kept()
        self.micro_batch_size = config["train_micro_batch_size_per_gpu"]
        self.make(AttrDict(config))

    def make(self, config: Any) -> None:
        self.engine = self.context.wrap_model_engine(engine_for(config))

    def build_callbacks(self) -> dict[str, Any]:
        return {"kept": self.kept}

    def build_training_data_loader(self) -> Any:
        return DataLoader(Slope(TRAINING_SAMPLES, 1), batch_size=self.micro_batch_size)

    def build_validation_data_loader(self) -> Any:
        return DataLoader(Slope(VALIDATION_SAMPLES, 2), batch_size=self.micro_batch_size)

    def step(self, batches: Any) -> torch.Tensor:
        inputs, targets = self.context.to_device(next(batches))
        loss = mse(self.engine(inputs), targets)
        self.engine.backward(loss)
        self.engine.step()
        return loss.detach()

    def train_batch(self, dataloader_iter: Any, epoch_idx: int, batch_idx: int) -> Any:
        return {"loss": self.step(dataloader_iter)}

    def evaluate_batch(self, dataloader_iter: Any, batch_idx: int) -> Any:
        inputs, targets = self.context.to_device(next(dataloader_iter))
        return {"validation_loss": mse(self.engine(inputs), targets)}


class Accumulating(Replicated):
    """Accumulates gradients by itself."""

    left_out = 0

    def make(self, config: Any) -> None:
        self.context.disable_auto_grad_accumulation()
        super().make(config)

    def train_batch(self, dataloader_iter: Any, epoch_idx: int, batch_idx: int) -> Any:
        count = self.engine.gradient_accumulation_steps() - self.left_out
        return {"loss": torch.stack([self.step(dataloader_iter) for _ in range(count)]).mean()}


class LeavingOut(Accumulating):
    """Forgets the last micro-batch of a step."""

    left_out = 1


class OwnLoaders(Replicated):
    """Loads by DeepSpeed's loader, which never ends."""

    def make(self, config: Any) -> None:
        self.context.disable_dataset_reproducibility_checks()
        super().make(config)

    def _loader(self, dataset: Any) -> Any:
        replica, replicas = self.context.distributed.rank, self.context.distributed.size
        own = torch.utils.data.Subset(dataset, range(replica, len(dataset), replicas))
        return RepeatingLoader(torch.utils.data.DataLoader(own, batch_size=self.micro_batch_size))

    def build_training_data_loader(self) -> Any:
        return self._loader(Slope(TRAINING_SAMPLES, 1))

    def build_validation_data_loader(self) -> Any:
        return self._loader(Slope(VALIDATION_SAMPLES, 2))


class OwnLoadersUnsaid(OwnLoaders):
    """The same without saying so."""

    def make(self, config: Any) -> None:
        Replicated.make(self, config)


class Reducing(Replicated):
    """A number that is no mean."""

    def make(self, config: Any) -> None:
        super().make(config)
        self.largest = self.context.wrap_reducer(max, name="largest", for_training=False)

    def evaluate_batch(self, dataloader_iter: Any, batch_idx: int) -> Any:
        inputs, targets = next(dataloader_iter)
        self.largest.update(float(targets.max()))
        return {"validation_loss": mse(self.engine(inputs), targets)}


class SeveralNumbers(Replicated):
    """Metrics that are no single numbers."""

    def train_batch(self, dataloader_iter: Any, epoch_idx: int, batch_idx: int) -> Any:
        loss = self.step(dataloader_iter).numpy()
        return {"loss": np.mean([loss]), "losses": [loss]}

    def evaluate_batch(self, dataloader_iter: Any, batch_idx: int) -> Any:
        inputs, targets = next(dataloader_iter)
        return {"outputs": self.engine(inputs), "doubled": targets * 2}


class Piped(Replicated):
    """A pipeline."""

    stages = 1

    def make(self, config: Any) -> None:
        layers = [torch.nn.Linear(2, 4), torch.nn.Tanh(), torch.nn.Linear(4, 1)]
        torch.manual_seed(7)
        module = PipelineModule(
            layers=layers, loss_fn=mse, num_stages=self.stages, partition_method="uniform"
        )
        self.engine = self.context.wrap_model_engine(engine_for(config, module))
        self.context.set_mpu(det_ds.make_deepspeed_mpu(self.engine.mpu))

    def train_batch(self, dataloader_iter: Any, epoch_idx: int, batch_idx: int) -> Any:
        return {"loss": self.engine.train_batch(dataloader_iter)}

    def evaluate_batch(self, dataloader_iter: Any, batch_idx: int) -> Any:
        return {"validation_loss": self.engine.eval_batch(dataloader_iter)}


class TwoStages(Piped):
    stages = 2


class TwoEngines(Replicated):
    """Two models, side by side."""

    def make(self, config: Any) -> None:
        self.engines = [self.context.wrap_model_engine(engine_for(config)) for _ in range(2)]

    def train_batch(self, dataloader_iter: Any, epoch_idx: int, batch_idx: int) -> Any:
        batch = next(dataloader_iter)
        losses = {}
        for number, engine in enumerate(self.engines, start=1):
            self.engine = engine
            losses[f"loss{number}"] = self.step(iter([batch]))
        return losses

    def evaluate_batch(self, dataloader_iter: Any, batch_idx: int) -> Any:
        inputs, targets = next(dataloader_iter)
        return {f"loss{i}": mse(each(inputs), targets) for i, each in enumerate(self.engines, start=1)}
