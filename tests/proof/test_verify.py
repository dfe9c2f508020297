"""``fa2patch.verify`` finds and names leaks, passes models without leaks, and leaves the model unchanged."""

import copy
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import transformers
from two_layers import tiny_llama
from unknown_modules import Around, behind_the_mlp, routed_mlps

import fa2patch
from compat_matrix import tiny_models
from fa2patch import errors
from fa2patch.proof.runs import dtypes_saved, picks
from fa2patch.upstream import labels

LENGTHS = (4, 6, 1, 5)


def row(*lengths, **more):
    ids = torch.randint(3, 128, (1, sum(lengths)), generator=torch.Generator().manual_seed(1))
    return {"input_ids": ids, "position_ids": torch.cat([torch.arange(n) for n in lengths])[None], **more}


def two_rows():
    rows = [row(4, 6), row(7, 3)]
    return {name: torch.cat([one[name] for one in rows]) for name in rows[0]}


def test_a_patched_model_is_isolated(patched):
    found = fa2patch.verify(patched)
    assert found.ok and found.patched and not found.reason and found.first_leak is None
    assert [document.length for document in found.documents] == [7, 12, 1, 5]
    for document in found.documents:
        assert document.moved == document.gradient == 0 and document.moved_by is None and document.distance < 1e-5


@pytest.mark.parametrize("batch", [two_rows(), {**row(1, 4, 6), "use_cache": True}])
def test_upstreams_leak_is_found_and_its_layer_is_named(model, batch):
    found = fa2patch.verify(model, batch=batch, strict=False)
    assert not found.ok and not found.patched
    assert found.first_leak == "model.layers.0.self_attn"
    assert "Attention" in found.leak_class and "attention computed without boundaries" in found.reason
    assert max(document.moved for document in found.documents) > 0.01
    assert max(document.gradient for document in found.documents) > 0.01


def test_what_moved_a_document_is_told_by_the_number_that_is_printed(model):
    found = fa2patch.verify(model, batch=row(4, 6), strict=False)
    assert [document.moved_by for document in found.documents] == [None, 1]
    assert "document 2 (row 0, token 4, 6 long)" in str(found)
    padded = row(4, 3, 6, attention_mask=mask_of((1, 4), (0, 3), (1, 6)))
    assert fa2patch.verify(model, batch=padded, strict=False).documents[1].moved_by == 1


def test_strict_raises_with_what_was_found(model):
    with pytest.raises(
        errors.PackingNotIsolated, match=r"NOT ISOLATED.*First in model\.layers\.0\.self_attn"
    ) as raised:
        fa2patch.verify(model, batch=two_rows())
    assert not raised.value.verification.ok


def mask_of(*runs):
    return torch.tensor([[number for number, length in runs for _ in range(length)]])


@pytest.mark.parametrize(
    "batch, lengths",
    [
        (two_rows(), [4, 6, 7, 3]),
        (row(5, 3, 4, attention_mask=mask_of((1, 8), (0, 4))), [5, 3]),
        (row(5, 3, 4, attention_mask=mask_of((1, 5), (2, 3), (3, 4))), [5, 3, 4]),
        ({"input_ids": row(9)["input_ids"], "seq_idx": mask_of((0, 4), (1, 5))}, [4, 5]),
        ({**row(9), "cu_seq_lens_q": torch.tensor([0, 9], dtype=torch.int32)[None]}, None),
        (
            row(4, 5, cu_seq_lens_q=torch.tensor([0, 4, 9]), cu_seq_lens_k=torch.tensor([0, 4, 9]), max_length_q=5)
            | {"max_length_k": 5},
            [4, 5],
        ),
        ({**row(3, 4), "position_ids": torch.tensor([[7, 8, 9, 2, 3, 4, 5]])}, [3, 4]),
    ],
    ids=["two rows", "padding", "document numbers", "seq_idx", "one document", "lengths", "offsets"],
)
def test_every_kind_of_packed_batch(patched, batch, lengths):
    if lengths is None:
        with pytest.raises(errors.BadBatch, match="several documents"):
            fa2patch.verify(patched, batch=batch)
    else:
        assert [document.length for document in fa2patch.verify(patched, batch=batch).documents] == lengths


def test_a_convolution_is_named_as_a_hybrids(patched):
    def along_the_row(self, states):
        return states + self.conv1d(states.transpose(1, 2))[..., : states.shape[1]].transpose(1, 2)

    conv1d = torch.nn.Conv1d(32, 32, 3, padding=2, groups=32)
    behind_the_mlp(patched, Around(None, along_the_row, conv1d=conv1d))
    found = fa2patch.verify(patched, strict=False)
    assert found.first_leak == "model.layers.1.mlp.1.conv1d" and found.leak_class == "Conv1d"
    assert "Conv1d" in found.reason and "carries state" in found.reason and "hybrid" in found.reason


