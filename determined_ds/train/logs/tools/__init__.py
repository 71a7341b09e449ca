"""The clients of the tools, each behind the same three calls. A client is loaded where its run begins."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from determined_ds.train.logs.messages import ShownRun
from determined_ds.train.logs.tool_thread import Tool
from determined_ds.train.logs.tools.mlflow_run import MlflowRun
from determined_ds.train.logs.tools.wandb_run import WandbRun

KINDS: dict[str, Callable[[ShownRun, Mapping[str, Any]], Tool]] = {
    "wandb": WandbRun,
    "mlflow": MlflowRun,
}


def make_tool(name: str, about: ShownRun) -> Tool:
    """The tool of a name, for a run."""
    return KINDS[name](about, about.tools[name])
