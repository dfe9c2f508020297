"""torch.compile of a patched model makes two graphs for all layouts and trees, without graph breaks."""

import contextlib
import random

import pytest
import stand_in_aten
import torch
from compiled import assert_like_eager, on_the_interface_seam
from packed_rows import assert_nothing_crosses
from tree_cases import a_tree, tree_batch

import fa2patch
from compat_matrix import tiny_models
from compat_matrix.check.rows import documents, pack
from fa2patch import _torch
from fa2patch._torch import HAS_OPERATORS
from fa2patch.documents.given_boundaries import from_cu_seqlens
from fa2patch.errors import BadCuSeqlens, PackingNotIsolated

pytestmark = [
    pytest.mark.skipif(not HAS_OPERATORS, reason=f"torch {torch.__version__} has no custom_op"),
    pytest.mark.usefixtures("fresh_dynamo"),
]

COLLATE = fa2patch.DataCollatorWithFlattening(return_flash_attn_kwargs=True)


def collated(docs):
    return dict(COLLATE([{"input_ids": doc.tolist()} for doc in docs]), use_cache=False)


def batch(*lengths):
    return collated(documents(*lengths))


def by_ids(docs):
    return {**pack(docs), "use_cache": False}


def without_labels(docs):
    return {name: value for name, value in collated(docs).items() if name != "labels"}


def layouts(count):
    drawn = random.Random(0)
    return [[drawn.randint(1, 12) for _ in range(drawn.randint(2, 9))] for _ in range(count)]


SAID = {
    "lengths": lambda lengths: batch(*lengths),
    "position ids alone": lambda lengths: without_lengths(*lengths),
}


@pytest.mark.parametrize(
    "family, said, fullgraph",
    [
        ("llama", "lengths", True),
        pytest.param("gemma2", "lengths", True, marks=pytest.mark.slow),
        *(
            pytest.param(family, "position ids alone", fullgraph, marks=pytest.mark.slow)
            for family in ("llama", "gemma2")
            for fullgraph in (True, False)
        ),
    ],
)
def test_layouts_make_two_graphs_without_a_break(graphs, family, said, fullgraph):
    seen, backend = graphs
    model = on_the_interface_seam(family)
    compiled = torch.compile(model, backend=backend, fullgraph=fullgraph)
    for lengths in layouts(20) if said == "lengths" else [*layouts(29), [9]]:
        assert_like_eager(compiled, model, SAID[said](lengths))
    assert len(seen) <= 2, "the first layout, and one graph for all others"


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(torch._dynamo.config, "allow_unspec_int_on_nn_module"), reason="ints are constants")
def test_a_second_model_is_compiled_where_dynamo_makes_symbols_of_ints():
    with torch._dynamo.config.patch(allow_unspec_int_on_nn_module=True):
        for _ in range(2):
            model = on_the_interface_seam("llama")
            assert_like_eager(torch.compile(model, backend="eager", fullgraph=True), model, batch(5, 1, 9))


@pytest.mark.slow
def test_the_kernel_in_the_graph_is_the_one_that_was_picked(graphs):
    seen, backend = graphs
    with stand_in_aten.installed() as calls:
        model = on_the_interface_seam("llama")
        compiled = torch.compile(model, backend=backend, fullgraph=True)
        expected = [model(**batch(*lengths)).logits for lengths in layouts(6)]
        calls.clear()
        found = [compiled(**batch(*lengths)).logits for lengths in layouts(6)]
        assert all(torch.equal(a, b) for a, b in zip(found, expected))
        assert len(seen) == 2
        assert [call["max"] for call in calls] == [max(each) for each in layouts(6) for _ in range(2)]
    assert any("_flash_attention_forward" in str(node.target) for node in seen[-1].graph.nodes)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["mistral", "gemma2", "gemma3", "gpt_oss"])