def test_a_leak_of_gradients_alone_is_found(patched):
    # The value that is added is exactly zero, and its gradient goes to every token before.
    behind_the_mlp(patched, lambda self, states: states + (states.cumsum(1) - states.cumsum(1).detach()))
    found = fa2patch.verify(patched, strict=False)
    assert not found.ok
    assert all(document.moved == 0 and document.distance < 1e-5 for document in found.documents)
    assert [document.gradient > 0 for document in found.documents] == [False, True, True, True]
    assert "the outputs of document 2 send gradients into another document" in found.reason
    assert found.first_leak is None and "values do not show what hands on gradients alone" in found.reason
    with pytest.raises(errors.PackingNotIsolated, match="send gradients into another document"):
        fa2patch.verify(patched)


def test_a_leak_out_of_padding_alone_is_found(patched):
    # A small part of the row's last token is too small to show against the document alone, where it is its own.
    layer = patched.model.layers[1]
    behind_the_mlp(patched, lambda self, states: states + 1e-6 * states[:, -1:].detach())
    padded = row(5, 3, 4, attention_mask=mask_of((1, 8), (0, 4)))
    found = fa2patch.verify(patched, batch=padded, strict=False)
    assert not found.ok and found.first_leak == "model.layers.1.mlp.1"
    assert all(document.gradient == 0 and document.distance < 1e-4 for document in found.documents)
    assert all(document.moved > 0 for document in found.documents)
    assert "the outputs of document 1 depend on padding" in found.reason
    layer.mlp = layer.mlp[0]
    assert fa2patch.verify(patched, batch=padded).ok


def failing(model, error, tokens=1):
    # The error is raised for a row of ``tokens`` tokens. The result is the hook's handle.

    def fail(module, ids):
        if ids[0].numel() == tokens:
            raise error

    return model.model.embed_tokens.register_forward_pre_hook(fail)


def test_an_error_for_want_of_memory_is_raised_as_it_is(patched):
    # Such an error says nothing about the model, neither in the batch nor for a document of one token alone.
    for tokens in (sum(LENGTHS), 1):
        handle = failing(patched, torch.cuda.OutOfMemoryError("CUDA out of memory"), tokens)
        with pytest.raises(torch.cuda.OutOfMemoryError):
            fa2patch.verify(patched, batch=row(*LENGTHS))
        handle.remove()
    assert fa2patch.verify(patched, batch=row(*LENGTHS)).ok


def test_a_document_of_one_token_that_a_model_cannot_compute_alone_is_passed_over_and_an_error_of_ours_is_not(patched):
    handle = failing(patched, IndexError("as in Falcon's eager attention"))
    found = fa2patch.verify(patched, batch=row(*LENGTHS))
    handle.remove()
    assert [document.distance is None for document in found.documents] == [length == 1 for length in LENGTHS]
    failing(patched, errors.BoundaryConflict("of ours"))
    with pytest.raises(errors.BoundaryConflict):
        fa2patch.verify(patched, batch=row(*LENGTHS))


def test_a_longer_document_that_a_model_cannot_compute_alone_is_named(patched):
    failing(patched, IndexError("as in tables of rope up to 4.37"), tokens=LENGTHS[1])
    said = r"document 2 in the row, and not alone \(IndexError: as in tables of rope"
    with pytest.raises(errors.PackingNotIsolated, match=said):
        fa2patch.verify(patched, batch=row(*LENGTHS))


class LearnedPositions(torch.nn.Module):
    # Positions count along the row, whatever the ids are.

    def __init__(self, size):
        super().__init__()
        self.table = torch.nn.Embedding(64, size)

    def forward(self, states):
        return states + self.table(torch.arange(states.shape[1]))


def test_positions_that_do_not_restart_are_named(patched):
    behind_the_mlp(patched, LearnedPositions(32), at=0)
    found = fa2patch.verify(patched, strict=False)
    assert all(document.moved == document.gradient == 0 for document in found.documents)
    assert found.first_leak == "model.layers.0.mlp.1" and found.leak_class == "LearnedPositions"
    assert "not computed as when it is alone" in found.reason and "do not restart" in found.reason


