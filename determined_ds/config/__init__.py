"""One point, decided before anything runs. Pure: no torch, deepspeed or determined in here.

The way of a value::

    hyperparameters (params, names) and Where (context directory, slots, accelerator, machines)
         -> resolve(): the DeepSpeed JSON read, overwritten (fill), judged and normalized (ds_schema, keys)
         -> topology, batch (layout) -> every "auto" filled (fill) -> the rules of the compatibility table (rules)
         -> ResolvedConfig: the mapping DeepSpeed gets, the origin of each value in it, and the Strategy in its parts
"""
