"""Unknown modules in batches of segments with parents: no branch may see its sibling, and no tree another one."""

import itertools
import random

import pytest
import torch
from small_models import llama, refusal, told
from tree_cases import rows_of_segments
from unknown_modules import MIXING, Around, harmless, wrapped_mlp

import fa2patch
from fa2patch.documents.trees import Tree
from fa2patch.patch import examining
from fa2patch.proof.inputs import exchanges

SIBLINGS = [(5, -1), (4, 0), (3, 0), (1, 0)]
CHAINS = [(5, -1), (4, 0), (3, -1), (2, 2)]
NESTED = [(5, -1), (4, 0), (3, 1), (2, 0), (1, -1), (2, 4)]
CPU = torch.device("cpu")


def shown_to(inner, token, first, last):
    # Shows one token of the row to the tokens from ``first`` to ``last``.

    def compute(self, hidden):
        hidden = hidden.clone()
        hidden[:, first:last] += 8 * hidden[:, token : token + 1]
        return self.inner(hidden)

    return Around(inner, compute)


def shows(token, first, last):
    model = llama()
    wrapped_mlp(model, lambda inner: shown_to(inner, token, first, last))
    fa2patch.apply(model)
    return model


@pytest.mark.parametrize("row", [SIBLINGS, CHAINS, NESTED], ids=["siblings", "trees", "nested"])
@pytest.mark.parametrize("mix", MIXING)
def test_a_module_that_mixes_is_named_on_the_first_tree(mix, row):
    model = llama()
    name = mix(model)
    with refusal(name.replace(".", r"\.")) as caught:
        fa2patch.apply(model)
        for _ in range(2):
            model(**rows_of_segments(row))
    if isinstance(caught.value, fa2patch.errors.PackingNotIsolated):
        assert "other tokens in some segments and what continues them, and other segments changed" in str(caught.value)


@pytest.mark.parametrize(
    "row, token, first, last",
    [
        (SIBLINGS, 5, 9, 12),
        (SIBLINGS, 9, 12, 13),
        (SIBLINGS, 5, 0, 5),
        (CHAINS, 0, 9, 14),
        (CHAINS, 9, 0, 5),
        (NESTED, 5, 12, 14),
        (NESTED, 9, 5, 9),
        (NESTED, 12, 9, 12),
        (NESTED, 14, 12, 14),
    ],
    ids=[
        "a sibling", "a sibling of one token", "the parent", "another tree", "the tree before", "an inner sibling",
        "an inner parent", "a nephew", "another tree's leaf",
    ],
)  # fmt: skip
def test_a_module_that_shows_one_token_to_one_segment_is_named(row, token, first, last):
    with pytest.raises(fa2patch.errors.PackingNotIsolated, match=r"first in layers\.1\.mlp"):
        shows(token, first, last)(**rows_of_segments(row))


@pytest.mark.parametrize("row, token, first, last", [(SIBLINGS, 0, 5, 13), (NESTED, 5, 9, 12)])
def test_a_module_that_shows_a_parent_to_what_continues_it_is_no_leak(row, token, first, last):
    assert torch.isfinite(shows(token, first, last)(**rows_of_segments(row)).logits).all()


def test_a_module_that_shows_a_parent_by_its_place_in_the_row_is_not_as_alone():
    # The second chain alone has other tokens at these places.
    with pytest.raises(fa2patch.errors.PackingNotIsolated, match="than in a row of its own"):
        shows(9, 12, 14)(**rows_of_segments(CHAINS))


@pytest.mark.parametrize("row", [SIBLINGS, CHAINS, NESTED, [(3, -1), (2, 0)]])
def test_what_is_proven_harmless_is_computed(row):
    model = llama()
    wrapped_mlp(model, harmless)
    fa2patch.apply(model)
    for _ in range(2):
        assert torch.isfinite(model(**rows_of_segments(row)).logits).all()
    assert fa2patch.verify(model, batch=rows_of_segments(row)).ok


def along_trees(inner):
    # The module knows where position ids are 0 and adds up from there: documents are apart, and branches are not.

    def compute(self, hidden):
        ends = [*self.starts[1:], hidden.shape[1]]
        return self.inner(torch.cat([hidden[:, a:b].cumsum(1) / 8 for a, b in zip(self.starts, ends)], 1))

    return Around(inner, compute, starts=[])


