"""The space of a hyperparameter search, and every point of it judged.

The way of a value::

    hyperparameters -> SearchSpace (axes) -> Points (all, or corners and a sample, as the master draws them)
                    -> judge_points() -> verdicts -> reasons, with where they lie in the space
    the searcher's own section -> search_problems()
"""
