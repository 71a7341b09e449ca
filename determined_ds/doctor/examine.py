"""Every probe, one after the other."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from determined_ds.config.layout import Accelerator
from determined_ds.devices import GPU_NODES, ROCM_NODE
from determined_ds.doctor.compilers import check_compilers
from determined_ds.doctor.diagnosis import MISSING, OK, WARNING, Diagnosis, diagnosis
from determined_ds.doctor.extension_locks import locks_left, root_of_extensions
from determined_ds.doctor.gpus import Driver, ask_driver, check_gpus
from determined_ds.doctor.imports import Torch, check_imports
from determined_ds.doctor.limits import (
    check_clock,
    check_disk,
    check_memory,
    check_open_files,
    check_shared_memory,
)
from determined_ds.doctor.network import check_network
from determined_ds.doctor.object_access import check_storage
from determined_ds.doctor.requirements import Requirements, needs_of
from determined_ds.doctor.surroundings import Host
from determined_ds.doctor.versions import check_versions
from determined_ds.rundir.limits import num_cores


def examine(host: Host, config: Path | None, accelerator: str | None = None) -> list[Diagnosis]:
    """Run every probe.

    Args:
        host: What to look at; its ``working_dir`` is the context directory.
        config: What it is to run; None to check the machine alone.
        accelerator: ``cpu``, ``cuda``, or None for the best there is.

    Raises:
        ConfigError: the configuration runs nowhere.
    """
    driver = ask_driver(host)
    torch, imported = check_imports(host)
    device = _accelerator(accelerator, driver, torch)
    needs = needs_of(config, host.working_dir, device) if config is not None else Requirements()
    host = host.with_variables(needs.variables)
    gpus = list(check_gpus(host, driver, torch))
    if accelerator == "cpu":  # a fault of the GPUs does not matter then
        gpus = [replace(each, state=WARNING) if each.state == MISSING else each for each in gpus]
    versions = check_versions(host.working_dir)
    return [*versions, *imported, *gpus, *_diagnoses(host, torch, device, needs)]


def _diagnoses(host: Host, torch: Torch, device: Accelerator, needs: Requirements) -> Iterator[Diagnosis]:
    here = min(needs.slots, device.max_ranks)
    yield _slots(host, device, needs.slots)
    is_rocm = bool(torch.hip) or (Path(ROCM_NODE).exists() and not Path(GPU_NODES[0]).exists())
    if not is_rocm:  # which has another compiler
        has_gpus = device.name == "cuda"
        yield from check_compilers(host, needs.tools, torch_cuda=torch.cuda, has_gpus=has_gpus)
    yield from _packages(needs)
    yield from _locks(host)
    yield from check_network(host)
    yield check_shared_memory(host, ranks=here, workers=needs.workers)
    yield check_memory(ranks=here)
    yield check_open_files()
    yield check_disk(host)
    yield check_clock(host)
    storage = check_storage(host, needs.storage)
    if storage is not None:
        yield storage


def _accelerator(name: str | None, driver: Driver | None, torch: Torch) -> Accelerator:
    """What ranks would compute on. Where torch is broken, the driver says how many GPUs there are."""
    seen = torch.gpus or (len(driver.gpus) if torch.error and driver is not None else 0)
    if name == "cuda" or (name is None and seen):
        return Accelerator(
            name="cuda", num_devices=seen, bf16=torch.native_bf16 or bool(torch.error), fp16=True
        )
    return Accelerator(name="cpu", num_devices=num_cores(), bf16=False, fp16=False)


def _slots(host: Host, device: Accelerator, slots: int) -> Diagnosis:
    """Whether there is a device for each rank."""
    kind = "GPUs" if device.name == "cuda" else "CPU cores, four ranks on each at most"
    state = OK if slots <= device.max_ranks else WARNING if host.in_task else MISSING
    fix = "use --accelerator cpu"
    if host.in_task:  # other machines of the experiment have the rest
        fix = "for this task alone: det cmd run --config resources.slots=N"
    elif device.max_ranks:
        fix = f"det-ds run --slots {device.max_ranks}, or several machines"
    needed = f"{slots} slots" if slots > 1 else "1 slot"
    return diagnosis("slots", state, f"{device.num_devices} {kind}", needed, fix)


def _packages(needs: Requirements) -> Iterator[Diagnosis]:
    for problem in needs.packages:
        needed = problem.message.partition(",")[0].removeprefix("needs ")
        yield Diagnosis(f"package for {problem.key}", MISSING, "not installed", needed, problem.fix)


def _locks(host: Host) -> Iterator[Diagnosis]:
    root = root_of_extensions(host.environment)
    left = locks_left(root, now=host.clock())
    if not left:
        yield Diagnosis("extension locks", OK, f"no abandoned lock in {root}")
    needed = "no lock of a build that was killed: the next build of that extension would wait forever"
    for lock in left:
        state, who = MISSING, "if no other process builds it, "
        if lock.is_stale:
            state, who = WARNING, "det-ds run and the start-up hook remove it; or "
        yield Diagnosis("extension locks", state, f"{lock.path}: {lock.why}", needed, f"{who}rm {lock.path}")
