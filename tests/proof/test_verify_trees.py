"""``fa2patch.verify`` of segments with parents: branches see their path, all of it, and nothing else."""

import json
from dataclasses import replace

import pytest
import torch
from packed_rows import built
from tree_cases import rows_of_segments
from two_layers import tiny_llama
from unknown_modules import Around, behind_the_mlp

import fa2patch
from fa2patch import errors
from fa2patch.documents.boundaries import Boundaries
from fa2patch.kernels.reference import Reference
from fa2patch.upstream import labels
from fa2patch.upstream.splitting import Documents

# Three trees in a row: one of depth 3 with a segment of one token, one with a single branch, a root alone.
NESTED = [(9, -1), (5, 0), (1, 0), (4, 2), (7, 0), (6, -1), (3, 5), (2, -1)]

BATCHES = {
    "several trees": rows_of_segments(NESTED),
    "two rows": rows_of_segments([(4, -1), (3, 0), (2, 0)], [(1, -1), (1, 0), (5, 1), (2, 1)]),
    "chain": rows_of_segments([(4, -1), (3, 0), (2, 1)]),
}


def patched_of(family, **changes):
    model = built(family, **changes)
    fa2patch.apply(model)
    return model


@pytest.mark.parametrize("batch", BATCHES.values(), ids=BATCHES)
@pytest.mark.parametrize("family", ["llama", "gemma2", "jamba", "qwen3_next", "qwen2_moe"])
def test_a_tree_is_isolated(family, batch):
    changes = {"sliding_window": 5, "attn_logit_softcapping": 2.0} if family == "gemma2" else {}
    found = fa2patch.verify(patched_of(family, **changes), batch=batch)
    assert found.ok and found.patched and not found.reason
    assert all(one.moved <= found.moved_bound and one.gradient == 0 for one in found.documents)
    assert all(one.distance < 1e-5 for one in found.documents)


def test_segments_are_described_by_the_numbers_that_are_printed(patched):
    # Empty segments are nobody's parent, and have no number.
    batch = rows_of_segments([(0, -1), (2, -1), (0, -1), (3, 1), (4, 3), (0, -1)])
    found = fa2patch.verify(patched, batch=batch)
    assert [(one.length, one.parent) for one in found.documents] == [(2, None), (3, 1), (4, 2)]
    first, *lines = str(found).splitlines()
    assert first == "isolated: 3 segments"
    assert lines[2].startswith("  segment 3 (row 0, token 5, 4 long, continues 2): changed by others 0.0e+00, gradient")
    assert [one["parent"] for one in json.loads(json.dumps(found.to_dict()))["documents"]] == [None, 1, 2]


def test_a_batch_without_parents_holds_documents(patched):
    found = fa2patch.verify(patched, batch=rows_of_segments([(4, -1), (3, -1)]))
    assert [one.parent for one in found.documents] == [None, None]
    assert str(found).startswith("isolated: 2 documents\n  document 1 (row 0, token 0, 4 long): changed by others 0.0")


def test_position_ids_on_several_axes_are_gathered_along_the_path():
    batch = BATCHES["several trees"]
    found = fa2patch.verify(
        patched_of("qwen2_vl"), batch={**batch, "position_ids": batch["position_ids"].repeat(3, 1, 1)}
    )
    assert found.ok and all(one.distance < 1e-5 for one in found.documents)


def test_a_segment_out_of_its_windows_reach_is_no_finding():
    # Two layers with a window of 3 see four tokens back: the last segment does not depend on the first one.
    model = patched_of("mistral", sliding_window=3)
    batch = rows_of_segments([(4, -1), (9, 0), (3, 1), (2, 1)])
    logits = model(**batch).logits
    other = batch["input_ids"].clone()
    other[0, 0] += 1
    assert torch.equal(model(**{**batch, "input_ids": other}).logits[0, 13:], logits[0, 13:])
    assert fa2patch.verify(model, batch=batch).ok


def test_work_is_bounded(patched):
    calls = []
    patched.register_forward_hook(lambda *args: calls.append(1))
    found = fa2patch.verify(patched, batch=BATCHES["several trees"], max_documents=2)
    assert len(calls) == 1 + 2 * 2
    assert [one.gradient is not None for one in found.documents] == [True] + [False] * 6 + [True]


