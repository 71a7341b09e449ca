"""Where the time of a training step goes, read from the traces of its ranks; loads no torch.

``trace_file.py`` reads a trace, ``steps.py`` takes its steps apart, ``profile.py`` has what is found in all of them.
"""
