"""``det-ds run --storage``: checkpoints go to the experiment's ``checkpoint_storage``, by Determined's managers.

The run directory has an index of each, with all that is read before anything is fetched::

    checkpoints/<uuid>/stored.json        the type of storage, and how many ranks wrote it
                       metadata.json  trial_state.json  load_data.json        as in the checkpoint itself
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from determined import core
from determined.common import storage

from determined_ds.errors import ConfigError, Problem
from determined_ds.protocol.checkpoint_files import INDEX, METADATA, PARTIAL, metadata_text, sync_to_disk
from determined_ds.protocol.links import Links
from determined_ds.protocol.metrics_file import put_on_disk
from determined_ds.protocol.run_dir import RunDir

KEY = "checkpoint_storage"


class StoredElsewhere(core.DummyCheckpointContext):
    """Determined's checkpoint context without a master, over any of its storages.

    Args:
        distributed: The ranks.
        config: ``checkpoint_storage``.
        run_dir: Where the indexes go.
        links: Of the run directory.

    Raises:
        ConfigError: a small object cannot be written there and read back.
    """

    def __init__(
        self, distributed: core.DistributedContext, config: Mapping[str, Any], run_dir: Path, links: Links
    ) -> None:
        try:
            manager = storage.build(dict(config), container_path=None)
            if distributed.rank == 0:
                storage.validate_manager(manager)
        except Exception as error:  # whatever the client of a storage raises
            message = f"nothing can be written there and read back: {type(error).__name__}: {error}"
            fix = "check its address, bucket and credentials; or run without --storage"
            problem = Problem(key=KEY, value=config.get("type"), message=message, fix=fix, code="storage")
            raise ConfigError(problem) from error
        super().__init__(distributed, manager)
        self.config = dict(config)
        self._run_dir = RunDir(run_dir)
        self._links = links
        self._about = {"type": config.get("type"), "ranks": distributed.size}

    def enter(self, uuid: str, metadata: Mapping[str, Any], files: Mapping[str, str]) -> None:
        """Write the index of a stored checkpoint; on rank 0.

        Args:
            uuid: Of the checkpoint.
            metadata: Of the checkpoint.
            files: Name -> text of its files that are read before the rest is fetched.
        """
        put_on_disk(self._run_dir.metrics)
        folder = self._run_dir.checkpoints
        aside = folder / f".{uuid}{PARTIAL}"
        aside.mkdir(parents=True)
        texts = {**files, METADATA: metadata_text(metadata), INDEX: json.dumps(self._about) + "\n"}
        for name, text in texts.items():
            (aside / name).write_text(text)
        sync_to_disk(aside)
        os.rename(aside, folder / uuid)
        self._links.update()

    def has(self, uuid: str) -> bool:
        """Whether a checkpoint is one of this run."""
        return (self._run_dir.checkpoints / uuid).is_dir()

    def delete(self, storage_id: str) -> None:
        shutil.rmtree(self._run_dir.checkpoints / storage_id, ignore_errors=True)
        self._links.update()
        super().delete(storage_id)
