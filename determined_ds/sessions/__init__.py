"""A plain DeepSpeed script that drives the training loop: ``with determined_ds.session(config) as s:``."""
