"""Activation checkpointing, compilers, DeepSpeed's instruments."""

from __future__ import annotations

from determined_ds.config.rules.rule import Rule

RULES: tuple[Rule, ...] = (
    Rule(
        code="cpu-checkpointing",
        key=("activation_checkpointing", "cpu_checkpointing"),
        breaks=lambda f: (
            bool(f.ds.get(("activation_checkpointing", "cpu_checkpointing"))) and f.accelerator.name == "cpu"
        ),
        message="activations are on the CPU already, and DeepSpeed fails on moving them there",
        fix="remove cpu_checkpointing, or run it on GPUs",
        source="deepspeed 0.19.8 runtime/activation_checkpointing/checkpointing.py CheckpointFunction.forward",
    ),
    Rule(
        code="contiguous-checkpoints",
        key=("activation_checkpointing", "contiguous_memory_optimization"),
        breaks=lambda f: (
            bool(f.checkpointing("contiguous_memory_optimization"))
            and not (f.checkpointing("number_checkpoints") and f.checkpointing("partition_activations"))
        ),
        message="needs number_checkpoints, the number of checkpointed layers, and partition_activations",
        fix="add number_checkpoints: N and partition_activations: true, or remove contiguous_memory_optimization",
        source="deepspeed 0.19.8 runtime/activation_checkpointing/checkpointing.py configure",
    ),
    Rule(
        code="deepcompile-cuda",
        key=("compile", "deepcompile"),
        breaks=lambda f: f.strategy.deepcompile and f.accelerator.name != "cuda",
        message="DeepCompile is written for CUDA, and there is no CUDA device",
        fix="run it on GPUs, or write hyperparameters.torch_compile: true instead",
        source="deepspeed 0.19.8 compile/util.py is_deepcompile_supported",
    ),
    Rule(
        code="deepcompile-stage",
        key=("compile", "deepcompile"),
        breaks=lambda f: f.strategy.deepcompile and f.zero_stage == 0,
        message="is ignored without ZeRO: torch's own compiler is used",
        fix="set zero_optimization.stage to 1, 2 or 3, or write hyperparameters.torch_compile: true instead",
        source="deepspeed 0.19.8 runtime/engine.py DeepSpeedEngine.get_deepcompile_backend",
        warning=True,
    ),
    Rule(
        code="memory-breakdown-peak",
        key=("memory_breakdown",),
        breaks=lambda f: (
            bool(f.ds.get(("memory_breakdown",)))
            and f.accelerator.name == "cuda"
            and "memory_breakdown" not in f.switched_on  # which is read, and not printed
        ),
        message="resets the peak of the device's memory as it prints: peak_memory_gib is that since the last print",
        fix="remove it where that metric matters",
        source="deepspeed 0.19.8 runtime/utils.py see_memory_usage",
        warning=True,
    ),
)
