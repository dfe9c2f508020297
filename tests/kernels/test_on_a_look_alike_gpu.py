"""What could fail only on a GPU, on a CUDA device that computes on the CPU: whole models, and planted faults."""

from collections import Counter

import look_alike_cuda
import pytest
import stand_in_aten
import torch
from look_alike_cuda import OnCuda

import fa2patch
from compat_matrix import tiny_models
from compat_matrix.check import rows
from compat_matrix.check.cell import Cell
from compat_matrix.check.compare import assert_close, assert_same_gradients
from compat_matrix.gpu import models
from fa2patch import errors
from fa2patch.documents import given_boundaries, tensors
from fa2patch.kernels.aten import TorchVarlen

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="a real CUDA device is here")

LENGTHS = (5, 9, 3)
FAMILIES = ("llama", "phi3", "mixtral", "gpt_neox", "bert:masked", "jamba")
EVERY = [
    name for name in tiny_models.architectures() if not tiny_models.has_media(name) and not tiny_models.has_pairs(name)
]


@pytest.fixture
def gpu():
    if "_ensureCUDADeviceGuardSet" not in dir(torch._C):
        pytest.skip("this torch has no devices that do nothing")
    with stand_in_aten.installed(), look_alike_cuda.cuda() as waits:
        yield waits


class Trained:
    """A patched model on the device, and what each document alone gives on a CPU."""

    def __init__(self, family, waits, kernel="auto", in_double=True):
        self.cell, self.waits = Cell(family, "eager", in_double), waits
        self.docs = rows.documents(*LENGTHS)
        self.model = look_alike_cuda.moved(self.cell.model().train())
        self.patch = fa2patch.apply(self.model, kernel=kernel)
        reference = self.cell.reference().train()
        self.expected = rows.alone(reference, self.docs)
        self.weight = torch.randn_like(self.expected)
        (self.expected * self.weight).sum().backward()
        self.gradients = rows.gradients(reference)

    def batch(self, stated):
        batch = rows.pack(self.docs)
        if stated:
            cu = torch.tensor([0, *LENGTHS]).cumsum(0).int()
            batch |= {
                "cu_seq_lens_q": cu,
                "cu_seq_lens_k": cu,
                "max_length_q": max(LENGTHS),
                "max_length_k": max(LENGTHS),
            }
        return {name: OnCuda(value) if isinstance(value, torch.Tensor) else value for name, value in batch.items()}

    def waited(self, **batch):
        """What made the host wait in the third forward, whose numbers and gradients are right."""
        for _ in range(2):  # unknown code is proven on the first ones
            self.model(**batch)
        self.waits.clear()
        logits = self.model(**batch).logits.flatten(0, 1)
        found = dict(self.waits)
        assert_close(logits.held, self.expected, "logits")
        (logits * OnCuda(self.weight)).sum().backward()
        gradients = {name: gradient.held for name, gradient in rows.gradients(self.model).items()}
        assert_same_gradients(gradients, self.gradients, **self.cell.of_gradients)
        return found


def of_ours(waits):
    return [where.partition(":")[0] for where in waits if "fa2patch/" in where]


def of_a_forward(trained, stated):
    # what computes document by document needs lengths on the host, and so does the reference
    on_the_host = {str(layer.kernel) for layer in trained.patch.layers} != {"torch_varlen"}
    return ["_to_copy, fa2patch/documents/tensors.py"] * (not stated or on_the_host)


