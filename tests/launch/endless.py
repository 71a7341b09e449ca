"""Trials that train until they are stopped, that hold a batch, or that hang; and a wait for something to be true."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from tests.harness.command import TIMEOUT_S

# One that trains for ever, one that never ends its first batch, and one whose rank 1 falls asleep in its third batch,
# where rank 0 waits for it to add up gradients.
TRIAL = """
import signal
import torch
from determined_ds import DataParallelTrial

class Endless(DataParallelTrial):
    def build_model(self):
        return torch.nn.Linear(4, 1)
    def loss(self, model, batch):
        inputs, targets = batch
        return torch.nn.functional.mse_loss(model(inputs), targets)
    def build_training_data_loader(self):
        inputs = torch.randn(64, 4, generator=torch.Generator().manual_seed(1))
        return self.training_loader(torch.utils.data.TensorDataset(inputs, inputs[:, :1]))
    build_validation_data_loader = build_training_data_loader

class Held(Endless):
    def train_batch(self, dataloader_iter, epoch_idx, batch_idx):
        print("holding", flush=True)
        while True:
            signal.pause()
"""
STUCK = """
class Stuck(Endless):
    def train_batch(self, dataloader_iter, epoch_idx, batch_idx):
        if batch_idx == 2 and self.context.distributed.rank == 1:
            fall_asleep()
        return super().train_batch(dataloader_iter, epoch_idx, batch_idx)

def fall_asleep():
    while True:
        signal.pause()
"""
EXPERIMENT = """
name: endless
entrypoint: python3 -m determined.launch.torch_distributed python3 -m determined_ds.train trial:{trial}
resources: {{slots_per_trial: {slots}}}
hyperparameters:
  global_batch_size: {batch}
  deepspeed_config: {{type: const, val: {{optimizer: {{type: AdamW, params: {{lr: 0.01}}}}}}}}
  fit: {{max_length: {{batches: 1000000}}, reporting_period: {{batches: 1}}, checkpoint_policy: none}}
searcher: {{name: single, metric: validation_loss}}
"""


def until(condition: Callable[[], Any]) -> Any:
    """Wait until something is true, and hand it back; a guard against hangs, not a measure."""
    deadline = time.monotonic() + TIMEOUT_S
    while not (found := condition()):
        assert time.monotonic() < deadline, "it never came true"
        time.sleep(0.05)
    return found
