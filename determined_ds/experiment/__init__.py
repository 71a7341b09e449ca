"""What a Determined master accepts, and what it would draw: the experiment YAML, its search space, its searchers.

The way of a value::

    CONFIG, CONTEXT_DIR -> Experiment -> one point of the space -> decide() -> ResolvedConfig

Pure: no torch, deepspeed or determined in here.
"""