def test_a_row_of_one_document_between_packed_ones_of_a_model_with_a_window(family):
    # AOTAutograd reshapes an operator's results without a copy, as their fake ones say that it can.
    model = on_the_interface_seam(family, sliding_window=4)
    compiled = torch.compile(model, backend="aot_eager", dynamic=True)
    for lengths in ((7, 1, 12, 4), (24,), (5, 5, 5)):
        assert_like_eager(compiled, model, batch(*lengths))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("spoilt", "message"),
    [
        ({"cu_seq_lens_q": torch.tensor([0, 4, 10, 14], dtype=torch.int32)}, "must rise from 0"),
        ({"max_length_q": 5, "max_length_k": 5}, "hold a longer document"),
        ({"cu_seq_lens_q": torch.tensor([0, 10, 15], dtype=torch.int32), "max_length_q": 10}, "restart inside"),
    ],
    ids=["ends", "longest", "restart"],
)
def test_lengths_that_lie_raise_inside_a_graph_too(graphs, spoilt, message):
    _, backend = graphs
    model = on_the_interface_seam("llama")
    compiled = torch.compile(model, backend=backend, fullgraph=True)
    compiled(**batch(4, 6, 5))
    given = {**batch(4, 6, 5), **spoilt}
    given["cu_seq_lens_k"] = given["cu_seq_lens_q"]
    with pytest.raises(RuntimeError, match=message):
        compiled(**given)


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_lengths_that_fall_raise_inside_a_graph_too(backend):
    # The lengths are otherwise valid: ends, starts and the longest document are those of the batch.
    compiled = torch.compile(on_the_interface_seam("llama"), backend=backend, fullgraph=True)
    given = {**batch(4, 6, 5), "max_length_q": 15, "max_length_k": 15}
    compiled(**given)
    given["cu_seq_lens_q"] = given["cu_seq_lens_k"] = torch.tensor([0, 10, 4, 15], dtype=torch.int32)
    with pytest.raises(RuntimeError, match="must rise from 0"):
        compiled(**given)


def without_lengths(*lengths):
    return {name: value for name, value in batch(*lengths).items() if not name.startswith(("cu_", "max_"))}


@pytest.mark.slow
def test_the_kernel_in_a_graph_from_position_ids_alone_gets_the_longest_length(graphs):
    _, backend = graphs
    with stand_in_aten.installed() as calls:
        model = on_the_interface_seam("llama")
        compiled = torch.compile(model, backend=backend, fullgraph=True)
        model(**without_lengths(4, 6))  # the kernel is tried on rows of its own
        for lengths in layouts(6):
            calls.clear()
            found = compiled(**without_lengths(*lengths)).logits
            assert [call["max"] for call in calls] == [max(lengths)] * 2
            assert torch.equal(found, model(**without_lengths(*lengths)).logits)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("backend", "batch_of"),
    [("aot_eager", without_labels), ("eager", by_ids), ("aot_eager", by_ids)],
    ids=["lengths, aot_eager", "position ids alone, eager", "position ids alone, aot_eager"],
)
def test_gradients_stay_in_their_document(backend, batch_of):
    # Documents are isolated bit for bit with AOTAutograd, too, which torch.compile's compiling backends use.
    model = on_the_interface_seam("llama")
    compiled = torch.compile(model, backend=backend, fullgraph=True)
    for lengths in [(4, 6, 5), (3, 2, 8)]:
        assert_nothing_crosses(compiled, documents(*lengths), batch_of, model.get_input_embeddings())


@pytest.mark.slow
@pytest.mark.parametrize("more", [{"output_attentions": True}, {"use_cache": True}, {"attention_mask": True}])
def test_a_compiled_call_with_one_document_gives_what_it_gave_before(graphs, more):
    _, backend = graphs
    model = tiny_models.build("llama", "eager").eval()
    ids = documents(9)[0][None]
    given = {"input_ids": ids, "position_ids": torch.arange(9)[None], **more}
    if "attention_mask" in more:
        given["attention_mask"] = torch.ones_like(ids)
    expected = model(**given)
    fa2patch.apply(model)
    found = torch.compile(model, backend=backend)(**given)
    assert found.keys() == expected.keys()
    torch.testing.assert_close(found.logits, expected.logits, rtol=1e-5, atol=1e-5)
    if "output_attentions" in more:
        torch.testing.assert_close(found.attentions, expected.attentions)
    step = {"input_ids": ids[:, :1], "position_ids": torch.tensor([[9]])}
    if "use_cache" in more:
        held = [
            torch.compile(model, backend=backend)(**step, past_key_values=x.past_key_values) for x in (found, expected)
        ]
        torch.testing.assert_close(held[0].logits, held[1].logits, rtol=1e-5, atol=1e-5)


