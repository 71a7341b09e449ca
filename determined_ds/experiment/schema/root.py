"""The whole experiment configuration, and those of its sections that are small.

A class is a section, a field a key. What is required is what the master misses in the end, after its defaults.
Source: the schemas ``expconf/v0`` of determined 0.38.1, and the Go structs that they are read into.
"""

from __future__ import annotations

import re
from fractions import Fraction
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    Tag,
    ValidationInfo,
    field_validator,
    model_validator,
)
from typing_extensions import Self

from determined_ds.experiment.experiment import ENTRYPOINT_FORM, LARGEST_SEED
from determined_ds.experiment.schema.environment import Environment
from determined_ds.experiment.schema.parameters import Space
from determined_ds.experiment.schema.searcher import AnySearcher, Duration
from determined_ds.experiment.schema.section import (
    Flag,
    Integer,
    Natural,
    Number,
    Positive,
    Section,
    Text,
    by_kind,
    fault,
)
from determined_ds.experiment.schema.storage import CheckpointStorage, TensorboardStorage

Path = Annotated[Text, Field(description="a mount has two ends", examples=["/data"])]


def _absolute(path: str) -> str:
    if not path.startswith("/"):
        raise fault("out-of-range", "must be an absolute path", f"write /{path}, or where it is")
    return path


def _not_here(path: str) -> str:
    if path == ".":
        fix = "write the path of a folder, e.g. data"
        raise fault("out-of-range", "must not be the working directory itself", fix)
    return path


class BindMount(Section):
    host_path: Annotated[Path, AfterValidator(_absolute)]
    container_path: Annotated[Path, AfterValidator(_not_here)]
    read_only: Flag | None = None
    propagation: Text | None = None


class Device(Section):
    host_path: Path
    container_path: Path
    mode: Text | None = None


DEVICE_FORM = "write e.g. /dev/infiniband:/dev/infiniband:rwm"


def _device(text: str) -> str:
    if not re.match("/[^:]*:/", text) or text.count(":") > 2:  # the latter is refused by the master's code
        raise fault("out-of-range", "names no device on the host and in the container", DEVICE_FORM)
    return text


AnyDevice = Annotated[
    Annotated[Text, AfterValidator(_device), Tag("text")] | Annotated[Device, Tag("mapping")],
    by_kind(
        "text",
        "mapping",
        expected="a string or a mapping of host_path and container_path",
        fix=DEVICE_FORM,
    ),
]

LARGEST_SIZE = 2**63 - 1
SIZE = re.compile(r"(\d{0,20}\.?\d{1,20}) ?([kmgtp]?)(?:i?b)?", re.IGNORECASE | re.ASCII)


def _bytes(size: Any) -> Any:
    """The schema takes ``8g``; the struct that it is read into does not."""
    if not isinstance(size, str):
        return size
    found = SIZE.fullmatch(size)
    num_bytes = int(Fraction(found[1]) * 1024 ** " kmgtp".index(found[2].lower() or " ")) if found else 0
    fix = f"write {num_bytes}" if 0 < num_bytes <= LARGEST_SIZE else "write e.g. 8589934592"
    raise fault("wrong-type", "must be a number of bytes, not a string", fix)


def _of_commands(slots: Any) -> Any:
    if slots is None:
        return slots
    message = "unknown key: it is for notebooks and commands, not for experiments"
    raise fault("unknown-key", message, "did you mean resources.slots_per_trial?")


class Resources(Section):
    slots_per_trial: Natural | None = None
    slots: Annotated[None, BeforeValidator(_of_commands)] = None
    max_slots: Integer | None = None
    weight: Number | None = None
    priority: Annotated[Positive, Field(le=99)] | None = None
    resource_pool: Text | None = None
    is_single_node: Flag | None = None
    native_parallel: Flag | None = None
    shm_size: Annotated[Integer, BeforeValidator(_bytes)] | None = None
    devices: list[AnyDevice] | None = None
    agent_label: Text | None = None


class Profiling(Section):
    enabled: Flag | None = None
    begin_on_batch: Natural | None = None
    end_after_batch: Natural | None = None
    sync_timings: Flag | None = None

    @field_validator("end_after_batch")
    @classmethod
    def not_before_it_begins(cls, value: int | None, info: ValidationInfo) -> int | None:
        begin = info.data.get("begin_on_batch")
        if value is not None and begin is not None and value < begin:
            message = f"must not be before begin_on_batch, which is {begin}"
            raise fault("out-of-range", message, f"write {begin} or more")
        return value


