"""The panel of this library on a terminal, in place of the bars of transformers' Trainer."""

from __future__ import annotations

import transformers

from determined_ds.train.loop.chief_display import make_progress, shows_panel
from determined_ds.train.loop.progress import Progress
from determined_ds.train.scripts.given_run import ScriptRun


def panel_for_trainer(run: ScriptRun | None, *, is_chief: bool) -> Progress:
    """The display of a Trainer that is made after this: the panel on a terminal, else what transformers shows itself.

    A Trainer with ``disable_tqdm`` prints its logs, above the panel.

    Args:
        run: Of ``det-ds run``; None where it has not started this process.
        is_chief: Whether this is rank 0.
    """
    if run is None or run.measurement is not None or not (is_chief and shows_panel()):
        return Progress()
    # What Trainer adds where bars are not disabled; read by name when it is made (transformers 4.40 and 5).
    transformers.trainer.DEFAULT_PROGRESS_CALLBACK = transformers.TrainerCallback
    transformers.utils.logging.disable_progress_bar()  # of the files of a checkpoint
    return make_progress(is_chief, run.there.metrics)
