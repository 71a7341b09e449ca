"""Around the ranks: a run prepared in its directory, started, restarted, stopped, gone on with. Loads no torch.

``launch.deepspeed`` is a launcher that an entrypoint may name in place of Determined's.
"""
