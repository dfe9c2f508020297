import pytest
import torch


@pytest.fixture
def graphs():
    """Give a list of graphs, and a backend that adds each graph to it and runs the graph unchanged."""
    torch._dynamo.reset()
    seen = []

    def backend(graph, inputs):
        seen.append(graph)
        return graph

    yield seen, backend
    torch._dynamo.reset()
