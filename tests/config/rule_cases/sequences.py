"""What ranks that share a sequence cannot do: a point that breaks each rule, and a neighbour."""

from __future__ import annotations

from tests.config.rule_cases.points import ZERO, Cases, Setup, zero

CASES: Cases = {
    ("sequence-pipeline", ("hyperparameters", "sequence_parallel_size")): (
        Setup(sequence=2, pipe=2, slots=4),
        Setup(sequence=2, slots=4),
    ),
    ("sequence-model", ("hyperparameters", "sequence_parallel_size")): (
        Setup(sequence=2, model=2, slots=4),
        Setup(model=2, slots=4),
    ),
    ("sequence-degree", ("sequence_parallel_size",)): (
        Setup(ds={"sequence_parallel_size": 2}),
        Setup(ds={"sequence_parallel_size": 2}, sequence=2),
    ),
    ("sequence-mesh", ("data_parallel_size",)): (
        Setup(ds={"data_parallel_size": 1}, sequence=2),
        Setup(ds={"data_parallel_size": 2}),
    ),
    ("sequence-length", ("hyperparameters", "sequence_length")): (
        Setup(sequence=2, hyperparameters={"sequence_length": 127}),
        Setup(sequence=2, hyperparameters={"sequence_length": 128}),
    ),
    ("sequence-hpz", (ZERO, "zero_hpz_partition_size")): (
        Setup(ds=zero(3, zero_hpz_partition_size=2), sequence=2),
        Setup(ds=zero(3, zero_hpz_partition_size=2)),
    ),
    ("sequence-deepcompile", ("compile", "deepcompile")): (
        Setup(ds={**zero(1), "compile": {"deepcompile": True}}, sequence=2),
        Setup(ds={**zero(1), "compile": {"deepcompile": True}}),
    ),
}
