"""One Hypothesis profile for all tests: machines differ in speed, so no example has a time limit."""

from hypothesis import HealthCheck, settings

settings.register_profile("repository", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("repository")
