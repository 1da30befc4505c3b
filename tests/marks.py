"""Which cases of a test are run by default."""

import pytest


def slow_but(kept, names):
    """Parameters of a test, marked `slow` unless they are among those kept: each takes ten seconds
    and more to compile."""
    return [name if name in kept else pytest.param(name, marks=pytest.mark.slow) for name in names]
