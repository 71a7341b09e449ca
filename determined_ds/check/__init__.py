"""Whether an experiment will run, over its whole search space, known before it is queued. Pure: loads no torch.

The way of a value::

    CONFIG -> Document -> what the master would reject (experiment.schema)
                       -> every point of the search space -> resolve() -> reasons, with their share of the space
    CONTEXT_DIR        -> the trial's file, its metrics, what would be sent
    all of it          -> Report: findings with their places, in a compiler's form or as JSON
"""
