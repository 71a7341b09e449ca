"""Hypothesis for the pure rooms: the same examples each time, and no limit on the time of one."""

from hypothesis import HealthCheck, settings

settings.register_profile(
    "pure",
    deadline=None,
    derandomize=False,
    max_examples=1000,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
settings.load_profile("pure")
