"""What the two sides of a run agree on: the launcher and its ranks, one launch and the next, a run and its reader.

:mod:`run_dir` names what lies in a run directory; the other modules read and write it, or hold what a launcher and its
ranks exchange: variables, signals, signs of life, failures. Loads no torch.
"""
