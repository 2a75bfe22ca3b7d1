import os

import pytest
from hypothesis import HealthCheck, settings

settings.register_profile("quick", max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("soak", max_examples=2000, deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("soak" if os.environ.get("CLICKFLEET_SOAK") else "quick")


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> None:
    """One thread for torch: the inputs are tiny, and waiting for a second thread is all that two would do."""
    import torch

    torch.set_num_threads(1)
