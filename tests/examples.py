"""How many examples a property test tries: all in CI, a quarter of them every day."""

from hypothesis import settings

settings.register_profile("everyday", max_examples=25)  # tests/run.sh names it when nothing is selected


def scaled(examples: int) -> int:
    """Return so many, or the profile's share of them: 100, Hypothesis' own default, stands for all."""
    return examples * settings.default.max_examples // 100
