"""What a Determined master accepts and would draw: CONFIG -> Document -> Experiment -> one point of its space.

Pure: no torch, deepspeed or determined in here.
"""
