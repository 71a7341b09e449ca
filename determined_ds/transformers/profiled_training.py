"""Steps of transformers' Trainer, recorded by torch's profiler: ``fit.profile``, and ``det-ds profile``."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

import torch
from determined import core

from determined_ds.config.params import ProfiledSteps
from determined_ds.rundir.profile_files import DATA, CaptureRecord
from determined_ds.train.profiling.capture import Capture, folder_of_traces, kept_in
from determined_ds.train.profiling.flops import FlopCount
from determined_ds.train.profiling.marks import marked
from determined_ds.train.profiling.peak_flops import peak_flops


class ProfiledTraining:
    """What :class:`DetCallback` does where steps are recorded.

    A step is what lies between the ends of two, without what the Trainer logs, evaluates and saves there. It begins
    with the micro-batches, which are taken before the callback hears of it.

    Args:
        steps: Which ones.
        core_context: Of the script.
        args: The arguments of the Trainer.
        run_dir: The run directory; None on a cluster.
        model: The model, without its engine.
    """

    def __init__(
        self,
        steps: ProfiledSteps,
        core_context: core.Context,
        args: Any,
        *,
        run_dir: Path | None,
        model: Any,
    ) -> None:
        record = _record(core_context, args)
        self._capture = Capture(
            steps,
            folder=folder_of_traces(core_context, run_dir),
            record=record,
            device=args.device,
            marks=lambda: marked([], models=[model]),
            flops=None if args.torch_compile else FlopCount(lambda: bool(model.training)),
            note=print if core_context.distributed.rank == 0 else lambda _: None,
            for_tensorboard=run_dir is None,
            kept_in=kept_in() if run_dir is None else "",
        )
        self._data: Any = None
        self._begin()

    def _begin(self) -> None:
        self._capture.begin_step()
        self._take()

    def _take(self) -> None:
        """From now on the Trainer takes micro-batches."""
        self._data = self._capture.range(DATA)
        self._data.__enter__()

    def taken(self) -> None:
        """The micro-batches of the step are there."""
        if self._data is not None:
            self._data.__exit__(None, None, None)
            self._data = None

    def end_step(self, step: int) -> None:
        """A step has ended; the next one begins."""
        self.taken()
        self._capture.end_step(step)
        self._begin()

    def begin_again(self) -> None:
        """What the Trainer did since the last step belongs to none."""
        if self._data is not None:
            self.taken()
            self._capture.begin_again()
            self._take()

    def close(self) -> None:
        """Training is over."""
        self.taken()
        self._capture.close()


def _record(core_context: core.Context, args: Any) -> CaptureRecord:
    distributed, device = core_context.distributed, args.device
    given = getattr(args, "hf_deepspeed_config", None)
    ds_config = dict(given.config) if given is not None else {}
    zero_stage = (ds_config.get("zero_optimization") or {}).get("stage", 0) if ds_config else None
    precision = "bf16" if args.bf16 else "fp16" if args.fp16 else "fp32"
    samples = args.train_batch_size * args.gradient_accumulation_steps * args.world_size
    return CaptureRecord(
        rank=distributed.rank,
        ranks=distributed.size,
        host=socket.gethostname(),
        device=device.type,
        device_name=torch.cuda.get_device_name(device) if device.type == "cuda" else "",
        zero_stage=zero_stage,
        accumulation=args.gradient_accumulation_steps,
        global_batch_size=samples,
        ds_config=ds_config,
        peak_flops=peak_flops(device, precision),
    )
