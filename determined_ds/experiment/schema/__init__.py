"""Determined's experiment configuration, judged by its own schemas: what its master would say, before it is asked.

The schemas are those of 0.38.1; what newer masters take beyond them is in ``experiment/additions.py``.
"""

from __future__ import annotations

from determined_ds.documents.document import Document
from determined_ds.errors import Problem
from determined_ds.experiment.additions import OLDEST

__all__ = ["experiment_problems"]


def experiment_problems(document: Document, version: str = OLDEST) -> tuple[list[Problem], list[Problem]]:
    """(errors, warnings): what a Determined master would refuse, and what it takes but has deprecated.

    Nothing is judged that only a cluster knows. ``checkpoint_storage`` counts as completed by the cluster's own
    of the same type, so that a bucket or a path may be missing there.

    Args:
        document: The experiment configuration, as submitted.
        version: Of the master.

    Returns:
        Two lists of problems, each in the order of the file. At most twenty errors.
    """
    from determined_ds.experiment.schema.deprecations import deprecations
    from determined_ds.experiment.schema.problems import problems

    errors = problems(document, version)
    refused = [problem.key + "." for problem in errors]
    warnings = deprecations(document)
    return errors, [old for old in warnings if not any(key.startswith(old.key + ".") for key in refused)]
