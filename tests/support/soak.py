"""Long campaigns: `make soak` runs every case, `make test` a short version of each."""

import os
from typing import Any

import pytest

SOAK = bool(os.environ.get("CLICKFLEET_SOAK"))
"""Whether this is `make soak`."""


in_soak = pytest.mark.skipif(not SOAK, reason="a long one beside shorter tests of the same: runs in make soak")
"""Marks a test that only `make soak` runs."""


def only_in_soak(*values: Any) -> Any:
    """Return a parameter that repeats another case in another mode, for `make soak`."""
    reason = "another mode of a case that runs here: runs in make soak"
    return pytest.param(*values, marks=pytest.mark.skipif(not SOAK, reason=reason))
