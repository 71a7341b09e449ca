"""One point, decided before anything runs. Pure: no torch, deepspeed or determined in here.

The way of a value::

    hyperparameters and DeepSpeed JSON (documents) -> normalized -> filled -> judged by the rules
         -> reconcile() -> ResolvedConfig: the mapping DeepSpeed gets, and the origin of each value in it
"""
