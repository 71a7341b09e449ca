"""What is looked for before ranks start: tools that they would miss only after minutes, and locks that hang them."""

from __future__ import annotations

from determined_ds.config.layout import Accelerator
from determined_ds.config.resolve import ResolvedConfig
from determined_ds.devices import kind_of_device
from determined_ds.doctor.compilers import check_compilers, cuda_of_torch, is_prebuilt
from determined_ds.doctor.diagnosis import MISSING
from determined_ds.doctor.extension_locks import remove_stale, root_of_extensions
from determined_ds.doctor.extensions import NVCC, ops_of
from determined_ds.doctor.surroundings import Host
from determined_ds.errors import Problem


def missing_compiler(resolved: ResolvedConfig, host: Host) -> list[Problem]:
    """A problem for each key that has DeepSpeed compile for GPUs, where there is no nvcc that serves torch.

    On CPUs there is none: what is built there fails at once, with DeepSpeed's own words.

    Args:
        resolved: What will run.
        host: Where it will.
    """
    if not _compiles_for_cuda(resolved.accelerator):
        return []
    wanted = [op for op in ops_of(resolved) if NVCC in op.tools and not is_prebuilt(op.name)]
    if not wanted:
        return []
    tools = check_compilers(
        host, {NVCC: [op.name for op in wanted]}, torch_cuda=cuda_of_torch(), has_gpus=True
    )
    [nvcc] = [finding for finding in tools if finding.name == NVCC]
    if nvcc.state != MISSING:
        return []
    return [
        resolved.ds.problem(
            op.key,
            f"DeepSpeed compiles {op.name} for it by nvcc at its first use, and there is {nvcc.found}",
            f"{op.instead}; or {nvcc.fix}",
            "nvcc",
        )
        for op in wanted
    ]


def _compiles_for_cuda(accelerator: Accelerator) -> bool:
    return kind_of_device(accelerator) == "cuda"


def freed_locks(resolved: ResolvedConfig, host: Host) -> list[str]:
    """Remove locks that killed builds have left, where ranks will build anything; a line for each one."""
    if not ops_of(resolved):
        return []
    return remove_stale(root_of_extensions(host.environment), now=host.clock())
