"""The space of a hyperparameter search, and the points that a master would draw from it.

The way of a value::

    hyperparameters -> SearchSpace (axes) -> Points (all, or corners and a sample, as the master draws them)
"""
