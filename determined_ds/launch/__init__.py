"""Around the ranks: a run is prepared in its directory, launched, watched, restarted, stopped, resumed. Loads no torch.

``launch.deepspeed`` is a launcher that an entrypoint may name in place of Determined's.
"""
