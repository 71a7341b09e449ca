"""What the tests of tuning stand on: experiments to lay choices over, a model's sizes, and what runs of it gave."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from determined_ds.config.accelerator import Accelerator
from determined_ds.documents.document import Document
from determined_ds.documents.reading import parse_yaml
from determined_ds.experiment.decide import read_document
from determined_ds.memory import ModelShape
from determined_ds.report.repetition import Repetition
from determined_ds.report.results import MEASURED, Row
from determined_ds.tune.axes import name_of
from determined_ds.tune.candidates import Candidate, candidates_of
from determined_ds.tune.choice import Base, read_base
from determined_ds.tune.measurement import unmeasured
from determined_ds.tune.variants import Variant, decided

ROOT = Path(__file__).resolve().parents[2]
CONST = Path("experiments/gpt2/const.yaml")
TEMPLATES = sorted(path.relative_to(ROOT) for path in (ROOT / "experiments").glob("*/*.yaml"))
CPU = Accelerator(name="cpu", num_devices=64, bf16=False, fp16=False)
CUDA = Accelerator(name="cuda", num_devices=64, bf16=True, fp16=True)
# Of experiments/gpt2/const.yaml, as `det-ds estimate` counts them.
SHAPE = ModelShape(
    num_parameters=842_496,
    num_layers=4,
    hidden_size=128,
    num_heads=4,
    vocab_size=256,
    sequence_length=128,
    largest_layer_parameters=66_048,
)
OVER = ("zero_stage", "micro_batch", "pipeline", "precision")
PLENTY = 2**60


def document_of(config: Path, *overrides: str, slots: int | None = None) -> Document:
    """A template's YAML with overrides, as the commands read it."""
    return read_document(ROOT / config, ROOT, slots=slots, overrides=overrides)


@cache
def base_of(
    config: Path = CONST, *overrides: str, slots: int | None = None, accelerator: Accelerator = CPU
) -> Base:
    """A template, read."""
    return read_base(document_of(config, *overrides, slots=slots), ROOT, accelerator)


def base_in(folder: Path, experiment: str, accelerator: Accelerator = CPU) -> Base:
    """An experiment of one's own, whose trial lies in a folder."""
    return read_base(parse_yaml(experiment, "experiment.yaml"), folder, accelerator)


def shape_of(_: Variant) -> ModelShape:
    """Every variant has the same model."""
    return SHAPE


@cache
def gpt2_candidates(*overrides: str) -> tuple[Candidate, ...]:
    """The ways to train the template on two CPU slots, bf16 among them whatever this processor computes."""
    base = base_of(CONST, *overrides)
    plain = candidates_of(base, [axis for axis in OVER if axis != "precision"], shape_of, PLENTY).possible
    choices = [replace(each.variant.choice, precision="bf16") for each in plain]
    in_bf16 = [decided(base, name_of(base, choice), choice) for choice in choices]
    return (*plain, *(Candidate(base=base, variant=variant, shape=SHAPE) for variant in in_bf16))


def named(candidates: Sequence[Candidate], name: str) -> Candidate:
    """The candidate of that name."""
    [found] = [each for each in candidates if each.name == name]
    return found


def row_of(variant: Variant, seconds: Sequence[float], *, status: str = MEASURED, **more: Any) -> Row:
    """A start of a variant that took these seconds a step.

    Args:
        variant: One that can run.
        seconds: Of each step that counts.
        status: How it ended.
        more: ``losses``, ``memory`` (bytes), ``reason``.
    """
    repetition = Repetition(
        run_dir="",
        step_seconds=tuple(seconds),
        losses=tuple(more.pop("losses", (2.0,) * 5)),
        warmup=0,
        start_seconds=1.0,
        peak_memory_bytes_by_rank=(more.pop("memory", 10**9),),
        model_state_bytes_by_rank=(10**7,),
    )
    known = (repetition,) if seconds else ()
    return replace(unmeasured(variant, status, more.pop("reason", "")), repetitions=known, **more)
