"""Settings every test runs under."""

from hypothesis import HealthCheck, settings

settings.register_profile(
    "minisgl", derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("minisgl")
