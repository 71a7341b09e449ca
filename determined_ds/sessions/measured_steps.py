"""The loop of a script that is measured: the script is ended after the last step that is."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from determined_ds.sessions.stepped_loop import ScriptState, ScriptTrial, SteppedLoop
from determined_ds.train.loop.measured_loop import Measuring, check_strategy
from determined_ds.train.loop.step_measure import keep_row
from determined_ds.train.scripts.given_run import ScriptRun


class MeasuredSteps(Measuring, SteppedLoop):
    """Measures the steps that a script takes. What the script validates is neither timed nor reported.

    Args:
        trial: Stands for the script.
        context: Its context.
        state: As of :class:`SteppedLoop`.
        run: Of the script, with a ``measurement``.

    Raises:
        ConfigError: the script has made its engines of another strategy than the configuration has.
    """

    ends_script = True

    def __init__(self, trial: ScriptTrial, context: Any, state: ScriptState, run: ScriptRun) -> None:
        assert run.measurement is not None
        fix = "initialize the engine with config=s.ds_config"
        check_strategy(context, made_by="the script", fix=fix)
        super().__init__(trial, context, state, length=run.measurement)
        self._run = run

    def pause(self) -> None:
        """What follows is not the step's, once an engine has stepped."""
        super().pause()
        if self.has_stepped:
            self._measure.stop()

    def report_validation(self, metrics: Mapping[str, Any], weight: float) -> None:
        """Not reported: what was measured is, in its place."""

    def end(self) -> None:
        """Write what was measured; a collective."""
        super().end()
        keep_row(self._run, self.measured(), is_chief=self._is_chief, was_stopped=self._is_stopped)
