"""What a Determined master accepts, and what it would draw: the experiment YAML, its search space, its searchers.

The way of a value::

    CONFIG, --set laid over it -> Document -> Experiment -> one point of its space -> ResolvedConfig

Pure: no torch, deepspeed or determined in here.
"""
