"""What the two sides of a run agree on: the launcher and its ranks, this start and the next one, a run and its reader.

The run directory (:mod:`run_dir` names what lies in it), who may write it, how files in it are written and read; and
what a launcher hands to its ranks: variables, signals, signs of life. Loads no torch.
"""
