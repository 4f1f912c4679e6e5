"""How many examples a property test tries; the same ones every time, on a loaded machine too."""

from hypothesis import HealthCheck, settings


def examples(count: int) -> settings:
    return settings(
        max_examples=count,
        deadline=None,
        derandomize=True,
        suppress_health_check=[HealthCheck.too_slow],
    )