def test_what_computes_in_less_than_its_weights_is_measured_and_what_does_not_keeps_its_bound():
    # Float32's rounding inside of float64 is no fault, and a fault as small as it is found where nothing rounds so.

    @torch.no_grad()
    def product(self, states):  # nothing of it is saved for a backward
        return (states.float() @ self.weight.float()).to(states)

    model = tiny_models.build("gpt2", "eager").double()
    size = model.config.hidden_size
    with fa2patch.apply(model):
        assert fa2patch.verify(model).distance_bound == 1e-9
    mlp = model.transformer.h[0].mlp
    weight = torch.nn.Parameter(torch.randn(size, size, generator=torch.Generator().manual_seed(1)))
    added = Around(mlp, lambda self, states: self.inner(states) + product(self, states), weight=weight)
    model.transformer.h[0].mlp = added.double()
    with fa2patch.apply(model):
        found = fa2patch.verify(model)
        assert found.ok and max(one.distance for one in found.documents) > 1e-9 and found.distance_bound <= 1e-4
    positions = LearnedPositions(size).double()
    positions.table.weight.data.mul_(1e-6)
    model.transformer.h[0].mlp = torch.nn.Sequential(mlp, positions)
    fa2patch.apply(model)
    found = fa2patch.verify(model, strict=False)
    assert found.distance_bound == 1e-9 and 1e-9 < max(one.distance for one in found.documents) < 1e-4
    assert not found.ok and "not computed as when it is alone" in found.reason


def test_rounding_counts_as_nothing_in_a_mixture_of_experts_only(patched):
    assert fa2patch.verify(patched).moved_bound == 0
    patched.model.layers[0].mlp.experts = torch.nn.Identity()  # a name says nothing
    assert fa2patch.verify(patched).moved_bound == 0
    routed_mlps(patched)
    assert fa2patch.verify(patched).moved_bound == 1e-5


def test_a_run_that_cannot_be_watched_gets_the_stricter_bound_unless_memory_is_short():
    def fails(error):
        raise error

    assert picks([lambda: fails(NotImplementedError("no rule for this mode"))], 4) is False
    with pytest.raises(torch.cuda.OutOfMemoryError):
        picks([lambda: fails(torch.cuda.OutOfMemoryError("CUDA out of memory"))], 4)


def classifier():
    config = tiny_llama().config
    config.pad_token_id, config.num_labels = 0, 3
    torch.manual_seed(0)
    model = transformers.LlamaForSequenceClassification(config).eval()
    tiny_models.scale_up(model)
    return model


@pytest.mark.parametrize("padding", [0, 3])
def test_a_classifier_is_measured_by_its_one_vector_of_each_document(padding):
    model = classifier()
    lengths = (4, 6, 5)
    ones = [torch.ones(sum(lengths)), torch.zeros(padding)]
    batch = row(*lengths, *([padding] if padding else []), attention_mask=torch.cat(ones)[None].long())
    with pytest.raises(errors.PackingNotIsolated, match=r"one vector of each row, \[1, 3\], and the batch holds 3"):
        fa2patch.verify(model, batch=batch)
    fa2patch.apply(model)
    found = fa2patch.verify(model, batch=batch)
    assert [(document.moved, document.gradient) for document in found.documents] == [(0, 0)] * 3

    def mixing(module, args, kwargs, output):
        output.logits = output.logits + output.logits.mean(0)
        return output

    model.register_forward_hook(mixing, with_kwargs=True)
    found = fa2patch.verify(model, batch=batch, strict=False)
    assert not found.ok and "the outputs of document 1 depend on document" in found.reason


def test_labels_that_cross_are_masked_as_in_a_padded_run(patched):
    batch = row(4, 6)
    masked = batch["input_ids"].clone()
    masked[0, 4] = -100
    crossing, clean = (patched(**batch, labels=labels).loss for labels in (batch["input_ids"], masked))
    assert torch.equal(crossing, clean)
    assert fa2patch.verify(patched, batch={**batch, "labels": batch["input_ids"]}).ok


def test_labels_that_cross_are_reported_where_nobody_masks_them(patched, monkeypatch):
    monkeypatch.setattr(labels, "inside_documents", lambda given, *rest: given)
    batch = row(4, 6, 3)
    found = fa2patch.verify(patched, batch={**batch, "labels": batch["input_ids"]}, strict=False)
    assert not found.ok and "labels: the last token of document 1 predicts the first of document 2" in found.reason
    assert found.first_leak is None


