"""One thread for torch: the inputs are tiny, and waiting for a second thread is all that two would do."""

import pytest


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> None:
    import torch

    torch.set_num_threads(1)
