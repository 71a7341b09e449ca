"""One point, decided before anything runs; :mod:`determined_ds.config.resolve` has the way of a value.

Pure: no torch, deepspeed or determined in here.
"""
