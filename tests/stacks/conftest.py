import importlib.util

import pytest
from stage import Stage


@pytest.fixture(scope="session")
def stage():
    # SFTTrainer trains if TRL is installed, else Trainer.
    trl = importlib.util.find_spec("trl") is not None
    if trl:
        import datasets

        datasets.disable_progress_bars()
    return Stage(trl)
