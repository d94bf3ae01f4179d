"""What a property test tries: the same examples each time in CI, a quarter as many every day, and others each night.

No profile has a deadline, nor minds how long examples take to make: that says more of the machine than of the code.
"""

from hypothesis import HealthCheck, settings

EVERYDAY, NIGHTLY = "everyday", "nightly"
IN_CI = "ci"  # Hypothesis' own, which it loads where ``CI`` is set: derandomized

for name in ("default", IN_CI):
    settings.register_profile(
        name, settings.get_profile(name), deadline=None, suppress_health_check=[HealthCheck.too_slow]
    )
settings.register_profile(EVERYDAY, max_examples=25)  # tests/run.sh names it when nothing is selected
# tests/run.sh --all names it. What it finds is kept in .hypothesis and printed as a line that repeats it.
settings.register_profile(NIGHTLY, settings.get_profile("default"), print_blob=True)

# For a test whose examples may share what its fixtures have set up.
SHARING_FIXTURES = [HealthCheck.too_slow, HealthCheck.function_scoped_fixture]


def scaled(examples: int) -> int:
    """Return so many, or the profile's share of them: 100, Hypothesis' own default, stands for all."""
    return examples * settings.default.max_examples // 100
