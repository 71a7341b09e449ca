"""A trial as Determined's examples have it: its own engine, and its sizes in the code."""

import deepspeed
import torch
from determined.pytorch import DataLoader
from determined.pytorch.deepspeed import DeepSpeedTrial


class OwnTrial(DeepSpeedTrial):
    def __init__(self, context):
        self.context = context
        model = torch.nn.Linear(4, 1)
        optimizer = {
            "type": "Adam",
            "params": {"lr": context.get_hparam("learning_rate"), "torch_adam": True},
        }
        engine, *_ = deepspeed.initialize(
            model=model,
            model_parameters=model.parameters(),
            config={"train_batch_size": 8, "optimizer": optimizer},
        )
        self.engine = context.wrap_model_engine(engine)

    def build_training_data_loader(self):
        inputs = torch.randn(32, 4, generator=torch.Generator().manual_seed(0))
        samples = torch.utils.data.TensorDataset(inputs, inputs.sum(1, keepdim=True))
        return DataLoader(samples, batch_size=self.engine.train_micro_batch_size_per_gpu())

    build_validation_data_loader = build_training_data_loader

    def _loss(self, batches):
        inputs, targets = self.context.to_device(next(batches))
        return torch.nn.functional.mse_loss(self.engine(inputs), targets)

    def train_batch(self, batches, epoch_idx, batch_idx):
        loss = self._loss(batches)
        self.engine.backward(loss)
        self.engine.step()
        return {"loss": loss}

    def evaluate_batch(self, batches, batch_idx):
        return {"validation_loss": self._loss(batches)}