@pytest.mark.slow
def test_rows_and_masks_that_the_operator_does_not_read_break_the_graph_and_the_numbers_hold(graphs):
    _, backend = graphs
    model = on_the_interface_seam("llama")
    compiled = torch.compile(model, backend=backend)
    given = without_lengths(4, 6, 5, 5)
    rows = {name: value.view(2, 10) if isinstance(value, torch.Tensor) else value for name, value in given.items()}
    for batch_of in (rows, {**given, "seq_idx": torch.arange(4).repeat_interleave(torch.tensor([4, 6, 5, 5]))[None]}):
        torch.testing.assert_close(compiled(**batch_of).logits, model(**batch_of).logits, rtol=1e-5, atol=1e-5)


def scaled_by_the_length(layer, args, kwargs):
    layer.scaling = (1.0 * kwargs["hidden_states"].shape[1]) ** -0.5


@pytest.mark.slow
def test_a_scale_that_is_a_symbol_of_a_graph(graphs):
    # A scale may depend on the length, so the options of a layer are no constants of its graph.
    _, backend = graphs
    model = on_the_interface_seam("llama")
    for layer in model.model.layers:
        layer.self_attn.register_forward_pre_hook(scaled_by_the_length, with_kwargs=True)
    fa2patch.revert(model)
    fa2patch.apply(model, prove=False)  # a row's length tells documents of each other
    compiled = torch.compile(model, backend=backend, dynamic=True)
    for lengths in ((4, 6), (5, 9, 3)):
        given = batch(*lengths)
        torch.testing.assert_close(compiled(**given).logits, model(**given).logits, rtol=1e-5, atol=1e-5)


def test_a_cuda_graph_is_not_captured_around_a_packed_batch(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    from fa2patch.upstream import calls

    with pytest.raises(PackingNotIsolated, match="a CUDA graph is being captured"):
        calls._refuse_capture(torch.device("cuda"), {})
    calls._refuse_capture(torch.device("cpu"), {})


def test_numbers_are_in_the_message_where_they_are_known(monkeypatch):
    cu = torch.tensor([0, 4, 10], dtype=torch.int32)
    with pytest.raises(BadCuSeqlens, match="max_length is 5, but"):
        from_cu_seqlens(cu, 5, (1, 10))
    assert not _torch.compiling()


# Trees of segments


def trees(count):
    drawn = random.Random(0)
    made = [a_tree(drawn) for _ in range(count * 3)]
    return [tree for tree in made if len(tree[0]) >= 2 and sum(tree[0]) > 2][:count]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "count", "kernels", "fullgraph"),
    [
        ("llama", 12, contextlib.nullcontext, True),
        ("gemma2", 12, contextlib.nullcontext, True),
        ("llama", 6, stand_in_aten.installed, True),
        ("llama", 6, stand_in_aten.installed, False),
    ],
    ids=["llama", "gemma2", "gathered keys", "gathered keys, graphs may break"],
)
def test_trees_make_two_graphs_without_a_break(graphs, family, count, kernels, fullgraph):
    seen, backend = graphs
    with kernels():
        model = on_the_interface_seam(family)
        compiled = torch.compile(model, backend=backend, fullgraph=fullgraph)
        for tree in trees(count):
            assert_like_eager(compiled, model, dict(tree_batch(*tree, labels=True), use_cache=False))
    assert len(seen) <= 2, "the first tree, and one graph for all others"


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_torch_varlen_in_a_graph_gets_gathered_keys(backend):
    with stand_in_aten.installed():
        model = on_the_interface_seam("llama")
        compiled = torch.compile(model, backend=backend, fullgraph=True)
        for lengths, parents in trees(4):
            given = dict(tree_batch(lengths, parents), use_cache=False)
            found, expected = compiled(**given).logits, model(**given).logits
            torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
            weight = model.get_input_embeddings().weight
            one, other = (torch.autograd.grad(logits.square().sum(), weight)[0] for logits in (found, expected))
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


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
    compiled = torch.compile(on_the_interface_seam("llama"), backend=backend, fullgraph=True)
    given = dict(tree_batch([4, 6, 5], [-1, 0, 0], labels=True), use_cache=False)
    compiled(**given)
    with pytest.raises(RuntimeError, match=message):
        compiled(**{**given, **spoilt})
