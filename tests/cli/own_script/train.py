"""A DeepSpeed script with a loop of its own, by Determined's Core API."""

import argparse
import json
import os
import sys
import time

import deepspeed
import determined as det
import torch


def main(core_context, arguments):
    info = det.get_cluster_info()
    torch.manual_seed(info.trial.trial_seed)
    model = torch.nn.Linear(4, 1)
    optimizer = {"type": "Adam", "params": {"lr": info.trial.hparams["learning_rate"], "torch_adam": True}}
    engine, *_ = deepspeed.initialize(
        model=model,
        model_parameters=model.parameters(),
        config={"train_batch_size": 8, "optimizer": optimizer, "zero_optimization": {"stage": 1}},
    )
    rank, size = core_context.distributed.rank, core_context.distributed.size
    first = 0
    if info.latest_checkpoint is not None:
        with core_context.checkpoint.restore_path(info.latest_checkpoint) as path:
            engine.load_checkpoint(str(path), tag="all")
        first = core_context.checkpoint.get_metadata(info.latest_checkpoint)["steps_completed"]
    for step in range(first + 1, arguments.steps + 1):
        batch = torch.randn(8, 4, generator=torch.Generator().manual_seed(step))[rank::size]
        loss = (engine(batch) - batch.sum(1, keepdim=True)).square().mean()
        engine.backward(loss)
        engine.step()
        total = core_context.distributed.allgather(loss.item())
        if rank == 0:
            core_context.train.report_training_metrics(step, {"loss": sum(total) / size})
            core_context.train.report_progress(step / arguments.steps)
        time.sleep(arguments.sleep)
        stops = core_context.preempt.should_preempt()
        if step % 4 == 0 or stops:
            with core_context.checkpoint.store_path({"steps_completed": step}, shard=True) as (path, _):
                engine.save_checkpoint(str(path), tag="all")
        if stops:
            return
        if step == arguments.crash and info.latest_checkpoint is None:
            raise ArithmeticError(f"step {step}")
    if rank == 0:
        core_context.train.report_validation_metrics(arguments.steps, {"validation_loss": loss.item()})


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--sleep", type=float, default=0.0)
    parser.add_argument("--crash", type=int)
    parser.add_argument("--exit", type=int)
    parser.add_argument("--impossible", action="store_true")
    given = parser.parse_args()
    if given.exit is not None:
        sys.exit(given.exit)
    if os.environ["RANK"] == "0":
        found = det.get_cluster_info()
        told = {"hparams": found.trial.hparams, "slots": found.slot_ids}
        print("INFO", json.dumps({**told, "latest": found.latest_checkpoint}), flush=True)
    deepspeed.init_distributed()
    with det.core.init(distributed=det.core.DistributedContext.from_deepspeed()) as context:
        if given.impossible:
            raise det.InvalidHP("the width must be even")
        main(context, given)
