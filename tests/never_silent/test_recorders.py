"""What records a forward once for every later batch would keep the documents of the first one: an error."""

from __future__ import annotations

import pytest
import torch
from small_models import DOCS, alone, labels_of, llama, patched, told
from torch.fx.experimental.proxy_tensor import make_fx

from compat_matrix.check.compare import assert_close
from fa2patch.errors import Fa2PatchError, PackingNotIsolated

SAYS = r"fa2patch\.revert\(model\)|torch\.compile"


def batch(docs=DOCS):
    row = told(docs)
    return row["input_ids"], row["position_ids"]


def logits_of(model):
    return lambda ids, positions: model(input_ids=ids, position_ids=positions, use_cache=False)[0]


def refused(record):
    with pytest.raises(Fa2PatchError, match=SAYS):
        record()


@pytest.mark.parametrize("mode", ["real", "fake", "symbolic"])
@pytest.mark.parametrize("docs", [DOCS, DOCS[2:3]], ids=["packed", "one document"])
def test_make_fx(mode, docs):
    with torch.no_grad():
        refused(lambda: make_fx(logits_of(patched()), tracing_mode=mode)(*batch(docs)))


@pytest.mark.parametrize("way", ["seq_idx", "document numbers in the mask", "all lengths"])
def test_make_fx_of_other_statements(way):
    model, given = patched(), told(way=way)
    tensors = {name: value for name, value in given.items() if torch.is_tensor(value)}
    rest = {name: value for name, value in given.items() if name not in tensors}
    with torch.no_grad():
        refused(lambda: make_fx(lambda given: model(**given, **rest, use_cache=False)[0])(tensors))


def of_the_base_model():
    make_fx(logits_of(patched().model))(*batch())


def of_training():
    model = patched().train()
    make_fx(lambda i, p, t: model(input_ids=i, position_ids=p, labels=t)[0])(*batch(), labels_of())


def aot_function():
    from functorch.compile import aot_function, nop

    aot_function(logits_of(patched()), fw_compiler=nop)(*batch())


def transformers_own_symbolic_trace():
    fx = pytest.importorskip("transformers.utils.fx")
    fx.symbolic_trace(patched(), input_names=["input_ids", "position_ids"], disable_check=True)


def vmap_over_batches():
    model = patched()
    torch.func.vmap(lambda i, p: logits_of(model)(i[None], p[None]))(*(torch.cat([e, e.flip(1)]) for e in batch()))


RECORDED = {
    "make_fx before dispatch": lambda: make_fx(logits_of(patched()), pre_dispatch=True)(*batch()),
    "make_fx of the base model": of_the_base_model,
    "make_fx of training": of_training,
    "aot_function": aot_function,
    "symbolic_trace": lambda: torch.fx.symbolic_trace(patched(), concrete_args={"use_cache": False}),
    "Transformers' own symbolic_trace": transformers_own_symbolic_trace,
    "vmap over batches": vmap_over_batches,
}


@pytest.fixture
def functions_of_torch():
    # Transformers' symbolic_trace replaces functions in torch, and leaves them there if it fails.
    before = dict(vars(torch))
    yield
    for name, value in before.items():
        if vars(torch)[name] is not value:
            setattr(torch, name, value)


@pytest.mark.parametrize("what", RECORDED)
def test_a_record_is_refused(what, functions_of_torch):
    with torch.set_grad_enabled("make_fx" not in what and "vmap" not in what or "training" in what):
        refused(RECORDED[what])


def test_a_fake_mode():
    from torch._subclasses.fake_tensor import FakeTensorMode

    model, given = patched(), batch()
    with torch.no_grad(), FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fake = [mode.from_tensor(each) for each in given]
        refused(lambda: logits_of(model)(*fake))


def test_vmap_over_weights():
    model = patched()
    weights = {name: torch.stack([weight, weight]) for name, weight in model.named_parameters()}
    given = dict(zip(("input_ids", "position_ids"), batch()))

    def logits(weights):
        return torch.func.functional_call(model, weights, (), {**given, "use_cache": False})[0]

    with torch.no_grad():
        refused(lambda: torch.func.vmap(logits, randomness="different")(weights))
        found = logits(dict(model.named_parameters()))[0]
    assert_close(found, alone(llama()).logits, "logits")


def test_a_gradient_of_torch_func():
    model = patched()
    given = dict(zip(("input_ids", "position_ids", "labels"), (*batch(), labels_of(DOCS))))

    def loss(weights):
        return torch.func.functional_call(model, weights, (), {**given, "use_cache": False})[0]

    refused(lambda: torch.func.grad(loss)(dict(model.named_parameters())))


class Logits(torch.nn.Module):
    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, ids, positions):
        return logits_of(self.model)(ids, positions)


@pytest.mark.parametrize("docs", [DOCS, DOCS[2:3]], ids=["packed", "one document"])
def test_a_trace(docs):
    # A trace would treat every batch like the traced one. Traces of an unpatched model are not checked.
    with pytest.raises(PackingNotIsolated, match="trace"):
        torch.jit.trace(Logits(patched()), batch(docs), check_trace=False)


def test_export():
    # Strict or not, the export is a graph that looks at every batch, or an error of ours.
    other = batch([DOCS[2][:4], DOCS[0], DOCS[2]])
    with torch.no_grad():
        try:
            exported = torch.export.export(Logits(patched()), batch(), strict=False)
        except Fa2PatchError:
            return
        found = exported.module()(*other)[0]
    assert_close(found, alone(llama(), [DOCS[2][:4], DOCS[0], DOCS[2]]).logits, "logits")


def test_what_says_nothing_of_documents_is_recorded_as_before():
    model, plain = patched(), llama()
    ids = torch.cat(DOCS)[None]

    def run(model):
        return lambda ids: model(input_ids=ids, use_cache=False)[0]

    with torch.no_grad():
        try:
            expected = make_fx(run(plain))(ids)(ids.flip(1))
        except Exception as error:
            pytest.skip(f"upstream cannot be recorded: {type(error).__name__}")
        assert torch.equal(make_fx(run(model))(ids)(ids.flip(1)), expected)
