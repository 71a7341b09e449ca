"""A script whose loop is the library's."""

import determined as det
import torch
from determined import pytorch

from determined_ds import DataParallelTrial, Trainer, open_context


class Tiny(DataParallelTrial):
    def build_model(self):
        return torch.nn.Linear(4, 1)

    def build_training_data_loader(self):
        inputs = torch.randn(32, 4, generator=torch.Generator().manual_seed(0))
        return self.training_loader(torch.utils.data.TensorDataset(inputs, inputs.sum(1, keepdim=True)))

    def build_validation_data_loader(self):
        inputs = torch.randn(8, 4, generator=torch.Generator().manual_seed(1))
        return self.validation_loader(torch.utils.data.TensorDataset(inputs, inputs.sum(1, keepdim=True)))

    def loss(self, model, batch):
        inputs, targets = batch
        return torch.nn.functional.mse_loss(model(inputs), targets)


if __name__ == "__main__":
    latest = det.get_cluster_info().latest_checkpoint
    with open_context() as context:
        Trainer(Tiny(context), context).fit(max_length=pytorch.Batch(4), latest_checkpoint=latest)
