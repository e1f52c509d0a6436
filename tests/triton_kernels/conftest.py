"""Where the kernels run: on the GPU if there is one, in Triton's interpreter otherwise."""

import pytest
import torch


@pytest.fixture
def device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"
