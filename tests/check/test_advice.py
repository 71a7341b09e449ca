"""What ``det-ds check train.py`` says of code that was written for another trainer: each line that has to change."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.harness.checked import findings

# The comments name what is found in their lines.
PLAIN = """
import argparse, deepspeed, torch
from torch.utils.data import DataLoader, DistributedSampler

parser = argparse.ArgumentParser()
parser.add_argument("--lr", type=float)
parser.add_argument("--local_rank", type=int)  # local-rank
deepspeed.init_distributed()  # session
torch.cuda.set_device(args.local_rank)  # device
device = torch.device("cuda", args.local_rank)  # device
sampler = DistributedSampler(train_set)  # sampler
train_loader = DataLoader(train_set, sampler=sampler)  # data-loader
def evaluate():
    return torch.utils.data.DataLoader(test_set)  # data-loader
engine, *_ = deepspeed.initialize(args=args, model=model.cuda(), training_data=train_set)  # device initialize
engine.load_checkpoint("out")  # load-checkpoint
for epoch in range(3):
    sampler.set_epoch(epoch)  # sampler
    for batch in train_loader:
        loss = engine(batch.to(device))
        engine.backward(loss)
        engine.step()
        print(epoch, loss.item())  # report
    engine.save_checkpoint("out")  # save-checkpoint
    engine.train_batch()  # train-batch
print("done")
"""
PORTED = """
import deepspeed, determined_ds
with determined_ds.session() as s:
    engine, *_ = deepspeed.initialize(model=net, config=s.ds_config)
    for batch in s.loader(dataset):
        print(engine(batch))
"""
TRAINER = """
from determined.pytorch import deepspeed as det_ds, Batch
from determined.pytorch.deepspeed import DeepSpeedTrial

class Mine(DeepSpeedTrial):
    def train_batch(self, batches):
        return self.engine(next(batches).cuda())  # device

with det_ds.init() as context:  # determined-own
    trainer = det_ds.Trainer(Mine(context), context)  # determined-own
    trainer.fit(max_length=Batch(10))  # latest-checkpoint
"""
HF = """
from transformers import HfArgumentParser, Trainer, TrainingArguments  # arguments

class Own(Trainer):
    pass

args, = HfArgumentParser(TrainingArguments).parse_args_into_dataclasses()
trainer = Own(model, args)  # det-callback
trainer.train()  # resume-from-checkpoint
"""
NOTHING = "pass  # unknown-script\nfrom determined.pytorch import PyTorchTrial\n"
FILES = [PLAIN, PORTED, TRAINER, HF, NOTHING]


@pytest.mark.parametrize("text", FILES)
def test_each_line_that_has_to_change_is_named_with_its_fix(text: str, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(text)
    found = [each for each in findings(tmp_path / "train.py") if each.code != "no-experiment"]
    lines = enumerate(text.splitlines(), 1)
    assert {(each.line, each.code) for each in found} == {
        (number, code) for number, line in lines for code in line.partition("  # ")[2].split()
    }
    assert all(each.message and each.fix for each in found)
