"""A small convolutional network on pictures of CIFAR-10's shape, in the manner of DeepSpeed's tutorial.

Run as ``torchrun --nproc-per-node 2 cifar10_plain.py``. The pictures are made here: ten patterns, with noise.
"""

import argparse

import deepspeed
import torch
from torch import nn
from torch.nn import functional as F

import determined_ds


class Pictures(torch.utils.data.Dataset):
    def __init__(self, size, seed):
        patterns = torch.randn(10, 3, 32, 32, generator=torch.Generator().manual_seed(0))
        draw = torch.Generator().manual_seed(seed)
        self.labels = torch.randint(10, (size,), generator=draw)
        self.pictures = patterns[self.labels] + 2 * torch.randn(size, 3, 32, 32, generator=draw)

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, index):
        return self.pictures[index], self.labels[index]


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(3, 6, 5)
        self.conv2 = nn.Conv2d(6, 16, 5)
        self.fc1 = nn.Linear(16 * 5 * 5, 64)
        self.fc2 = nn.Linear(64, 10)

    def forward(self, x):
        x = F.max_pool2d(F.relu(self.conv1(x)), 2)
        x = F.max_pool2d(F.relu(self.conv2(x)), 2)
        return self.fc2(F.relu(self.fc1(torch.flatten(x, 1))))


def get_arguments(words=None):
    parser = argparse.ArgumentParser(description="CIFAR")
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--log-interval", type=int, default=4)
    parser.add_argument("--local_rank", type=int, default=-1)
    return deepspeed.add_config_arguments(parser).parse_args(words)


def get_ds_config():
    return {
        "train_batch_size": 16,
        "gradient_accumulation_steps": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.003, "torch_adam": True}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 0.003, "warmup_num_steps": 10}},
        "gradient_clipping": 1.0,
        "zero_optimization": {"stage": 1},
    }


def test(engine, testset):
    loader = torch.utils.data.DataLoader(testset, batch_size=16)
    correct = 0
    engine.eval()
    with torch.no_grad():
        for pictures, labels in loader:
            found = engine(pictures.to(engine.device)).argmax(1)
            correct += (found == labels.to(engine.device)).sum().item()
    engine.train()
    return correct / len(testset)


def main(args, s):
    deepspeed.init_distributed()
    torch.manual_seed(0)
    trainset, testset = Pictures(80, seed=1), Pictures(40, seed=2)
    net = Net()
    engine, _, trainloader, _ = deepspeed.initialize(
        args=args,
        model=net,
        model_parameters=[p for p in net.parameters() if p.requires_grad],
        training_data=trainset,
        config=get_ds_config(),
    )
    trainloader = s.loader(trainset)
    s.checkpoint(engine)
    criterion = nn.CrossEntropyLoss()
    losses = []
    for epoch in range(args.epochs):
        running_loss = 0.0
        for i, data in enumerate(trainloader):
            inputs, labels = data[0].to(engine.device), data[1].to(engine.device)
            outputs = engine(inputs)
            loss = criterion(outputs, labels)
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
            s.report({"loss": loss})
            running_loss += loss.item()
            if i % args.log_interval == args.log_interval - 1:
                if engine.global_rank == 0:
                    print(f"[{epoch + 1}, {i + 1:5d}] loss: {running_loss / args.log_interval:.3f}")
                running_loss = 0.0
        accuracy = test(engine, testset)
        s.report({"accuracy": accuracy}, validation=True)
        if engine.global_rank == 0:
            print(f"accuracy on {len(testset)} test pictures: {100 * accuracy:.0f} %")
    return losses


if __name__ == "__main__":
    with determined_ds.session("cifar10.yaml") as s:
        main(get_arguments(), s)