class Reproducibility(Section):
    experiment_seed: Annotated[Natural, Field(le=LARGEST_SEED)] | None = None


class RetentionPolicy(Section):
    log_retention_days: Annotated[
        Integer, Field(ge=-1, le=32767, description="-1 keeps the logs for ever", examples=[90])
    ]


class Optimizations(Section):
    aggregation_frequency: Positive | None = None
    auto_tune_tensor_fusion: Flag | None = None
    average_aggregated_gradients: Flag | None = None
    average_training_metrics: Flag | None = None
    gradient_compression: Flag | None = None
    grad_updates_size_file: Text | None = None
    mixed_precision: Literal["O0", "O1", "O2", "O3"] | None = None
    tensor_fusion_cycle_time: Natural | None = None
    tensor_fusion_threshold: Natural | None = None


Action = Literal["cancel_retries", "exclude_node"]


class LegacyAction(Section):
    type: Annotated[Action, Field(description="it says what to do", examples=["cancel_retries"])]


AnyAction = Annotated[
    Annotated[Action, Tag("text")] | Annotated[LegacyAction, Tag("mapping")],
    by_kind("text", "mapping", expected="cancel_retries or exclude_node", fix="write action: cancel_retries"),
]


class LogPolicy(Section):
    name: Text | None = None
    pattern: Text | None = None
    action: AnyAction | None = None

    @model_validator(mode="after")
    def named(self) -> Self:
        given = self.model_fields_set
        if "name" not in given and not given >= {"pattern", "action"}:
            raise fault("missing-key", "a log policy needs a name", "write name: ..., beside pattern")
        return self


class Slurm(Section):
    slots_per_node: Positive | None = None
    gpu_type: Text | None = None
    sbatch_args: list[Text] | None = None


class Pbs(Section):
    slots_per_node: Positive | None = None
    pbsbatch_args: list[Text] | None = None


class Pachd(Section):
    host: Text
    port: Integer


class PachydermProxy(Section):
    scheme: Text
    host: Text
    port: Integer


class PachydermDataset(Section):
    project: Text
    repo: Text
    commit: Text
    branch: Text
    token: Text


class Pachyderm(Section):
    pachd: Pachd
    proxy: PachydermProxy
    dataset: PachydermDataset


class Webhooks(Section):
    webhook_id: list[Integer] | None = None
    webhook_name: list[Text] | None = None
    exclude: Flag | None = None


class Integrations(Section):
    pachyderm: Pachyderm | None = None
    webhooks: Webhooks | None = None


class Kerberos(Section):
    config_file: Text


class Security(Section):
    kerberos: Kerberos | None = None


Entrypoint = Annotated[
    Annotated[Text, Tag("text")] | Annotated[list[Text], Tag("list")],
    by_kind(
        "text",
        "list",
        expected="a command, as a string or a list of strings",
        fix=f"write: {ENTRYPOINT_FORM}",
    ),
]


class ExperimentConfig(Section):
    """All of it. Every key is one that the master knows."""

    name: Text | None = None
    description: Text | None = None
    labels: list[Text] | None = None
    workspace: Text | None = None
    project: Text | None = None
    # Optional to the schemas; the master's code wants it.
    entrypoint: Annotated[
        Entrypoint, Field(description="it says which trial to train", examples=[ENTRYPOINT_FORM])
    ]
    searcher: Annotated[
        AnySearcher,
        Field(
            description="it names the metric to judge trials by",
            examples=["{name: single, metric: validation_loss}"],
        ),
    ]
    hyperparameters: Space | None = None
    resources: Resources | None = None
    environment: Environment | None = None
    bind_mounts: list[BindMount] | None = None
    checkpoint_policy: Literal["best", "all", "none"] | None = None
    checkpoint_storage: CheckpointStorage | None = None
    tensorboard_storage: TensorboardStorage | None = None
    data: dict[str, Any] | None = None
    data_layer: dict[str, Any] | None = None
    debug: Flag | None = None
    integrations: Integrations | None = None
    internal: None = None
    log_policies: list[LogPolicy] | None = None
    max_restarts: Natural | None = None
    min_checkpoint_period: Duration | None = None
    min_validation_period: Duration | None = None
    optimizations: Optimizations | None = None
    pbs: Pbs | None = None
    perform_initial_validation: Flag | None = None
    preemption_timeout: Integer | None = None
    profiling: Profiling | None = None
    records_per_epoch: Integer | None = None
    reproducibility: Reproducibility | None = None
    retention_policy: RetentionPolicy | None = None
    scheduling_unit: Positive | None = None
    security: Security | None = None
    slurm: Slurm | None = None