def test_the_first_tree_is_proven_also_after_a_batch_of_documents():
    model = llama()
    wrapped_mlp(model, along_trees)
    mlp = model.model.layers[1].mlp
    model.register_forward_pre_hook(
        lambda module, args, kwargs: setattr(mlp, "starts", (kwargs["position_ids"][0] == 0).nonzero()[:, 0].tolist()),
        with_kwargs=True,
    )
    fa2patch.apply(model)
    for batch in (told(way="all lengths"), rows_of_segments(CHAINS)):
        assert torch.isfinite(model(**batch).logits).all()
    for _ in range(2):
        with pytest.raises(fa2patch.errors.PackingNotIsolated, match=r"first in layers\.1\.mlp"):
            model(**rows_of_segments(NESTED))
    assert torch.isfinite(model(**told(way="all lengths")).logits).all()


def test_one_document_in_segments_proves_nothing_about_others():
    model = llama()
    name = wrapped_mlp(model)
    fa2patch.apply(model)
    model(**rows_of_segments([(4, -1), (3, 0), (2, 1)]))  # a sum along one document is no leak
    with pytest.raises(fa2patch.errors.PackingNotIsolated, match=name.replace(".", r"\.")):
        model(**told(way="all lengths"))


def test_a_compiled_tree_is_proven_on_an_example():
    torch._dynamo.reset()
    model = llama()
    wrapped_mlp(model, harmless)
    patch = fa2patch.apply(model)
    batch = rows_of_segments([(10, -1), (8, 0), (9, 0)])
    compiled = torch.compile(model, backend="eager")(**batch).logits
    assert {what for what, _ in patch.examination.proven} == {"documents", "branches"}
    assert torch.allclose(compiled, model(**batch).logits, atol=1e-4)


def test_the_example_of_a_tree_shows_a_leak_between_siblings():
    # The second document, or the first branch of the example's tree, is shown to the third.
    patch = fa2patch.status(shows(7, 19, 20))
    assert "in some segments" in examining._examined(patch.examination.number, True)
    assert "in some documents" in examining._examined(patch.examination.number, False)
    patch = fa2patch.status(shows(0, 19, 20))  # a token of the prompt, at a place that its path alone has not
    assert "in a row of its own" in examining._examined(patch.examination.number, True)


# The sets that are exchanged


def test_documents_are_exchanged_by_bits_and_the_first_alone_and_empty_ones_do_not_count():
    found = exchanges(Tree((2, 0, 3, 1), (-1,) * 4, CPU))
    sets = [tuple(at for at, chosen in zip("134", (one, *others)) if chosen) for one, _, *others in found]
    assert sets == [("1", "4"), ("3",), ("1", "3"), ("4",), ("1",)]
    assert len(exchanges(Tree((1,) * 2, (-1,) * 2, CPU))) == 2
    assert len(exchanges(Tree((1,) * 64, (-1,) * 64, CPU))) == 2 * 6 + 1


def test_a_prompt_is_exchanged_with_its_branches_and_branches_by_bits():
    found = exchanges(Tree((2, 1, 1, 1), (-1, 0, 0, 0), CPU))
    apart = [[1, 3], [2], [1, 2], [3]]
    assert found == [[at in chosen for at in range(4)] for chosen in apart]
    found = exchanges(Tree((2, 1, 3), (-1, 0, -1), CPU))
    assert found == [[True, True, False], [False, False, True], [False, True, False]]


@pytest.mark.parametrize("seed", range(50))
def test_any_two_siblings_are_kept_apart_and_descendants_go_along(seed):
    drawn = random.Random(seed)
    parents = [-1] + [drawn.randrange(-1, at) for at in range(1, drawn.randint(2, 20))]
    tree = Tree([drawn.randint(1, 3) for _ in parents], parents, CPU)
    sets = exchanges(tree)
    for chosen in sets:
        assert any(chosen) and not all(chosen)
        assert all(chosen[at] for at, parent in enumerate(parents) if parent >= 0 and chosen[parent])
    for parent in {*parents}:
        siblings = [at for at, one in enumerate(parents) if one == parent]
        for one, other in itertools.permutations(siblings, 2):
            assert any(chosen[one] and not chosen[other] for chosen in sets)
        if parent >= 0:
            assert all(any(chosen[at] and not chosen[parent] for chosen in sets) for at in siblings)
