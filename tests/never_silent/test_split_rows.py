"""Sequence parallelism, which splits rows, is known by what replaces attention. The last test uses two processes."""

import importlib.util
import itertools
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
import transformers
from torchrun import launched

import fa2patch
from compat_matrix import tiny_models
from fa2patch.errors import PackingNotIsolated
from fa2patch.upstream.engines import row_part

ROOT = Path(__file__).parents[2]
CALL = {"input_ids": torch.ones(1, 4, dtype=torch.long), "position_ids": torch.tensor([[0, 1, 6, 7]])}


@pytest.fixture
def model():
    return tiny_models.build("llama", "sdpa")


def function_of(module):
    def attention(*args, **kwargs):
        raise AssertionError("nothing may be computed")

    attention.__module__ = module
    return attention


@pytest.fixture
def in_torchs_place(monkeypatch):
    return lambda module: monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", function_of(module))


@pytest.mark.parametrize(
    ("module", "said"),
    [
        ("torch.distributed.tensor.experimental._attention", "cp_size"),  # torch 2.4 to 2.9
        ("torch.distributed.tensor.experimental._context_parallel._attention", "cp_size"),
        ("deepspeed.runtime.sequence_parallel.ulysses_sp", "sp_size"),
    ],
)
def test_a_function_that_stands_in_torchs_place(model, in_torchs_place, monkeypatch, module, said):
    row_part(model, CALL)
    in_torchs_place(module)
    with pytest.raises(PackingNotIsolated, match=f"{said}.*a part of every row.*train padded"):
        row_part(model, CALL)
    monkeypatch.undo()
    row_part(model, CALL)


@pytest.mark.parametrize("family", ["t5:pairs", "bart:pairs"])
@pytest.mark.parametrize("ids", [torch.tensor([[0, 1, 2, 0]]), torch.tensor([[2, 3, 4, 5]])], ids=str)
def test_a_part_of_a_row_of_sources_and_of_one_of_targets(family, ids, in_torchs_place):
    tokens = torch.ones(1, 4, dtype=torch.long)
    pairs = {"input_ids": tokens, "position_ids": ids, "decoder_input_ids": tokens, "decoder_position_ids": ids}
    with fa2patch.apply(tiny_models.build(family, "eager")) as patch:
        in_torchs_place("torch.distributed.tensor.experimental._attention")
        with pytest.raises(PackingNotIsolated, match="a part of every row"):
            patch.model(**pairs)


@pytest.mark.parametrize(
    "module", ["deepspeed.runtime.sequence_parallel.ulysses_sp", "ring_flash_attn.adapters.hf_adapter"]
)
def test_a_function_that_stands_in_the_models_place(model, monkeypatch, module):
    table = getattr(transformers.modeling_utils, "ALL_ATTENTION_FUNCTIONS", None)
    if table is None:
        pytest.skip(f"Transformers {transformers.__version__} has no table of attention functions")
    for name in itertools.accumulate(module.split("."), "{}.{}".format):  # what its import leaves
        monkeypatch.setitem(sys.modules, name, sys.modules.get(name, ModuleType(name)))
    monkeypatch.setitem(getattr(table, "_global_mapping", table), "sdpa", function_of(module))
    with pytest.raises(PackingNotIsolated, match="a part of every row"):
        row_part(model, CALL)
    monkeypatch.undo()
    row_part(model, CALL)


def test_ring_attention_that_replaces_the_flash_function_only(model, monkeypatch):
    utilities = pytest.importorskip("transformers.modeling_flash_attention_utils")
    monkeypatch.setattr(utilities, "_flash_attention_forward", function_of("ring_flash_attn.adapters.hf_adapter"))
    with pytest.raises(PackingNotIsolated, match="ring_flash_attn.*a part of every row"):
        row_part(model, CALL)
    monkeypatch.undo()
    row_part(model, CALL)


def test_verify_does_not_take_a_part_for_a_row(model, in_torchs_place):
    # This holds for an unpatched model too: what it computes of a part would be proven of a whole row.
    batch = {"input_ids": torch.arange(3, 11)[None], "position_ids": torch.tensor([[0, 1, 2, 0, 1, 2, 3, 4]])}
    in_torchs_place("torch.distributed.tensor.experimental._attention")
    with pytest.raises(PackingNotIsolated, match="a part of every row"):
        fa2patch.verify(model, batch=batch)


@pytest.mark.parametrize(
    "module", ["deepspeed.runtime.sequence_parallel_of_mine", "torch.distributions", "sageattention", None]
)
def test_functions_of_others_are_let_through(model, in_torchs_place, module):
    in_torchs_place(module)
    row_part(model, CALL)


def test_torchs_dispatcher_that_gathers_parts(model):
    # Newer torch replaces no function: module hooks make DTensors, whose dispatcher gets a handler.
    attention = pytest.importorskip("torch.distributed.tensor.experimental._attention")
    if not hasattr(attention, "_enable_context_parallel_dispatcher"):
        pytest.skip(f"torch {torch.__version__} replaces a function only")
    attention._enable_context_parallel_dispatcher()
    try:
        with pytest.raises(PackingNotIsolated, match="cp_size"):
            row_part(model, CALL)
    finally:
        attention._disable_context_parallel_dispatcher()
    row_part(model, CALL)


def test_one_graph_and_none_where_somebody_comes_in_between(model, in_torchs_place):
    torch._dynamo.reset()
    graphs = []

    def backend(graph, _):
        graphs.append(graph)
        return graph

    @torch.compile(backend=backend, fullgraph=True)
    def looked(ids):
        row_part(model, {"input_ids": ids})
        return ids + 1

    for length in (3, 4, 5):
        assert looked(torch.zeros(1, length)).sum() == length
    assert len(graphs) <= 2, "one for the first length, one for any"
    fa2patch.apply(model)
    compiled = torch.compile(model, backend=backend)
    compiled(**CALL)
    in_torchs_place("torch.distributed.tensor.experimental._attention")
    with pytest.raises(PackingNotIsolated, match="a part of every row"):
        compiled(**CALL)
    torch._dynamo.reset()


@pytest.mark.slow
@pytest.mark.skipif(
    importlib.util.find_spec("torch.distributed.tensor.experimental") is None, reason="came with torch 2.5"
)
def test_two_processes_with_half_of_each_row():
    finding = launched("context_parallel torch")
    assert finding["ok"], finding
