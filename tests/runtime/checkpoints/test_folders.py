"""Two machines, each of one rank, whose checkpoints go to one folder, or to two that look alike."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any
from unittest.mock import patch

from tests.ranks import Ranks


def joined_as_machines() -> Any:
    """In a rank: the ranks, each on a machine of its own."""
    from determined_ds.devices import detect_accelerator
    from determined_ds.runtime.group.distributed import join_process_group

    alone = {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    os.environ.update(alone, GROUP_RANK=os.environ["RANK"], GROUP_WORLD_SIZE=os.environ["WORLD_SIZE"])
    return join_process_group(detect_accelerator("cpu"))


def save_and_load(run_dir: str) -> tuple[list[str], list[str], str]:
    """In a rank: write a checkpoint and load it, again with a file changed.

    Returns:
        The files that this rank read to seal it, and to verify it; what it said of the change.
    """
    from determined import core
    from determined.common import storage

    from determined_ds import open_context
    from determined_ds.errors import CheckpointError
    from determined_ds.protocol import checkpoint_files
    from determined_ds.runtime.checkpoints import folders
    from determined_ds.runtime.checkpoints import saving as checkpoint
    from determined_ds.runtime.checkpoints.trial_state import TrialState
    from tests.runtime.victim import Victim

    read: list[str] = []
    fingerprint = checkpoint_files.fingerprint

    def noted(file: Path, **options: Any) -> dict[str, Any]:
        read.append(file.name)
        return fingerprint(file, **options)

    ds_config = {
        "zero_optimization": {"stage": 1},
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01, "torch_adam": True}},
    }
    hparams = {"global_batch_size": 8, "deepspeed_config": ds_config}
    distributed = joined_as_machines()
    with (
        patch.object(folders, "fingerprint", noted),
        patch.object(checkpoint_files, "fingerprint", noted),
        open_context(hparams=hparams, run_dir=run_dir, distributed=distributed) as context,
    ):
        manager = storage.SharedFSStorageManager(str(Path(run_dir, "shared")))
        context._core.checkpoint = core.DummyCheckpointContext(context.distributed, manager)
        checkpoints = checkpoint.Checkpoints(Victim(context), context, {}, {})
        context._current_batch_idx = 3
        uuid = checkpoints.save(TrialState(batches_trained=4))
        sealed = list(read)
        read.clear()
        checkpoints.load(uuid, trial_id=0)
        verified = list(read)
        distributed.allgather(None)
        if distributed.rank == 0:
            changed = Path(run_dir, "shared", uuid, "load_data.json")
            changed.write_bytes(changed.read_bytes().replace(b":", b";"))
        distributed.allgather(None)
        try:
            checkpoints.load(uuid, trial_id=0)
            said = ""
        except CheckpointError as error:
            said = str(error)
    return sealed, verified, said


def test_on_shared_storage_each_file_is_read_once_for_all_machines(two_ranks: Ranks, tmp_path: Path) -> None:
    told = two_ranks.run(save_and_load, str(tmp_path))
    for index, least in enumerate((3, 6)):  # what a rank writes itself it knows
        names = [name for each in told for name in each[index]]
        assert len(names) == len(set(names)) >= least
        assert all(each[index] for each in told), "both machines read"
    assert all("load_data.json is not what was written" in said for *_, said in told)


def folders_apart(folder: str, alike: bool) -> tuple[list[str], bool, int]:
    """In a rank: a folder of its own, which looks like the other machine's until it is made anew.

    Returns:
        What is in it, whether it has another inode than before, and how many groups this rank made.
    """
    import torch.distributed as dist

    from determined_ds.runtime.checkpoints import folders

    with patch.object(dist, "new_group", wraps=dist.new_group) as new_group:
        distributed = joined_as_machines()
    own = Path(folder, os.environ["RANK"], "checkpoint")
    (own / "model0").mkdir(parents=True)
    (own / "model0" / "part").write_text(os.environ["RANK"])
    before, identity = own.stat().st_ino, folders._identity

    def looks(path: Path) -> tuple[int, int]:
        return (1, 1) if alike and identity(path)[1] == before else identity(path)

    with patch.object(folders, "_identity", looks):
        folders.keep_apart(own, distributed)
    assert not folders.is_shared(own / "model0" / "part", distributed)
    there = [f"{file.relative_to(own)} {file.read_text()}" for file in own.rglob("part")]
    return there, own.stat().st_ino != before, new_group.call_count


def test_folders_that_look_alike_are_told_apart(two_ranks: Ranks, tmp_path: Path) -> None:
    """Determined would upload the first machine's part alone."""
    for alike in (True, False):
        (first, first_anew, _), (second, second_anew, _) = two_ranks.run(
            folders_apart, str(tmp_path / str(alike)), alike
        )
        assert (first, second) == (["model0/part 0"], ["model0/part 1"])
        assert (first_anew, second_anew) == (False, alike)


def test_a_rank_makes_the_group_of_its_own_machine_alone(two_ranks: Ranks, tmp_path: Path) -> None:
    """One group of all, and one of the machine: for another machine's, NCCL would have to take part."""
    assert [groups for *_, groups in two_ranks.run(folders_apart, str(tmp_path), False)] == [2, 2]
