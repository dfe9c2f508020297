from __future__ import annotations

import pytest


@pytest.fixture
def process(monkeypatch):
    # torchrun makes a process one of several in this way.

    def become(processes, rank):
        monkeypatch.setenv("WORLD_SIZE", str(processes))
        monkeypatch.setenv("RANK", str(rank))

    return become
