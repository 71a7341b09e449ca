"""What this machine, or this task's container, can run, and what it lacks.

A probe is one small function: it takes a :class:`~determined_ds.doctor.surroundings.Host` and what a configuration
needs, and returns diagnoses. Nothing here loads torch: a child process does, so that a broken one is a diagnosis too.
The start-up hook and ``det-ds run`` use the probes of :mod:`~determined_ds.doctor.before_ranks`.
"""