# Leaks, and what is not shared


def with_parents(monkeypatch, parents):
    # Attention follows other parents than those of the batch.
    attend = Reference.attend

    def attend_wrongly(self, q, k, v, boundaries, *more):
        if boundaries.parents is not None:  # a path alone has none
            changed = None if parents is None else torch.tensor(parents, dtype=torch.int32)
            boundaries = replace(boundaries, parents=changed, made={})
        return attend(self, q, k, v, boundaries, *more)

    monkeypatch.setattr(Reference, "attend", attend_wrongly)


TREE = rows_of_segments([(4, -1), (3, 0), (5, 0), (2, 2)])
MEANING = "its attention does not follow segment_parents; its kernel is wrong, or something has replaced it"


@pytest.mark.parametrize(
    "parents, reason",
    [
        ((-1, 0, 1, 2), "the outputs of segment 3 depend on segment 2, which it does not continue"),
        (None, "segment 2 does not depend on its parent, segment 1"),
        ((-1, 0, -1, 2), "segment 3 does not depend on its parent, segment 1"),
        ((-1, 0, 0, 0), "segment 4 does not depend on its parent, segment 3"),
    ],
    ids=["a branch sees its sibling", "no parents", "a parent is dropped", "a parent is passed over"],
)
def test_attention_that_does_not_follow_the_parents_is_named(patched, monkeypatch, parents, reason):
    assert fa2patch.verify(patched, batch=TREE).ok
    with_parents(monkeypatch, parents)
    found = fa2patch.verify(patched, batch=TREE, strict=False)
    where = f"First in model.layers.0.self_attn ({found.leak_class}): {MEANING}"
    assert not found.ok and found.reason == f"{reason}. {where}"
    with pytest.raises(errors.PackingNotIsolated, match="NOT ISOLATED: 4 segments"):
        fa2patch.verify(patched, batch=TREE)


def test_who_saw_its_sibling_is_in_the_result(patched, monkeypatch):
    with_parents(monkeypatch, (-1, 0, 1, 2))
    found = fa2patch.verify(patched, batch=TREE, strict=False)
    assert [one.moved_by for one in found.documents] == [None, None, 2, 2]
    assert [one.moved > 0.01 for one in found.documents] == [False, False, True, True]
    assert [one.gradient > 0.01 for one in found.documents] == [False, False, True, True]


@pytest.mark.parametrize("way", ["both", "values", "gradients"])
def test_a_module_that_mixes_along_the_row_is_named(patched, way):
    # The module adds up the row's tokens, with the gradient, without it, or with nothing but the gradient.

    def along_the_row(self, states):
        before = states.cumsum(1) / states.shape[1]
        return states + {"both": before, "values": before.detach(), "gradients": before - before.detach()}[way]

    behind_the_mlp(patched, Around(None, along_the_row), 1)
    found = fa2patch.verify(patched, batch=TREE, strict=False)
    assert not found.ok
    if way == "gradients":
        assert "the outputs of segment 3 send gradients into another segment, which it does not" in found.reason
        assert all(one.moved == 0 for one in found.documents)
    else:
        assert found.first_leak == "model.layers.1.mlp.1"
        assert "what it returns for a segment does not come from its path alone" in found.reason


@pytest.mark.parametrize("wrongly", ["the row", "each segment"])
def test_a_mixer_that_does_not_follow_paths_is_named(monkeypatch, wrongly):
    # A hybrid's mixers are called with something else than each path.
    made = Documents.__init__

    def make(self, boundaries, shape):
        if boundaries.parents is not None:
            tokens = shape[0] * shape[1]
            whole = Boundaries(torch.tensor([0, tokens]), tokens, None, (tokens,))
            boundaries = whole if wrongly == "the row" else replace(boundaries, parents=None, made={})
        made(self, boundaries, shape)

    monkeypatch.setattr(Documents, "__init__", make)
    found = fa2patch.verify(patched_of("jamba"), batch=TREE, strict=False)
    assert not found.ok and found.first_leak.startswith("model.layers.0")  # in 4.43.4 the layer around the mixer
    leak, alone = "depend on segment 2, which it does not continue", "is not computed as when its path is alone"
    assert (leak if wrongly == "the row" else alone) in found.reason
    assert "carries state along the row, not along each path: this is a hybrid model" in found.reason


