"""What this machine, or this task's container, can run, and what it lacks.

Nothing here loads torch, except a child process and a rank of ``--measure``: a broken torch is a finding too.
"""
