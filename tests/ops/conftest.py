from collections.abc import Iterator

import pytest
import torch

THREADS = 2


@pytest.fixture(scope="package", autouse=True)
def threads() -> Iterator[None]:
    """Kernels divide large tensors among threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(THREADS)
    yield
    torch.set_num_threads(before)
