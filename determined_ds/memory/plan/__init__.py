"""The strategy for a model on given GPUs, with reasons. Pure: no torch, deepspeed or determined.

The way of a choice::

    flags -> PlanRequest (checked) -> Plan (the strategy, and why) -> the DeepSpeed JSON and the experiment YAML
"""
