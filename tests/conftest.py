"""Settings every test shares: the Hypothesis profiles.

Under CI the examples are derived from each test's name, so a red run is red again on the next machine; elsewhere they
are random. No deadline in either: the suite asserts nothing about wall-clock time. Imports nothing heavy.
"""

from __future__ import annotations

import os

from hypothesis import settings

settings.register_profile("ci", derandomize=True, deadline=None, print_blob=True)
settings.register_profile("local", deadline=None)
settings.load_profile("ci" if os.environ.get("CI") else "local")
