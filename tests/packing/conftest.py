from __future__ import annotations

import pytest


@pytest.fixture
def process(monkeypatch):
    """Return a function that makes this process one of several, as torchrun does."""

    def become(processes, rank):
        monkeypatch.setenv("WORLD_SIZE", str(processes))
        monkeypatch.setenv("RANK", str(rank))

    return become
