"""One point, decided before anything runs. Pure: no torch, deepspeed or determined in here.

The way of a value::

    hyperparameters (a document) and Where (context directory, slots, accelerator, machines)
         -> resolve(): the DeepSpeed JSON read (deepspeed/), overwritten and normalized, its keys judged (keys/)
         -> topology, batch -> every "auto" filled (autofill) -> the rules of the compatibility table (rules)
         -> ResolvedConfig: the mapping DeepSpeed gets, the origin of each value in it, and the Strategy in its parts
"""