def test_the_model_is_left_as_it_was(patched):
    patched.train()
    patched.model.layers[1].eval()
    patched(**row(4, 6), labels=row(4, 6)["input_ids"]).loss.backward()
    patched.model.embed_tokens.weight.requires_grad_(False)
    modes = [module.training for module in patched.modules()]
    gradients = [(parameter.grad, None if parameter.grad is None else parameter.grad.clone())
                 for parameter in patched.parameters()]  # fmt: skip
    buffers = {name: buffer.clone() for name, buffer in patched.named_buffers()}
    attributes = [set(vars(module)) for module in patched.modules()]
    hooks = [len(module._forward_hooks) + len(module._forward_pre_hooks) for module in patched.modules()]
    state = torch.get_rng_state()
    with torch.no_grad():
        fa2patch.verify(patched)
        assert not torch.is_grad_enabled()
    assert torch.equal(torch.get_rng_state(), state)
    assert [module.training for module in patched.modules()] == modes
    for (held, value), parameter in zip(gradients, patched.parameters()):
        assert parameter.grad is held and (held is None or torch.equal(held, value))
    assert all(torch.equal(buffer, buffers[name]) for name, buffer in patched.named_buffers())
    assert [set(vars(module)) for module in patched.modules()] == attributes
    assert [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in patched.modules()] == hooks


def test_work_is_bounded(patched):
    calls = []
    patched.register_forward_hook(lambda *args: calls.append(1))
    found = fa2patch.verify(patched, batch=row(*[3] * 20), max_documents=2)
    assert len(calls) == 1 + 2 * 2
    assert [document.gradient is not None for document in found.documents] == [True] + [False] * 18 + [True]


@pytest.mark.slow
def test_half_precision_and_wrappers(patched):
    peft = pytest.importorskip("peft")
    assert fa2patch.verify(torch.compile(copy.deepcopy(patched), backend="eager"), max_documents=1).ok
    assert fa2patch.verify(copy.deepcopy(patched).to(torch.bfloat16)).ok
    assert fa2patch.verify(patched.model).ok
    lora = peft.get_peft_model(patched, peft.LoraConfig(target_modules=["q_proj"], task_type="CAUSAL_LM"))
    assert fa2patch.verify(lora).ok


def test_autocast_inside_a_float32_model_is_seen():
    # accelerate does it so: float32 weights and logits, computed in bfloat16, whose rounding differs in a batch.
    model = tiny_llama()
    fa2patch.apply(model, kernel="reference")
    forward = model.forward

    def autocast(**call):
        with torch.autocast("cpu", torch.bfloat16):
            output = forward(**call)
        output.logits = output.logits.float()
        return output

    model.forward = autocast
    found = fa2patch.verify(model, batch=row(*range(9, 19)))
    assert found.distance_bound == 5e-2 and max(document.distance for document in found.documents) > 1e-4


@pytest.mark.parametrize("compiled", [False, True])
def test_the_dtype_of_products_is_seen_in_what_they_save(compiled):
    linear, states = torch.nn.Linear(4, 4), torch.randn(3, 4, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16), dtypes_saved() as dtypes:
        (torch.compile(linear, backend="aot_eager") if compiled else linear)(states).float().sum()
    assert torch.bfloat16 in dtypes


@pytest.mark.parametrize(
    "batch, message",
    [
        ([1, 2], "expected what a collator returns"),
        ({"input_ids": torch.ones(1, 4)}, "expected integers"),
        ({"input_ids": torch.ones(1, 4, dtype=torch.int64)}, "remove_unused_columns=False"),
        (row(4, position_ids=None), "several documents"),
        (row(4, 5, labels=torch.zeros(1, 3, dtype=torch.int64)), "labels"),
        (row(4, 5, pixel_values=torch.zeros(1, 3, 8, 8)), "pixel_values"),
    ],
)
def test_a_batch_without_anything_to_verify(patched, batch, message):
    with pytest.raises(errors.BadBatch, match=message):
        fa2patch.verify(patched, batch=batch)


def test_a_verification_goes_into_json(patched):
    found = fa2patch.verify(patched)
    assert json.loads(json.dumps(found.to_dict()))["documents"][1]["length"] == 12
    assert str(found).startswith("isolated: 4 documents")


def test_a_suite_of_ones_own_asserts_it(assert_isolated, model):
    with pytest.raises(pytest.fail.Exception, match=r"First in model\.layers\.0\.self_attn"):
        assert_isolated(model, batch=two_rows())
    fa2patch.apply(model)
    assert assert_isolated(model, batch=two_rows()).ok


@pytest.mark.slow
def test_distributed_and_sharded_models():
    pytest.importorskip("torch.distributed.fsdp._fully_shard", reason="FSDP2 came with torch 2.6")
    script = Path(__file__).with_name("sharded_verify.py")
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", str(script)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
