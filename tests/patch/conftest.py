import pytest
import torch

from compat_matrix import tiny_models
from compat_matrix.check.rows import alone, documents


@pytest.fixture
def fresh_dynamo():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.fixture
def graphs(fresh_dynamo):
    # The backend adds each graph to the list and runs it unchanged.
    seen = []

    def backend(graph, inputs):
        seen.append(graph)
        return graph

    return seen, backend


@pytest.fixture
def model():
    return tiny_models.build("llama", "sdpa")


@pytest.fixture
def docs():
    return documents(5, 9, 1, 3)


@pytest.fixture
def expected(docs):
    return alone(tiny_models.build("llama", "eager"), docs)
