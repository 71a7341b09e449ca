"""Models built on the meta device: exact counts, and activations as a real pass has them."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from determined_ds.config.accelerator import assumed_cuda
from determined_ds.config.reconcile import ResolvedConfig
from determined_ds.config.strategy import Strategy
from determined_ds.errors import ConfigError
from determined_ds.experiment.experiment import Experiment, load_experiment
from determined_ds.memory import ModelShape, transformer_parameters
from determined_ds.memory.states import stage_parameters
from tests.making import resolved_of
from tests.memory.engines import pass_bytes
from tests.ranks import ROOT, Ranks

GPT2 = ROOT / "experiments" / "gpt2"
OWN_MODEL = ROOT / "tests" / "cli" / "own_model"


def resolved(path: Path, *overrides: str, context_dir: Path = ROOT) -> tuple[Experiment, ResolvedConfig]:
    experiment = load_experiment(path, overrides)
    return experiment, resolved_of(experiment, assumed_cuda(experiment.slots), context_dir=context_dir)


def built(path: Path, *overrides: str, context_dir: Path = ROOT) -> ModelShape:
    from determined_ds.runtime.shapes.of_experiment import shape_of_experiment

    experiment, config = resolved(path, *overrides, context_dir=context_dir)
    return shape_of_experiment(experiment, config, context_dir)


def test_gpt2_is_counted_exactly() -> None:
    shape = built(
        GPT2 / "const.yaml", "hyperparameters.model_size=xl", "hyperparameters.sequence_length=1024"
    )
    assert (shape.num_layers, shape.hidden_size, shape.num_heads) == (48, 1600, 25)
    assert (shape.vocab_size, shape.sequence_length) == (256, 1024)
    assert shape.num_parameters == transformer_parameters(
        num_layers=48, hidden_size=1600, vocab_size=256, num_positions=1024
    )
    assert shape.largest_layer_parameters == 4 * 1600 * (1600 + 1)
    assert shape.activations is not None
    assert shape.assumptions == ()


def test_a_pipelines_stages_are_counted_with_their_copies() -> None:
    whole = built(GPT2 / "const.yaml")
    pipeline = built(GPT2 / "pipeline.yaml")
    assert pipeline.num_parameters == whole.num_parameters
    tied = whole.vocab_size * whole.hidden_size
    for schedule, chunks, copies in (("1f1b", 1, 2), ("interleaved", 2, 2), ("dualpipev", 2, 1)):
        strategy = Strategy(pipe_parallel_size=2, pipe_schedule=schedule, pipe_chunks=chunks)
        stages = [own for own, _ in stage_parameters(pipeline, strategy)]
        assert len(stages) == 2
        assert sum(stages) == whole.num_parameters + (copies - 1) * tied
    assert pipeline.activations is not None
    assert whole.activations is not None
    assert pipeline.activations.bytes_per_sample == pytest.approx(
        whole.activations.bytes_per_sample, rel=0.05
    )


def test_a_model_is_built_once_for_all_that_it_does_not_depend_on() -> None:
    assert built(GPT2 / "const.yaml") is built(GPT2 / "zero3.yaml", "hyperparameters.learning_rate=0.1")
    assert built(GPT2 / "const.yaml") is not built(GPT2 / "const.yaml", "hyperparameters.model_size=small")


def test_a_model_of_ones_own_that_is_no_transformer(tmp_path: Path) -> None:
    folder = Path(shutil.copytree(OWN_MODEL, tmp_path / "own"))
    shape = built(folder / "experiment.yaml", context_dir=folder)
    assert (shape.num_parameters, shape.num_layers, shape.sequence_length) == (5, 0, 0)
    assert shape.activations is not None
    # Another folder's module of the same name is another module.
    other = Path(shutil.copytree(OWN_MODEL, tmp_path / "other"))
    code = (
        (other / "trial.py")
        .read_text()
        .replace("Linear(4, 1)", "Sequential(torch.nn.Linear(4, 9), torch.nn.Linear(9, 1))")
    )
    (other / "trial.py").write_text(code)
    assert built(other / "experiment.yaml", context_dir=other).num_parameters == 45 + 10


@pytest.mark.parametrize(
    ("code", "says"),
    [
        (
            "class TinyTrial(__import__('determined_ds').DeepSpeedTrial): pass",
            "subclasses DeepSpeedTrial directly",
        ),
        (
            "from tests.cli.own_model import trial\n"
            "class TinyTrial(trial.TinyTrial):\n def build_model(self): return 1 / 0",
            "division by zero",
        ),
        ("import nonesuch_package\nclass TinyTrial: pass", "nonesuch_package"),
    ],
)
def test_a_trial_that_cannot_be_built_so_is_refused_with_a_way_out(
    tmp_path: Path, code: str, says: str
) -> None:
    folder = Path(shutil.copytree(OWN_MODEL, tmp_path / "own"))
    (folder / "trial.py").write_text(code)
    with pytest.raises(ConfigError, match=says) as caught:
        built(folder / "experiment.yaml", context_dir=folder)
    assert caught.value.problems[0].fix


# ---------------------------------------------------------------------------------- against a real pass


def real_activations(samples: int) -> int:
    """Bytes that GPT-2's forward pass keeps for its backward pass; in fp32, in this rank."""
    import torch

    from model_defs.common.text import next_token_loss
    from model_defs.gpt2.model import GPT2, gpt2_config

    model = GPT2(gpt2_config("tiny", vocab_size=256, sequence_length=128))
    tokens = torch.zeros(samples, 128, dtype=torch.long)
    return pass_bytes(model, lambda: next_token_loss(model(tokens), tokens))


