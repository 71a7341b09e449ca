"""Where the time of a training step goes, read from the traces of its ranks; loads no torch.

``trace_file.py`` reads a trace, ``step_parts.py`` holds what is found.
"""
