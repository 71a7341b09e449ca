"""``hyperparameters.fit`` as the options of a session's loop."""

from __future__ import annotations

import logging
from typing import Any

from determined import pytorch

from determined_ds.train.loop.fit import fit_arguments, of_experiment
from determined_ds.train.loop.settings import LENGTHS, LoopOptions

logger = logging.getLogger("determined_ds")
# Where the configuration does not say it: as Trainer.fit has it.
DEFAULTS = {"reporting_period": pytorch.Batch(100)}


def loop_options(context: Any, *, test: bool, is_chief: bool) -> LoopOptions:
    """How the loop of a session trains.

    Args:
        context: Of the session.
        test: Whether one batch is trained and its checkpoint proved.
        is_chief: Whether this is rank 0, which warns.
    """
    arguments = fit_arguments(context.resolved.fit)
    lengths = {name: arguments.pop(name, DEFAULTS.get(name)) for name in LENGTHS}
    if test:
        lengths["max_length"] = pytorch.Batch(1)
    idle = [
        name
        for name in ("validation_period", "step_zero_validation")
        if arguments.get(name) or lengths.get(name)
    ]
    if idle and is_chief:
        logger.warning("warning: fit.%s: no effect in a session, whose script validates", ", fit.".join(idle))
    arguments["step_zero_validation"] = False
    if arguments.pop("profiling_enabled", False):
        context._core.profiler.on()
    return of_experiment(LoopOptions(lengths=lengths, test_mode=test, **arguments), context)
