"""A configuration that cannot run is refused with every reason at once. Origins: ``tests/cli/test_explain.py``."""

from __future__ import annotations

from tests.package import decide, refusals


def test_one_error_names_every_mismatch_once() -> None:
    """Of what would follow from a wrong size nothing is said."""
    hp = """
global_batch_size: 9
data_parallel_world_size: 3
pipe_parallel_size: 2
overwrite_deepspeed_args: {zero_optimization: {stage: 2}}
fit: {max_lenght: {batches: 1}}
"""
    ds = """{
"train_micro_batch_size_per_gpu": 2,
"zero_optimisation": {},
"zero_optimization": {"stage": 1, "offload_param": {"device": "cpu"}, "overlap_comm": "yes"},
"scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": "auto", "warmup_max_lr": 1}},
"sparse_attention": {},
"fp16": {"enabled": true}
}"""
    problems = refusals(lambda: decide(hp, ds, slots=4))
    assert sorted((problem.key, problem.code, problem.origin) for problem in problems) == [
        ("fp16.enabled", "fp16-unsupported", "ds.json:7"),
        ("hyperparameters.data_parallel_world_size", "topology", "hp.yaml:3"),
        ("hyperparameters.fit.max_lenght", "unknown-key", "hp.yaml:6"),
        ("hyperparameters.global_batch_size", "batch", "hp.yaml:2"),
        ("scheduler.params.warmup_num_steps", "auto-undetermined", "ds.json:5"),
        ("sparse_attention", "removed-key", "ds.json:6"),
        ("zero_optimisation", "unknown-key", "ds.json:3"),
        ("zero_optimization.offload_param", "offload-param-stage", "ds.json:4"),
        ("zero_optimization.overlap_comm", "wrong-type", "ds.json:4"),
        ("zero_optimization.stage", "pipeline-zero-stage", "overwrite_deepspeed_args, hp.yaml:5"),
    ]
