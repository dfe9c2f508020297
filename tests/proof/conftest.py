"""A tiny Llama with large weights, and the same one patched."""

import pytest

import fa2patch
from fa2patch.cli.diagnosis import tiny_llama


@pytest.fixture
def model():
    return tiny_llama()


@pytest.fixture
def patched(model):
    fa2patch.apply(model)
    return model
