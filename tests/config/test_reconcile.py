"""One configuration, decided before anything runs: complete, with the origin of each value, or every reason why not."""

from __future__ import annotations

from tests.package import decide, refusal, refusals


def test_every_value_has_its_origin() -> None:
    hp = """global_batch_size: 8
lr: 0.1
fit: {max_length: {batches: 9}}
overwrite_deepspeed_args:
  zero_optimization: {stage: 2}
"""
    ds = """{
"train_micro_batch_size_per_gpu": 2,
"zero_optimization": {"stage": 1, "overlap_comm": true},
"optimizer": {"type": "AdamW", "params": {"lr": "auto", "weight_decay": "auto"}},
"scheduler": {"type": "WarmupDecayLR", "params": {"warmup_min_lr": "auto", "warmup_num_steps": 4}},
"bf16": {"enabled": "auto"}}"""
    assert decide(hp, ds).origins == {
        "train_batch_size": "global_batch_size, hp.yaml:1",
        "train_micro_batch_size_per_gpu": "ds.json:2",
        "gradient_accumulation_steps": "derived: global_batch_size 8 / (train_micro_batch_size_per_gpu 2"
        " x data_parallel_world_size 2)",
        "zero_optimization.stage": "overwrite_deepspeed_args, hp.yaml:5",
        "zero_optimization.overlap_comm": "ds.json:3",
        "optimizer.type": "ds.json:4",
        "optimizer.params.lr": "lr, hp.yaml:2",
        "optimizer.params.weight_decay": "no weight decay is stated",
        "optimizer.params.torch_adam": "the accelerator: cpu",
        "scheduler.type": "ds.json:5",
        "scheduler.params.warmup_min_lr": "warmup_max_lr / warmup_num_steps",
        "scheduler.params.warmup_max_lr": "lr, hp.yaml:2",
        "scheduler.params.warmup_num_steps": "ds.json:5",
        "scheduler.params.total_num_steps": "fit.max_length, hp.yaml:3",
        "bf16.enabled": "the accelerator: cpu",
        "gradient_clipping": "DeepSpeed's default",
    }


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
    wrong_json = refusal(lambda: decide("global_batch_size: 9", {"train_micro_batch_size_per_gpu": "3"}))
    assert wrong_json.key == "train_micro_batch_size_per_gpu"
    both = refusals(lambda: decide("global_batch_size: nine", {"fp16": {"enabled": True}}))
    assert {problem.code for problem in both} == {"wrong-type", "fp16-unsupported"}
