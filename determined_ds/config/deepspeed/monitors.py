"""DeepSpeed's own monitors of a team's tools, beside ``hyperparameters.logging``."""

from __future__ import annotations

from collections.abc import Container

from determined_ds.config.loggers import LOGGING, TOOLS
from determined_ds.documents.document import Document
from determined_ds.errors import Problem

# Sections whose tools a run can be reported to. What `tensorboard` and `csv_monitor` write lies in the run's folder.
# Source: deepspeed 0.19.8 monitor/{wandb,comet}.py: each start of the ranks opens a run, whose steps are samples.
SECTIONS = {"wandb": "wandb", "comet": "comet"}
API_KEY = ("comet", "api_key")


def monitor_problems(ds: Document, tools: Container[str]) -> tuple[list[Problem], list[Problem]]:
    """What is wrong with the monitors of a DeepSpeed JSON, and what is better said otherwise.

    Args:
        ds: The JSON.
        tools: Those of ``hyperparameters.logging``.
    """
    refused, warned = [], []
    if ds.get(API_KEY) is not None:
        message = "is a secret, which would be written to the run's files"
        fix = "remove it, and set COMET_API_KEY in the environment; a key that others have seen should be revoked"
        refused.append(ds.problem(API_KEY, message, fix, "logger-secret", value="***"))
    for section, tool in SECTIONS.items():
        path = (section, "enabled")
        if ds.get(path) is not True:
            continue
        title = TOOLS[tool].title
        if tool in tools:
            message = (
                f"hyperparameters.{LOGGING}.{tool} reports the run to {title} too: it would be there twice"
            )
            refused.append(ds.problem(path, message, f"remove the section {section}", "reported-twice"))
        else:
            message = (
                f"has DeepSpeed open a run of its own in {title} at every start, without validations, whose steps "
                "are samples"
            )
            fix = f"write hyperparameters.{LOGGING}: {{{tool}: {{}}}} instead, which continues one run"
            warned.append(ds.problem(path, message, fix, "monitor"))
    return refused, warned
