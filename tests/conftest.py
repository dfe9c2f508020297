import os

os.environ.update(HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false")

import pytest
import torch

pytest_plugins = ["fa2patch.testing"]


@pytest.fixture(autouse=True)
def deterministic():
    torch.manual_seed(0)
    torch.set_num_threads(1)
