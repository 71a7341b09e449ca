"""Hypothesis for the pure rooms: the same examples each time, and no limit on the time of one."""

from hypothesis import HealthCheck, settings

settings.register_profile(
    "pure",
    deadline=None,
    derandomize=True,
    max_examples=100,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
settings.load_profile("pure")
