"""Rows whose shapes stand still: documents without tokens at the end, a ``max_length`` above the longest document."""

import pytest
import stand_in_aten
import torch
from compiled import assert_like_eager
from packed_rows import assert_nothing_crosses, built
from torch.utils._python_dispatch import TorchDispatchMode
from tree_cases import tree_batch

import fa2patch
from compat_matrix import tiny_models
from compat_matrix.bench import static_shapes
from compat_matrix.bench.static_shapes import collated
from compat_matrix.check import reads
from compat_matrix.check.rows import documents
from fa2patch._torch import HAS_OPERATORS
from fa2patch.errors import PackingNotIsolated
from fa2patch.upstream import calls

LENGTHS = (5, 9, 1, 3)
STATIC = {"max_documents": 9, "longest_document": 64}
compiles = pytest.mark.skipif(not HAS_OPERATORS, reason=f"torch {torch.__version__} has no custom_op")


def loss_and_gradients(model, batch):
    model.zero_grad()
    loss = model(**batch).loss
    loss.backward()
    return [loss.detach(), *[weight.grad.clone() for weight in model.parameters() if weight.grad is not None]]


def assert_same_training(model, one, other):
    for found, expected in zip(*(loss_and_gradients(model, batch) for batch in (one, other)), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


# Right


@pytest.mark.parametrize("weights", [None, "document"])
@pytest.mark.parametrize("family", ["llama", "gemma2", "mamba", "qwen3_next"])
def test_a_row_learns_as_without_padding_and_empty_documents(family, weights):
    model = built(family)
    fa2patch.apply(model)
    still = collated(LENGTHS, pad_to_multiple_of=64, loss_weights=weights, **STATIC)
    assert_same_training(model, still, collated(LENGTHS, loss_weights=weights))


def without_labels(docs):
    # The row has no padding, so that its documents are those of the test, and empty ones.
    row = collated([len(doc) for doc in docs], **STATIC)
    return {**row, "input_ids": torch.cat(docs)[None], "labels": None}


@pytest.mark.parametrize("family", ["llama", "bert", "mamba"])
def test_nothing_crosses(family):
    model = built(family)
    fa2patch.apply(model)
    assert_nothing_crosses(model, documents(*LENGTHS), without_labels)


@pytest.mark.parametrize("kernel", ["torch_varlen", "efficient"])
def test_nothing_crosses_in_kernels_of_gpus(kernel):
    with stand_in_aten.installed():
        model = built("llama")
        fa2patch.apply(model, kernel=kernel)
        assert_nothing_crosses(model, documents(*LENGTHS), without_labels)


@pytest.mark.parametrize("kernel", ["reference", "torch_varlen", "efficient"])
def test_empty_segments_behind_a_tree_change_nothing(kernel):
    with stand_in_aten.installed():
        model = built("llama")
        fa2patch.apply(model, kernel=kernel)
        batch = dict(tree_batch([4, 6, 5, 2], [-1, 0, 0, 1], labels=True), use_cache=False)
        ends = torch.nn.functional.pad(batch["cu_seq_lens_q"], (0, 3), value=17)
        more = {"segment_parents": torch.nn.functional.pad(batch["segment_parents"], (0, 3), value=-1)}
        more.update(cu_seq_lens_q=ends, cu_seq_lens_k=ends, max_length_q=64, max_length_k=64)
        assert_same_training(model, {**batch, **more}, batch)


def test_verify_leaves_empty_documents_out():
    model = built("llama")
    fa2patch.apply(model)
    assert len(fa2patch.verify(model, batch=without_labels(documents(*LENGTHS))).documents) == len(LENGTHS)


# Still


@compiles
@pytest.mark.parametrize(
    "kind",
    ["one shape", *(pytest.param(kind, marks=pytest.mark.slow) for kind in static_shapes.KINDS if kind != "one shape")],
)
def test_layouts_of_one_shape_make_one_graph(graphs, kind):
    # Shapes and numbers are constants of these graphs, as of a CUDA graph: ``dynamic=False``.
    seen, backend = graphs
    model = built("llama")
    fa2patch.apply(model)
    compiled = torch.compile(model, backend=backend, fullgraph=True, dynamic=False)
    shapes = set()
    for lengths in static_shapes.layouts(30):
        batch = collated(lengths, **static_shapes.KINDS[kind])
        shapes.add((batch["input_ids"].shape[1], batch["max_length_q"]))
        assert_like_eager(compiled, model, batch)
    assert len(seen) == len(shapes) <= {"one shape": 1, "powers of two": 2}.get(kind, 8)
    inputs = [node.meta["example_value"] for graph in seen for node in graph.graph.nodes if node.op == "placeholder"]
    assert not [value for value in inputs if isinstance(value, torch.SymInt)], "a shape or number is no constant"


@compiles
@pytest.mark.parametrize(("kernel", "read"), [("torch_varlen", False), ("reference", True)])
def test_a_graph_of_still_shapes_reads_nothing_unless_the_reference_is_in_it(kernel, read):
    torch._dynamo.reset()
    counts = []

    def backend(graph, inputs):
        def run(*args):
            with reads.counted() as count:
                found = graph(*args)
            counts.append((count.reads, count.kernel))
            return found

        return run

    with stand_in_aten.installed():
        model = built("llama")
        fa2patch.apply(model, kernel=kernel)
        compiled = torch.compile(model, backend=backend, fullgraph=True)
        for lengths in static_shapes.layouts(4):
            compiled(**collated(lengths, **static_shapes.KINDS["one shape"]))
    torch._dynamo.reset()
    assert [count for count, _ in counts] == [0] * 4
    of_kernels = {count for _, count in counts}  # a stand-in reads, as its operator on a GPU does not
    assert of_kernels == {model.config.num_hidden_layers} if read else of_kernels


class Tape(TorchDispatchMode):
    # Every operator is recorded with the shapes and dtypes of its tensors and with its other arguments.

    def __init__(self):
        super().__init__()
        self.operators = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        self.operators.append((str(function), self.shown(args), self.shown([*kwargs.items()])))
        return function(*args, **kwargs)

    def shown(self, value):
        if isinstance(value, torch.Tensor):
            return tuple(value.shape), str(value.dtype)
        return tuple(map(self.shown, value)) if isinstance(value, (list, tuple)) else str(value)


@pytest.mark.parametrize("kernel", ["torch_varlen", "efficient"])
@pytest.mark.parametrize("weights", [None, "document"])
def test_a_step_is_the_same_operators_with_the_same_shapes_and_numbers(kernel, weights):
    # Then a CUDA graph of one step computes every other one. The reference's calls depend on lengths.
    tapes, counts = [], []
    with stand_in_aten.installed():
        model = tiny_models.build("llama", "sdpa")
        fa2patch.apply(model, kernel=kernel)
        for lengths in [(5, 9), *static_shapes.layouts(30)]:
            options = {**static_shapes.KINDS["one shape"], "loss_weights": weights}
            batch = collated(lengths, **options)
            model.zero_grad()
            with reads.counted(packages=("fa2patch",)) as count, Tape() as tape:
                model(**batch).loss.backward()
            tapes.append(tape.operators)
            counts.append((count.reads, count.arguments, count.derived))
    assert len(tapes[1]) > 100
    assert all(tape == tapes[1] for tape in tapes[1:]), "the first batch is the one on which kernels are tried"
    assert set(counts[1:]) == {(0, 0, 0)}


def test_a_captured_graph_must_read_where_documents_are(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    device = torch.device("cuda")
    lengths = collated(LENGTHS, **STATIC)
    ends, here = lengths["cu_seq_lens_q"], lengths["cu_seq_lens_q"].device
    assert calls._replays({"cu_seq_lens_q": ends, "max_length_q": 64}, here)
    for said in ({}, {"cu_seq_lens_q": ends}, {"cu_seq_lens_q": ends, "max_length_q": torch.tensor(64)}):
        assert not calls._replays(said, here)
    assert not calls._replays({"cu_seq_lens_q": ends, "max_length_q": 64}, device), "a copy would be of this batch"
    assert not calls._replays({"cu_seq_lens_q": ends, "max_length_q": 64, "segment_parents": ends[1:]}, here)
    with pytest.raises(PackingNotIsolated, match=r"a CUDA graph is being captured.*max_documents="):
        calls._refuse_capture(device, lengths)