@pytest.mark.parametrize("stated", [True, False], ids=["lengths", "ids"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_model_is_right_and_nothing_waits_but_one_read(gpu, family, stated):
    trained = Trained(family, gpu)
    found = trained.waited(**trained.batch(stated))
    assert sorted(set(of_ours(found))) == sorted(set(of_a_forward(trained, stated)))
    assert {str(layer.kernel) for layer in trained.patch.layers} & {"torch_varlen"}


@pytest.mark.parametrize("kernel", ["efficient", "reference"])
def test_a_kernel_by_name(gpu, kernel):
    trained = Trained("llama", gpu, kernel)
    trained.waited(**trained.batch(False))
    assert {str(layer.kernel) for layer in trained.patch.layers} == {kernel}


def test_autocast_hands_the_kernel_its_dtype_and_waits_for_nothing(gpu):
    trained = Trained("llama", gpu, in_double=False)
    batch = trained.batch(True)
    with torch.autocast("cuda", dtype=torch.bfloat16):
        trained.model(**batch)
        gpu.clear()
        logits = trained.model(**batch).logits
    assert logits.dtype == torch.bfloat16 and not gpu
    assert_close(logits.held.float().flatten(0, 1), trained.expected, "logits", 0.05)
    logits.float().sum().backward()
    assert {parameter.grad.dtype for parameter in trained.model.parameters()} == {torch.float32}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision(gpu, dtype):
    trained = Trained("llama", gpu)
    model = look_alike_cuda.moved(trained.cell.model(dtype).train())
    fa2patch.apply(model)
    logits = model(**trained.batch(False)).logits
    assert_close(logits.held.float().flatten(0, 1), trained.expected, "logits", 0.05)


def test_a_padded_batch_is_read_before_its_layers_and_a_dense_one_is_not(gpu):
    trained = Trained("llama", gpu)
    fa2patch.apply(trained.model, padded_batches=True)
    padded = torch.nn.utils.rnn.pad_sequence(trained.docs, batch_first=True)
    mask = torch.nn.utils.rnn.pad_sequence([torch.ones_like(doc) for doc in trained.docs], batch_first=True)
    labels = OnCuda(padded.masked_fill(mask == 0, -100))
    batch = {"input_ids": OnCuda(padded), "attention_mask": OnCuda(mask), "labels": labels, "use_cache": False}
    for _ in range(3):  # what is around the base model is looked at in the first ones
        gpu.clear()
        logits = trained.model(**batch).logits
    # whether the mask numbers documents, and where they are
    assert Counter(where.partition(":")[0] for where in gpu.elements()) == {
        "_to_copy, fa2patch/documents/tensors.py": 2
    }
    assert_close(logits.held[mask.bool()], trained.expected, "logits")
    gpu.clear()
    trained.model(OnCuda(padded), use_cache=False)
    assert not of_ours(gpu)


@pytest.mark.parametrize("family", [name for name in EVERY if name not in FAMILIES])
def test_every_architecture(gpu, family):
    try:
        trained = Trained(family, gpu)
    except errors.UnsupportedModel as error:
        pytest.skip(str(error))
    found = trained.waited(**trained.batch(True))
    assert {*of_ours(found)} <= {*of_a_forward(trained, False)}


# what a program's task checks on a GPU: rows of text, pictures, pairs, hybrids, in bfloat16
CELLS = ("llama", "mixtral", "bert:masked", "bamba", "qwen3_next", "t5:pairs", "bart:pairs", "whisper:pairs",
         "llava:picture", "gemma3:picture")  # fmt: skip


@pytest.mark.parametrize("family", CELLS)
def test_a_cell_of_the_program_is_right(gpu, family):
    if not tiny_models.is_present(family):
        pytest.skip(f"this Transformers has no {family}")
    found = models.cell("cuda:0", family, "auto", "sdpa", "eager")
    assert found["row"]["right"] == "2 of 2" and not found["wrong"] | found["refused"]
    assert "torch_varlen" in found["row"]["kernels"]


def test_a_model_there_has_the_weights_that_it_has_on_a_cpu(gpu):
    # so large that a leak shows: what is copied into a parameter must reach it
    here = tiny_models.build("llama", "sdpa")
    with models.on("cuda:0"):
        there = tiny_models.build("llama", "sdpa")
        mixed = torch.ones(3) + torch.ones(3, device="cpu")
    assert all(torch.equal(one.held, other) for one, other in zip(there.parameters(), here.parameters()))
    assert mixed.device.type == "cuda"


@pytest.mark.slow
@pytest.mark.parametrize("family", tiny_models.architectures())
def test_every_cell_of_the_program_is_right_or_refused(gpu, family):
    found = models.cell("cuda:0", family, "auto", "sdpa", "eager")
    of_a_gpu = {name: why for name, why in found["wrong"].items() if "aten::mm.dtype" not in why}  # a CPU has none
    assert not of_a_gpu and (found["refused"] or found["row"]["right"] == "2 of 2" or found["wrong"])


# --- faults ---------------------------------------------------------------------------------------------------


def on_the_host(q, k, v, boundaries, options):
    return q, k, v, boundaries.__class__(boundaries.cu_seqlens.cpu(), boundaries.max_seqlen), options


def in_64_bits(q, k, v, boundaries, options):
    return q, k, v, boundaries.__class__(boundaries.cu_seqlens.long(), boundaries.max_seqlen), options


def with_(what):
    def changed(q, *others):
        what(q, others[2])
        return q, *others

    return changed


REFUSED = {
    "boundaries on the host": on_the_host,
    "boundaries of 64 bits": in_64_bits,
    "an index on the host": with_(lambda q, _: q.index_select(0, torch.zeros(1, dtype=torch.long, device="cpu"))),
    "numbers of the host": with_(lambda q, _: q + torch.ones(q.shape[-1], device="cpu")),
    "a long message": with_(lambda q, _: tensors.assert_async(q.sum() == q.sum(), "x" * 255)),
}
WAITS = {
    "a number that is read": with_(lambda q, boundaries: boundaries.cu_seqlens[-1].item()),
    "a list": with_(lambda q, boundaries: boundaries.cu_seqlens.tolist()),
    "a condition": with_(lambda q, boundaries: bool(boundaries.cu_seqlens[0] == 0)),
    "a mask": with_(lambda q, _: q[q > 0]),
    "places": with_(lambda q, _: (q > 0).nonzero()),
    "repeats of the device": with_(
        lambda q, boundaries: torch.arange(3, device=q.device).repeat_interleave(boundaries.cu_seqlens.diff())
    ),
    "a constant of the host": with_(lambda q, _: torch.tensor([1.0, 2.0]).to(q.device)),
    "a copy to the host": with_(lambda q, _: q.cpu()),
}


def planted(monkeypatch, fault):
    original = TorchVarlen.__call__

    def faulty(self, *given):
        with torch._C.DisableTorchFunction():  # as code of fa2patch, whose tensors no check moves
            return original(self, *fault(*given))

    monkeypatch.setattr(TorchVarlen, "__call__", faulty)


@pytest.mark.parametrize("fault", REFUSED.values(), ids=REFUSED)
def test_a_planted_fault_is_refused(gpu, monkeypatch, fault):
    trained = Trained("llama", gpu, "torch_varlen")
    batch = trained.batch(True)
    trained.waited(**batch)
    planted(monkeypatch, fault)
    with pytest.raises((RuntimeError, AssertionError)):
        trained.waited(**batch)


@pytest.mark.parametrize("fault", WAITS.values(), ids=WAITS)
def test_a_planted_wait_is_seen(gpu, monkeypatch, fault):
    trained = Trained("llama", gpu, "torch_varlen")
    batch = trained.batch(True)
    assert trained.waited(**batch) == {}
    planted(monkeypatch, fault)
    assert trained.waited(**batch)


@pytest.mark.parametrize("family", ["t5:pairs", "llava:picture"])
@pytest.mark.parametrize("fault", REFUSED.values(), ids=REFUSED)
def test_a_fault_is_wrong_in_a_cell_of_pairs_and_of_pictures(gpu, monkeypatch, fault, family):
    planted(monkeypatch, fault)
    assert models.cell("cuda:0", family, "torch_varlen", "sdpa")["row"]["right"] == "0 of 2"


def test_an_assertion_of_all_that_lengths_can_break_would_be_too_long(gpu, monkeypatch):
    # what one H200 found: every packed batch with lengths failed
    trained = Trained("llama", gpu)
    batch = trained.batch(True)
    for module in (tensors, given_boundaries):
        monkeypatch.setattr(module, "fitting", lambda texts: " Or: ".join(dict.fromkeys(texts)))
    with pytest.raises(RuntimeError, match="characters"):
        trained.model(**batch)


def test_operators_without_a_deterministic_way_are_refused_and_none_is_used(gpu, monkeypatch):
    trained = Trained("llama", gpu, "torch_varlen")
    batch = trained.batch(True)
    torch.use_deterministic_algorithms(True)
    try:
        trained.waited(**batch)
        planted(monkeypatch, with_(lambda q, _: q.cumsum(0)))
        with pytest.raises(RuntimeError, match="deterministic"):
            trained.model(**batch)
    finally:
        torch.use_deterministic_algorithms(False)


def test_lengths_that_are_wrong_are_refused_there_too(gpu):
    trained = Trained("llama", gpu)
    batch = trained.batch(True)
    batch["cu_seq_lens_q"] = OnCuda(torch.tensor([0, 5, 14, 18], dtype=torch.int32))
    with pytest.raises(RuntimeError, match="cu_seq_lens"):
        trained.model(**batch)


def test_heads_that_do_not_lie_side_by_side_are_laid_so(gpu, monkeypatch):
    def columns(q, *others):
        return q.transpose(-1, -2).contiguous().transpose(-1, -2), *others

    trained = Trained("llama", gpu, "torch_varlen")
    planted(monkeypatch, columns)
    trained.waited(**trained.batch(True))