def test_activations_are_those_of_a_real_pass(one_rank: Ranks) -> None:
    """Without dropout: torch's fused attention has none on CPUs, and keeps the scores instead; on GPUs it has."""
    overwrite = "hyperparameters.overwrite_deepspeed_args.bf16.enabled=false"
    shape = built(GPT2 / "const.yaml", overwrite)
    assert shape.activations is not None
    assert shape.activations.element_bytes == 4
    samples = 8
    (real,) = one_rank.run(real_activations, samples)
    measured = shape.activations.fixed_bytes + samples * shape.activations.bytes_per_sample
    assert measured == pytest.approx(real, rel=0.15)


# ---------------------------------------------------------------------------------- Hugging Face models


def test_a_hugging_face_model_is_counted_exactly(tmp_path: Path) -> None:
    import transformers

    from determined_ds.runtime.shapes.of_huggingface import shape_of_huggingface

    transformers.GPT2Config().save_pretrained(tmp_path)
    for source in (tmp_path, tmp_path / "config.json"):
        shape = shape_of_huggingface(source)
        assert shape.num_parameters == 124_439_808
        assert (shape.num_layers, shape.hidden_size, shape.num_heads, shape.vocab_size) == (
            12,
            768,
            12,
            50257,
        )
        assert shape.sequence_length == 1024
        assert shape.activations is not None
    assert shape_of_huggingface(tmp_path, sequence_length=256).sequence_length == 256


def test_heads_that_share_keys_and_values_are_counted(tmp_path: Path) -> None:
    import transformers

    from determined_ds.runtime.shapes.of_huggingface import shape_of_huggingface

    hidden, inner, layers, vocab = 256, 512, 2, 1000
    transformers.LlamaConfig(
        hidden_size=hidden,
        intermediate_size=inner,
        num_hidden_layers=layers,
        num_attention_heads=8,
        num_key_value_heads=2,
        vocab_size=vocab,
    ).save_pretrained(tmp_path)
    shape = shape_of_huggingface(tmp_path, sequence_length=128)
    attention = 2 * hidden**2 + 2 * hidden * hidden // 4
    block = attention + 3 * hidden * inner + 2 * hidden
    assert shape.num_parameters == layers * block + 2 * vocab * hidden + hidden
    assert shape.activations is not None
