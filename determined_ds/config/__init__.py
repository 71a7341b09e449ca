"""What will run, decided before anything runs. Pure: no torch, deepspeed or determined in here.

The way of a value::

    text -> Document (data, and where each value stands) -> Experiment (the YAML) / DeepSpeed JSON
         -> reconcile() -> ResolvedConfig: the mapping DeepSpeed gets, and the origin of each value in it
"""
