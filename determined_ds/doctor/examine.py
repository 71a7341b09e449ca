"""Every probe, one after the other."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from determined_ds.config.accelerator import Accelerator
from determined_ds.devices import GPU_NODES, ROCM_NODE, num_cores
from determined_ds.doctor.compilers import look_at_compilers
from determined_ds.doctor.disk import look_at_clock, look_at_disk
from determined_ds.doctor.extension_locks import locks_left, root_of_extensions
from determined_ds.doctor.finding import MISSING, OK, WARNING, Finding
from determined_ds.doctor.gpus import Driver, ask_driver, look_at_gpus
from determined_ds.doctor.imports import Torch, look_at_imports
from determined_ds.doctor.limits import look_at_memory, look_at_open_files, look_at_shared_memory
from determined_ds.doctor.machine import Machine
from determined_ds.doctor.needs import Needs, needs_of
from determined_ds.doctor.network import look_at_network
from determined_ds.doctor.storage import look_at_storage
from determined_ds.doctor.versions import look_at_versions


def examine(machine: Machine, config: Path | None, accelerator: str | None = None) -> list[Finding]:
    """Look at everything.

    Args:
        machine: What to look at; its ``working_dir`` is the context directory.
        config: What it is to run; None to look at the machine alone.
        accelerator: ``cpu``, ``cuda``, or None for the best there is.

    Raises:
        ConfigError: the configuration runs nowhere.
    """
    driver = ask_driver(machine)
    torch, imported = look_at_imports(machine)
    device = _accelerator(accelerator, driver, torch)
    needs = needs_of(config, machine.working_dir, device) if config is not None else Needs()
    machine = machine.with_variables(needs.variables)
    gpus = list(look_at_gpus(machine, driver, torch))
    if accelerator == "cpu":  # what hinders the GPUs does not hinder what was asked for
        gpus = [replace(each, state=WARNING) if each.state == MISSING else each for each in gpus]
    return [
        *look_at_versions(machine.working_dir),
        *imported,
        *gpus,
        *_findings(machine, torch, device, needs),
    ]


def _findings(machine: Machine, torch: Torch, device: Accelerator, needs: Needs) -> Iterator[Finding]:
    here = min(needs.slots, device.max_ranks)
    yield _slots(machine, device, needs.slots)
    is_rocm = bool(torch.hip) or (Path(ROCM_NODE).exists() and not Path(GPU_NODES[0]).exists())
    if not is_rocm:  # whose compiler is another
        has_gpus = device.name == "cuda"
        yield from look_at_compilers(machine, needs.tools, torch_cuda=torch.cuda, has_gpus=has_gpus)
    yield from _packages(needs)
    yield from _locks(machine)
    yield from look_at_network(machine)
    yield look_at_shared_memory(machine, ranks=here, workers=needs.workers)
    yield look_at_memory(ranks=here)
    yield look_at_open_files()
    yield look_at_disk(machine)
    yield look_at_clock(machine)
    storage = look_at_storage(machine, needs.storage)
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


def _slots(machine: Machine, device: Accelerator, slots: int) -> Finding:
    """Whether the ranks find a device each."""
    kind = "GPUs" if device.name == "cuda" else "CPU cores, four ranks on each at most"
    found = f"{device.num_devices} {kind}"
    needed = f"{slots} slots" if slots > 1 else "1 slot"
    if slots <= device.max_ranks:
        return Finding(name="slots", state=OK, found=found, needed=needed)
    if machine.in_task:  # others of the experiment's machines have the rest
        fix = "for this task alone: det cmd run --config resources.slots=N"
        return Finding(name="slots", state=WARNING, found=found, needed=needed, fix=fix)
    fewer = f"det-ds run --slots {device.max_ranks}, or several machines"
    fix = fewer if device.max_ranks else "use --accelerator cpu"
    return Finding(name="slots", state=MISSING, found=found, needed=needed, fix=fix)


def _packages(needs: Needs) -> Iterator[Finding]:
    for problem in needs.packages:
        yield Finding(
            name=f"package for {problem.key}",
            state=MISSING,
            found="not installed",
            needed=problem.message.partition(",")[0].removeprefix("needs "),
            fix=problem.fix,
        )


def _locks(machine: Machine) -> Iterator[Finding]:
    root = root_of_extensions(machine.environment)
    left = locks_left(root, now=machine.clock())
    if not left:
        yield Finding(name="extension locks", state=OK, found=f"none that nobody holds, in {root}")
    for lock in left:
        removes = (
            "det-ds run and the start-up hook remove it; or "
            if lock.is_stale
            else "if nobody else builds it, "
        )
        yield Finding(
            name="extension locks",
            state=WARNING if lock.is_stale else MISSING,
            found=f"{lock.path}: {lock.why}",
            needed="no lock of a build that was killed: whoever builds it next waits for ever",
            fix=f"{removes}rm {lock.path}",
        )
