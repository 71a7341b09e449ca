"""Every point of a search space judged.

The way of a value::

    Points -> judge_points() -> verdicts -> reasons, with where they lie in the space
    the searcher's own section -> search_problems()
"""
