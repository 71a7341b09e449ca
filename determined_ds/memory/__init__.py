"""Bytes that training will take: pure arithmetic over the sizes of a model and a strategy.

The way of the data::

    sizes as typed, or counted on a built model -> ModelShape                              model.py
    ModelShape, Strategy -> bytes of a rank: states, activations, buffers                  rank.py, parts.py
    those bytes, the memory of a GPU -> what fits, with which micro-batch                  fitting.py
    a model, GPUs, a batch -> candidates -> the first that fits -> an experiment's files   plan.py
"""
