"""torch.compile of a patched model with trees of segments: one graph for all of them, without a graph break."""

import random

import pytest
import stand_in_aten
import torch
from compiled import assert_like_eager
from tree_cases import a_tree, tree_batch

import fa2patch
from compat_matrix import tiny_models
from fa2patch.kernels import reference

pytestmark = pytest.mark.skipif(reference.operator is None, reason=f"torch {torch.__version__} has no custom_op")


def patched(family):
    model = tiny_models.build(family, "eager")
    patch = fa2patch.apply(model)
    if {layer.seam for layer in patch.layers} != {"interface"}:
        pytest.skip(f"{family} is not on the interface seam of this Transformers")
    return model


def trees(count):
    drawn = random.Random(0)
    made = [a_tree(drawn) for _ in range(count * 3)]
    return [tree for tree in made if len(tree[0]) >= 2 and sum(tree[0]) > 2][:count]


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_twelve_trees_make_two_graphs_without_a_break(graphs, family):
    seen, backend = graphs
    model = patched(family)
    compiled = torch.compile(model, backend=backend, fullgraph=True)
    for lengths, parents in trees(12):
        given = dict(tree_batch(lengths, parents, labels=True), use_cache=False)
        assert_like_eager(compiled, model, given)
    assert len(seen) <= 2, "the first tree, and one graph for all others"


@pytest.mark.slow
@pytest.mark.parametrize("fullgraph", [True, False])
def test_keys_are_gathered_without_a_break(graphs, fullgraph):
    seen, backend = graphs
    with stand_in_aten.installed():
        model = patched("llama")
        compiled = torch.compile(model, backend=backend, fullgraph=fullgraph)
        for lengths, parents in trees(6):
            assert_like_eager(compiled, model, dict(tree_batch(lengths, parents, labels=True), use_cache=False))
    assert len(seen) <= 2, "the first tree, and one graph for all others"


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_torch_varlen_in_a_graph_gets_gathered_keys(backend):
    torch._dynamo.reset()
    with stand_in_aten.installed():
        model = patched("llama")
        compiled = torch.compile(model, backend=backend, fullgraph=True)
        for lengths, parents in trees(4):
            given = dict(tree_batch(lengths, parents), use_cache=False)
            found, expected = compiled(**given).logits, model(**given).logits
            torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
            weight = model.get_input_embeddings().weight
            one, other = (torch.autograd.grad(logits.square().sum(), weight)[0] for logits in (found, expected))
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)
    torch._dynamo.reset()


@pytest.mark.parametrize(
    ("spoilt", "message"),
    [
        ({"segment_parents": torch.tensor([-1, 0, 2], dtype=torch.int32)}, "the number of an earlier one"),
        pytest.param({"position_ids": torch.arange(15)[None]}, "do not go on", marks=pytest.mark.slow),
        pytest.param({"labels": torch.ones(1, 15, dtype=torch.int64)}, "has a label", marks=pytest.mark.slow),
    ],
    ids=["parents", "ids", "labels"],
)
def test_a_bad_tree_raises_inside_a_graph_too(graphs, spoilt, message):
    _, backend = graphs
    compiled = torch.compile(patched("llama"), backend=backend, fullgraph=True)
    given = dict(tree_batch([4, 6, 5], [-1, 0, 0], labels=True), use_cache=False)
    compiled(**given)
    with pytest.raises(RuntimeError, match=message):
        compiled(**{**given, **spoilt})
