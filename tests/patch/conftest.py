import pytest
import torch

from compat_matrix import tiny_models
from compat_matrix.check.rows import alone, documents


@pytest.fixture
def graphs():
    # The backend adds each graph to the list and runs it unchanged.
    torch._dynamo.reset()
    seen = []

    def backend(graph, inputs):
        seen.append(graph)
        return graph

    yield seen, backend
    torch._dynamo.reset()


@pytest.fixture
def model():
    return tiny_models.build("llama", "sdpa")


@pytest.fixture
def docs():
    return documents(5, 9, 1, 3)


@pytest.fixture
def expected(docs):
    return alone(tiny_models.build("llama", "eager"), docs)