def test_a_parent_that_gets_no_gradient_is_found(patched, monkeypatch):
    # The values are right, and only the gradient to the keys of parents is lost.
    from fa2patch.kernels import cascade

    if not cascade.CPU_FLASH:
        pytest.skip("this torch has no flash attention for CPUs")
    backward = cascade.CpuFlash.backward

    def without_parents(self, grad, q, k, v, output, lse, level, causal, *more):
        if causal:
            return backward(self, grad, q, k, v, output, lse, level, causal, *more)
        return tuple(torch.zeros_like(x) for x in (q, k, v))

    monkeypatch.setattr(cascade.CpuFlash, "backward", without_parents)
    found = fa2patch.verify(patched, batch=TREE, strict=False)
    assert not found.ok and found.reason.startswith("segment 2 sends no gradient to its parent, segment 1")
    assert all(one.moved == one.gradient == 0 and one.distance < 1e-5 for one in found.documents)


def test_positions_that_do_not_go_on_from_the_parent_are_found(patched):
    # The positions restart at every segment.

    def from_zero(self, states):
        lengths = (4, 3, 5, 2) if states.shape[1] == 14 else states.shape[1:2]
        return states + self.table(torch.cat([torch.arange(n) for n in lengths]))

    behind_the_mlp(patched, Around(None, from_zero, table=torch.nn.Embedding(64, 32)), 0)
    found = fa2patch.verify(patched, batch=TREE, strict=False)
    assert not found.ok and found.first_leak == "model.layers.0.mlp.1"
    assert "is not computed as when its path is alone (off by" in found.reason


# Labels


def labelled(**labels):
    # Labels of ``NESTED``: the tokens, and -100 at the first of every segment.
    batch = BATCHES["several trees"]
    made = batch["input_ids"].clone()
    made[0, batch["cu_seq_lens_q"][:-1].long()] = -100
    for name, label in labels.items():
        made[0, batch["cu_seq_lens_q"][int(name[1:]) - 1]] = label
    return {**batch, "labels": made}


def test_labels_of_trees(patched, monkeypatch):
    assert fa2patch.verify(patched, batch=labelled()).ok
    assert fa2patch.verify(patched, batch=labelled(s6=7)).ok  # a root's first label is masked
    with pytest.raises(errors.BadBatch, match="first token of a segment with a parent has a label"):
        fa2patch.verify(patched, batch=labelled(s2=7))
    monkeypatch.setattr(labels, "inside_documents", lambda given, *rest: given)
    found = fa2patch.verify(patched, batch=labelled(s6=7), strict=False)
    assert (
        "labels: the last token of segment 5 predicts the first of segment 6. Set the first label of every segment"
        in (found.reason)
    )


# Batches and models that cannot be verified


def test_an_unpatched_model_cannot_compute_a_tree():
    with pytest.raises(errors.PackingNotIsolated, match=r"LlamaForCausalLM is not patched.*fa2patch\.apply\(model\)"):
        fa2patch.verify(tiny_llama(), batch=TREE, strict=False)


@pytest.mark.parametrize(
    "changes, error, message",
    [
        ({"segment_parents": [-1, 0, 0, 2]}, errors.BadBatch, "expected an integer tensor .* found list"),
        ({"segment_parents": torch.tensor([-1.0, 0, 0, 2])}, errors.BadBatch, "found torch.float32"),
        ({"cu_seq_lens_q": None}, errors.BadBatch, "expected cu_seq_lens_q beside it"),
        ({"segment_parents": torch.tensor([-1, 0])}, errors.BadParents, "one integer for each of the 4 segments"),
        ({"segment_parents": torch.tensor([-1, 2, 0, 2])}, errors.BadParents, "the number of an earlier one"),
        ({"segment_parents": torch.tensor([-1, 0, 1, 2])}, errors.BadParents, "do not go on from its parent's"),
    ],
)
def test_parents_that_are_no_tree(patched, changes, error, message):
    with pytest.raises(error, match=message):
        fa2patch.verify(patched, batch={**TREE, **changes})


def test_a_root_without_company_is_nothing_to_verify(patched):
    with pytest.raises(errors.BadBatch, match="several documents"):
        fa2patch.verify(patched, batch=rows_of_segments([(4, -1)]))
