"""A script of accelerate, run as ``python3 -m tests.transformers.accelerated_script``."""

from __future__ import annotations

import torch

from determined_ds.transformers import accelerator, init


def main() -> None:
    with init() as core_context:
        accelerate = accelerator()
        batch = accelerate.resolved.batch
        data = torch.utils.data.TensorDataset(torch.randn(32, 4), torch.randn(32, 2))
        loader = torch.utils.data.DataLoader(data, batch_size=batch.micro_batch_size)
        model = torch.nn.Linear(4, 2)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        model, optimizer, loader = accelerate.prepare(model, optimizer, loader)
        for inputs, targets in loader:
            with accelerate.accumulate(model):
                loss = torch.nn.functional.mse_loss(model(inputs), targets)
                accelerate.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
        if accelerate.is_main_process:
            metrics = {
                "loss": loss.item(),
                "ranks": accelerate.num_processes,
                "batches": len(loader),
                "steps": model.global_steps,
                "samples": model.train_batch_size(),
            }
            core_context.train.report_training_metrics(steps_completed=model.global_steps, metrics=metrics)


if __name__ == "__main__":
    main()
