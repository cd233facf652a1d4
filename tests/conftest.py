"""Hypothesis profiles: `default`, `ci` (when CI is set) and `thorough`; HYPOTHESIS_PROFILE chooses one by name."""

import os

from hypothesis import settings

# Threads of torch that wait for each other sleep, here and in every process that a test starts: where others compute,
# too, spinning makes a test of seconds one of a quarter of an hour.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

# Examples start servers and touch files, so no single one has a deadline: pytest's own timeout bounds the test.
settings.register_profile("default", deadline=None, derandomize=False, max_examples=60)
# The same examples on every run: a red CI means that the code changed, not the dice.
settings.register_profile("ci", deadline=None, derandomize=True, max_examples=60, print_blob=True)
settings.register_profile("thorough", deadline=None, derandomize=False, max_examples=500)

settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE") or ("ci" if os.environ.get("CI") else "default"))
