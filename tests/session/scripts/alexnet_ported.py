"""AlexNet's layers for small pictures, as a pipeline of two stages, in the manner of DeepSpeed's example.

Run as ``torchrun --nproc-per-node 2 alexnet_plain.py``. The pictures are made here: ten patterns, with noise.
"""

import argparse

import deepspeed
import torch
from deepspeed.pipe import PipelineModule
from torch import nn

import determined_ds


def cifar_trainset(size):
    patterns = torch.randn(10, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    draw = torch.Generator().manual_seed(1)
    labels = torch.randint(10, (size,), generator=draw)
    pictures = patterns[labels] + torch.randn(size, 3, 32, 32, generator=draw)
    return torch.utils.data.TensorDataset(pictures, labels)


def alexnet_layers(dropout):
    return [
        nn.Conv2d(3, 8, kernel_size=5, stride=2, padding=2),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(2),
        nn.Conv2d(8, 16, kernel_size=3, padding=1),
        nn.ReLU(inplace=True),
        nn.Conv2d(16, 8, kernel_size=3, padding=1),
        nn.ReLU(inplace=True),
        nn.AdaptiveAvgPool2d((4, 4)),
        lambda x: torch.flatten(x, 1),
        nn.Dropout(dropout),
        nn.Linear(8 * 4 * 4, 32),
        nn.ReLU(inplace=True),
        nn.Linear(32, 10),
    ]


def get_arguments(words=None):
    parser = argparse.ArgumentParser(description="CIFAR")
    parser.add_argument("-s", "--steps", type=int, default=8)
    parser.add_argument("-p", "--pipeline-parallel-size", type=int, default=2)
    parser.add_argument("--dropout", type=float, default=0.1)
    parser.add_argument("--seed", type=int, default=1138)
    parser.add_argument("--local_rank", type=int, default=-1)
    return deepspeed.add_config_arguments(parser).parse_args(words)


def get_ds_config():
    return {
        "train_batch_size": 16,
        "train_micro_batch_size_per_gpu": 4,
        "optimizer": {"type": "Adam", "params": {"lr": 0.003, "torch_adam": True}},
        "steps_per_print": 10,
    }


def train_pipe(args, s):
    torch.manual_seed(args.seed)
    net = PipelineModule(
        layers=alexnet_layers(args.dropout),
        loss_fn=nn.CrossEntropyLoss(),
        num_stages=args.pipeline_parallel_size,
        partition_method="parameters",
        activation_checkpoint_interval=0,
    )
    trainset = cifar_trainset(80)
    engine, _, _, _ = deepspeed.initialize(
        args=args,
        model=net,
        model_parameters=[p for p in net.parameters() if p.requires_grad],
        training_data=trainset,
        config=get_ds_config(),
    )
    s.loader(trainset)
    s.checkpoint(engine)
    losses = []
    for batches in s.steps(args.steps):
        loss = engine.train_batch(data_iter=batches)
        losses.append(loss.item())
        s.report({"loss": loss})
    return losses


if __name__ == "__main__":
    with determined_ds.session("alexnet.yaml") as s:
        train_pipe(get_arguments(), s)
