"""A tiny Llama with large weights, and the same one patched."""

import pytest
from two_layers import tiny_llama

import fa2patch


@pytest.fixture
def model():
    return tiny_llama()


@pytest.fixture
def patched(model):
    fa2patch.apply(model)
    return model
