"""``det-ds doctor`` as its users start it: on this machine, and on one where everything is broken."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.harness.command import DET_DS, ROOT, det_ds

BROKEN = """\
name: broken
entrypoint: python3 -m determined_ds.train model_defs.gpt2.trial:GPT2Trial
searcher: {name: single, metric: validation_loss}
resources: {slots_per_trial: 4096}
checkpoint_storage: {type: s3, bucket: b, endpoint_url: "http://127.0.0.1:9", access_key: a, secret_key: hush}
hyperparameters:
  global_batch_size: 4096
  num_workers: 3
  logging: {wandb: {}}
  fit: {max_length: {batches: 1}}
  deepspeed_config:
    type: const
    val:
      optimizer: {type: AdamW, params: {lr: 0.001, torch_adam: false}}
      zero_optimization: {stage: 1, offload_optimizer: {device: cpu}}
"""
# What Python runs at its start: the tests' own environment has the package.
WITHOUT_WANDB = """\
from importlib import util
found = util.find_spec
util.find_spec = lambda name, *more: None if name == "wandb" else found(name, *more)
"""
# What needs another name for /dev/shm: a mount that only this process and those that it starts see.
SMALL_SHARED_MEMORY = "mount -t tmpfs -o size=1m none /dev/shm && "
WIDE = {"COLUMNS": "1000", "CUDA_VISIBLE_DEVICES": ""}


def findings_of(done: subprocess.CompletedProcess[str]) -> tuple[dict[str, str], set[str]]:
    """The text of each finding, and the names of what is missing, which has a fix."""
    *lines, _ = done.stdout.splitlines()
    found, missing = dict[str, str](), set[str]()
    for block in re.split(r"\n(?! )", "\n".join(lines)):
        state, (name, text) = block[:9].strip(), re.split(r"  +", block[9:], maxsplit=1)
        found[name] = text
        missing |= {name} if state == "missing" else set()
        assert "fix: " in text or state != "missing", block
    return found, missing


def test_here_an_experiment_of_the_repository_can_run() -> None:
    done = det_ds("doctor", "experiments/gpt2/const.yaml", ".", env=WIDE)
    found, missing = findings_of(done)
    assert (done.returncode, missing, done.stderr) == (0, set(), ""), done.stdout
    assert {"python", "torch", "gpus", "slots", "c++", "nvcc", "network", "disk"} <= found.keys()
    assert "storage" not in found  # it is left to the cluster


def test_on_a_broken_machine_each_fault_is_named(tmp_path: Path) -> None:
    """A PATH without a compiler, a tiny /dev/shm, GPUs that torch does not see, another torch, no S3."""
    bins, site, home = tmp_path / "bin", tmp_path / "site", tmp_path / "home"
    bins.mkdir()
    for name in ("sh", "cat"):
        (bins / name).symlink_to(shutil.which(name) or name)
    (bins / "nvidia-smi").symlink_to(bins / "cat")  # there is a driver
    info = site / "torch-2.3.0a0+40ec155e58.dist-info"  # found before what is really there
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: torch\nVersion: 2.3.0a0+40ec155e58\n")
    (site / "determined").mkdir()
    (site / "determined/__init__.py").write_text("raise ImportError('no module named urllib3')\n")
    (site / "sitecustomize.py").write_text(WITHOUT_WANDB)
    config = tmp_path / "broken.yaml"
    config.write_text(BROKEN)
    words = [str(DET_DS), "doctor", str(config), str(ROOT)]
    mount = ["unshare", "--mount", "sh", "-c"]
    small = bool(shutil.which("unshare")) and not subprocess.call([*mount, f"{SMALL_SHARED_MEMORY}true"])
    if small:
        script = (
            f"PATH=/usr/sbin:/usr/bin:/sbin:/bin; {SMALL_SHARED_MEMORY}PATH={bins} exec {shlex.join(words)}"
        )
        words = [shutil.which("unshare") or "unshare", "--mount", "/bin/sh", "-c", script]
    environment = {"PATH": str(bins), "HOME": str(home), **WIDE, "CUDA_VISIBLE_DEVICES": "98,99"}
    environment["PYTHONPATH"] = os.pathsep.join([str(site), str(ROOT)])
    done = subprocess.run(words, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "hush" not in done.stdout + done.stderr
    found, missing = findings_of(done)
    expected = {"torch", "determined import", "gpus", "slots", "c++", "ninja", "storage"}
    expected.add("package for hyperparameters.logging.wandb")
    assert missing - {"disk", "shared memory"} == expected, done.stdout
    assert not small or "shared memory" in missing
    assert "needed: cpu_adam (zero_optimization.offload_optimizer)" in found["c++"]


@pytest.mark.long("real measurements")
def test_products_and_collectives_are_measured_between_two_ranks() -> None:
    done = det_ds("doctor", "--measure", env={"COLUMNS": "120"})
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("2 ranks on 1 machine, ")
    assert re.search(r"fp32 [\d,]+ GFLOP/s, bf16 [\d,]+ GFLOP/s", done.stdout)
    (_, ms), (_, speeds) = re.findall(r"(ms|GB/s of bus bandwidth) *\n[^\n]*\n *1 KiB +(.*)", done.stdout)
    # Of two ranks, and half of the bytes of a collective that each has a part of.
    for time_ms, speed, share in zip(
        map(float, ms.split()), speeds.split(), (1, 0.5, 0.5, 0.5, 1, 1), strict=True
    ):
        assert float(speed) == pytest.approx(share * 1024 / time_ms / 1e6, rel=0.02)
