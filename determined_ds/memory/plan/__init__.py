"""What to run, chosen from what is known before there is a configuration. Pure: no torch, deepspeed or determined.

The way of a choice::

    flags -> Needs (what is asked) -> Plan (what was chosen, and why) -> the DeepSpeed JSON and the experiment YAML
"""
