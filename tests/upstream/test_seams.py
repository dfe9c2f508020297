"""Each seam on a modeling file written for it: what ``apply`` finds, what packed rows give, what ``revert`` leaves."""

import contextlib
import inspect
import itertools
import sys
import types

import pytest
import torch
import torch.nn.functional as F
from fake_models import modeling_function, modeling_interface, modeling_method
from packed_rows import assert_equals_alone, assert_nothing_crosses, leaks, logits

import fa2patch
from compat_matrix.check.compare import assert_close, assert_same_gradients
from compat_matrix.check.rows import alone, documents, gradients, loss_of, pack
from fa2patch import binding, errors
from fa2patch.patch.model_plan import plan_model
from fa2patch.upstream import forward, masks
from fa2patch.upstream.facts import Site
from fa2patch.upstream.find_layers import ModelLayers
from fa2patch.upstream.seams import formula, interface

# Fake models by how their attention finds flash attention. Those with classes are on the formula seam.
MODELING = {"interface": modeling_interface, "function": modeling_function, "method": modeling_method}

SEAMS = {"interface": "interface", "function": "formula", "method": "formula"}
IMPLEMENTATIONS = ("eager", "sdpa", "flash_attention_2")
KINDS = {
    "interface": ("base_model", "causal_lm", "mask", "registry", "eager"),
    "function": ("base_model", "causal_lm", "mask", "layer"),
    "method": ("base_model", "causal_lm", "mask", "layer"),
}
MAKERS = {"mask": masks.let_through, "registry": interface.Overlay, "eager": interface.routed}


def site_of(plan, kind):
    if kind in ("base_model", "causal_lm"):
        return [site for site in plan.sites if site.make is forward.entered][-1 if kind == "base_model" else 0]
    return next(
        site
        for site in plan.sites
        if (isinstance(site.make, formula.ByFormula) if kind == "layer" else site.make is MAKERS[kind])
    )


FEATURES = {
    "interface": ({}, {"softcap": 2.0}, {"sinks": True}, {"softcap": 2.0, "sinks": True}),
    "function": ({}, {"sliding_window": 3}),
    "method": ({}, {"sliding_window": 3}),
}
LENGTHS = (5, 9, 1, 3, 7)

built = []  # the models of the running test

every_seam = pytest.mark.parametrize("seam", MODELING)
every_implementation = pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
every_feature = pytest.mark.parametrize(
    "seam, changes", [(seam, changes) for seam in FEATURES for changes in FEATURES[seam]], ids=str
)


def class_of(seam, name):
    return getattr(MODELING[seam], f"Fake{seam.capitalize()}{name}")


def build(seam, implementation="eager", **changes):
    own = {} if seam == "interface" else {"attn_impl": implementation}
    model = class_of(seam, "ForCausalLM")(class_of(seam, "Config")(**own, **changes)).eval()
    if seam == "interface":
        model.config._attn_implementation = implementation
    built.append(model)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" not in name:
                parameter.normal_(std=1.5 / parameter.shape[-1] ** 0.5, generator=generator)
    return model


@pytest.fixture(autouse=True)
def registered(monkeypatch):
    # Rows and patches are removed after the test.
    architectures = sys.modules["fa2patch.upstream.architectures"]
    monkeypatch.setattr(architectures, "_rows", dict(architectures._rows))
    for seam in MODELING:
        fa2patch.register(fa2patch.Architecture(f"fake-{seam}"))
    yield
    while built:
        fa2patch.revert(built.pop())


@pytest.fixture
def docs():
    return documents(*LENGTHS)


@pytest.fixture
def flash_attn(monkeypatch):
    # If flash-attn is installed, the modeling files have these names in addition.

    def attend(query, key, value, attention_mask, window):
        length = query.shape[1]
        visible = torch.ones(length, length, dtype=torch.bool).tril()[None, None]
        visible = visible if window is None else visible.triu(1 - window)
        visible = visible if attention_mask is None else visible & attention_mask[:, None, None, :].bool()
        groups = query.shape[2] // key.shape[2]
        key, value = (states.repeat_interleave(groups, dim=2).transpose(1, 2) for states in (key, value))
        return F.scaled_dot_product_attention(query.transpose(1, 2), key, value, visible).transpose(1, 2)

    def forward(query, key, value, attention_mask, query_length, is_causal, dropout=0.0, sliding_window=None):
        return attend(query, key, value, attention_mask, sliding_window)

    monkeypatch.setattr(modeling_function, "_flash_attention_forward", forward, raising=False)
    monkeypatch.setattr(modeling_method, "flash_attn_func", attend, raising=False)
    monkeypatch.setattr(modeling_method, "_flash_supports_window_size", True, raising=False)


class Found:
    # All attributes that a patch could touch. Values are kept alive, so that identities stay valid.

    def __init__(self, model):
        modeling = sys.modules[type(model).__module__]
        classes = [value for value in vars(modeling).values() if isinstance(value, type)]
        self.owners = [modeling, *classes, *model.modules(), model.config]
        self.items = [list(vars(owner).items()) for owner in self.owners]
        self.bindings = self.bound()

    def bound(self):
        return [used for used in binding._bindings if any(used.owner is owner for owner in self.owners)]

    def again(self):
        assert self.bound() == self.bindings
        for owner, items in zip(self.owners, self.items):
            now = list(vars(owner).items())
            assert [name for name, _ in now] == [name for name, _ in items], owner
            assert [name for (name, old), (_, new) in zip(items, now) if old is not new] == [], owner
        return True


def outcome(model, batch):
    try:
        return model(**batch).logits
    except Exception as error:
        return type(error)


@every_seam
def test_a_model_type_without_a_row_is_patched_where_its_seam_is_an_ordinary_one(seam, docs, monkeypatch):
    expected = alone(build(seam), docs)
    monkeypatch.delitem(sys.modules["fa2patch.upstream.architectures"]._rows, f"fake-{seam}")
    model = build(seam)
    with fa2patch.apply(model):
        assert_close(logits(model, docs), expected, "logits")


def test_attention_that_does_not_claim_flash_attention_is_refused_until_somebody_vouches_for_it(docs, monkeypatch):
    monkeypatch.setattr(modeling_interface.FakeInterfaceModel, "_supports_flash_attn", False)
    monkeypatch.setattr(modeling_interface.FakeInterfaceModel, "_supports_flash_attn_2", False)
    model = build("interface")
    found = Found(model)
    rows = sys.modules["fa2patch.upstream.architectures"]._rows
    row = rows.pop("fake-interface")
    with pytest.raises(
        errors.UnsupportedModel, match=r"does not claim flash attention.*Architecture\('fake-interface'"
    ):
        fa2patch.apply(model)
    assert found.again()
    fa2patch.register(row)
    assert fa2patch.apply(model).active


@every_seam
@every_implementation
def test_the_seam_is_found_whatever_the_model_was_made_with(seam, implementation):
    model = build(seam, implementation)
    with fa2patch.apply(model) as patch:
        assert [(layer.name, layer.seam) for layer in patch.layers] == [
            (name, SEAMS[seam]) for name in ("layers.0", "layers.1")
        ]
        assert {layer.state for layer in patch.layers} == {"applied"}


@every_feature
@every_implementation
def test_packed_equals_alone(seam, changes, implementation, docs):
    model, reference = build(seam, implementation, **changes), build(seam, **changes)
    fa2patch.apply(model)
    assert_equals_alone(model, reference, docs)


@every_seam
@every_implementation
def test_packed_equals_alone_where_flash_attn_is_installed(seam, implementation, docs, flash_attn):
    fa2patch.apply(model := build(seam, implementation))
    assert_close(logits(model, docs), alone(build(seam), docs), "logits")


@every_feature
def test_the_eager_model_itself_would_leak(seam, changes, docs):
    model = build(seam, **changes)
    assert leaks(model, docs, alone(model, docs))


@every_feature
@every_implementation
def test_nothing_crosses(seam, changes, implementation, docs):
    fa2patch.apply(model := build(seam, implementation, **changes))
    assert_nothing_crosses(model, docs, table=model.model.embed_tokens)


ABSENT = object()
CAUSAL = [
    # seam, the layer's is_causal, the call's arguments, whether attention is causal
    ("interface", ABSENT, {}, True),
    ("interface", ABSENT, {"is_causal": None}, True),
    ("interface", True, {}, True),
    ("interface", False, {}, False),
    ("interface", ABSENT, {"is_causal": True}, True),
    ("interface", ABSENT, {"is_causal": False}, False),
    ("interface", False, {"is_causal": False}, False),
    ("interface", False, {"is_causal": True}, True),
    ("interface", True, {"is_causal": False}, True),  # GPT-2 from 4.48 on, if the mask contains the triangle
    ("function", True, {}, True),
    ("function", False, {}, False),
    ("function", None, {}, True),
    ("method", True, {}, True),
    ("method", False, {}, False),
    ("method", ABSENT, {}, True),
]


@pytest.mark.parametrize("seam, of_layer, said, causal", CAUSAL)
def test_a_layer_looks_both_ways_where_it_or_its_call_says_so(seam, of_layer, said, causal, docs):
    # The gradient of a token in a document's middle shows which tokens it sees.
    patch = fa2patch.apply(model := build(seam, "flash_attention_2"))
    patch.facts.both_ways = True  # as in an encoder
    for layer in model.model.layers:
        if of_layer is not ABSENT:
            layer.is_causal = of_layer
        elif hasattr(layer, "is_causal"):
            del layer.is_causal
        layer.said = said
    batch = pack(docs)
    embeddings = model.model.embed_tokens(batch.pop("input_ids")).detach().requires_grad_()
    output = model.model(inputs_embeds=embeddings, **batch)[0]
    first, end = LENGTHS[0], sum(LENGTHS[:2])
    (gradient,) = torch.autograd.grad(output[0, first + 3].square().sum(), embeddings)
    reached = gradient[0].any(-1).nonzero().flatten().tolist()
    assert reached == list(range(first, first + 4 if causal else end))


@every_seam
@pytest.mark.parametrize("use_reentrant", [False, True])
def test_a_checkpoints_recompute_is_isolated_too_also_after_another_forward(seam, use_reentrant, docs):
    model, reference = build(seam, "sdpa"), build(seam)
    loss_of(alone(reference, docs), docs).backward()
    fa2patch.apply(model)
    model.model.checkpointing = {"use_reentrant": use_reentrant}
    loss = loss_of(logits(model, docs), docs)
    logits(model, documents(4, 4))
    loss.backward()
    assert_same_gradients(gradients(model), gradients(reference))


@every_seam
def test_the_collators_lengths_are_enough(seam, docs):
    fa2patch.apply(model := build(seam))
    collate = fa2patch.DataCollatorWithFlattening(return_flash_attn_kwargs=True)
    batch = dict(collate([{"input_ids": doc.tolist()} for doc in docs]))
    del batch["labels"], batch["position_ids"]
    assert_close(model(**batch).logits[0], alone(build(seam), docs), "logits")


@every_seam
def test_positions_beyond_the_rows_length(seam):
    docs, ids = documents(3, 2), torch.tensor([[40, 41, 42, 7, 8]])
    fa2patch.apply(model := build(seam, "sdpa"))
    found = model(input_ids=torch.cat(docs)[None], position_ids=ids).logits[0]
    separate = [model(input_ids=torch.cat([doc, doc])[None], position_ids=own.repeat(1, 2)).logits[0, : len(doc)]
                for doc, own in zip(docs, ids.split((3, 2), dim=1))]  # fmt: skip
    assert torch.equal(found, torch.cat(separate))


@every_seam
@every_implementation
def test_dense_batches_are_bit_for_bit_as_ever(seam, implementation, flash_attn):
    model = build(seam, implementation)
    ids, ones = torch.stack(documents(8, 8)), torch.ones(2, 8, dtype=torch.long)
    right, left = ones.clone(), ones.clone()
    right[1, 5:], left[1, :3] = 0, 0
    batches = [{"input_ids": ids}, {"input_ids": ids, "position_ids": torch.arange(8).expand(2, 8)}]
    batches += [{"input_ids": ids, "attention_mask": mask} for mask in (ones, right, left)]
    batches += [{"input_ids": ids[:, :1]}]
    before = [model(**batch).logits for batch in batches]
    with fa2patch.apply(model):
        during = [model(**batch).logits for batch in batches]
    after = [model(**batch).logits for batch in batches]
    for old, *others in zip(before, during, after):
        assert all(torch.equal(old, other) for other in others)


def test_without_flash_attn_a_dense_batch_of_a_flash_model_fails_as_loudly_as_before():
    model, batch = build("function", "flash_attention_2"), {"input_ids": documents(4)[0][None]}
    assert outcome(model, batch) is NameError
    with fa2patch.apply(model):
        assert outcome(model, batch) is NameError
    assert outcome(model, batch) is NameError


@every_seam
@every_implementation
@pytest.mark.parametrize("installed", [False, True], ids=["without flash-attn", "with flash-attn"])
def test_revert_leaves_every_namespace_as_found(seam, implementation, installed, request, docs):
    if installed:
        request.getfixturevalue("flash_attn")
    model = build(seam, implementation)
    before = None if implementation == "flash_attention_2" and not installed else logits(model, docs)
    found = Found(model)
    fa2patch.apply(model)
    logits(model, docs)
    assert len(found.bound()) == len(KINDS[seam])
    fa2patch.revert(model)
    assert found.again()
    assert before is None or torch.equal(logits(model, docs), before)


@every_seam
def test_what_is_installed_for_a_function_is_a_plain_function(seam, flash_attn):
    patch = fa2patch.apply(build(seam))
    # what is bound for every model depends on the packages that other tests have imported
    of_model = [used for used in binding.used_by(patch) if inspect.getmodule(used.owner) is MODELING[seam]]
    replaced = [used for used in of_model if isinstance(used.original, types.FunctionType)]
    assert len(replaced) == {"interface": 4, "function": 4, "method": 4}[seam]
    for used in replaced:
        assert type(vars(used.owner)[used.attribute]) is types.FunctionType, used.attribute


@every_seam
def test_a_layers_state_is_live(seam):
    patch = fa2patch.apply(build(seam))
    assert {layer.state for layer in patch.layers} == {"applied"}
    owner, attribute = patch.layers[0].owner, patch.layers[0].attribute
    ours = vars(owner)[attribute]
    setattr(owner, attribute, object())
    assert {layer.state for layer in patch.layers} == {"covered"}
    setattr(owner, attribute, ours)
    assert {layer.state for layer in patch.layers} == {"applied"}
    patch.revert()
    assert {layer.state for layer in patch.layers} == {"off"}


class OtherAttention(torch.nn.Module):
    # The layer has no seam, and computes attention directly.

    def forward(self, hidden_states, *args, **kwargs):
        return hidden_states + F.scaled_dot_product_attention(*[hidden_states[:, None]] * 3, is_causal=True)[:, 0]


@every_seam
def test_one_layer_without_a_seam_is_refused_and_nothing_is_changed(seam):
    model = build(seam)
    model.model.layers[1] = OtherAttention()
    found = Found(model)
    with pytest.raises(errors.LayerNotPatchable, match=r"found 1 such .* layers\.1 \(OtherAttention\)"):
        fa2patch.apply(model)
    assert found.again() and fa2patch.status(model) is None


@pytest.mark.parametrize("seam, kind", [(seam, kind) for seam in KINDS for kind in KINDS[seam]])
def test_apply_is_all_or_nothing(seam, kind, monkeypatch, docs):
    model = build(seam, "sdpa")
    found = Found(model)

    wanted, bind = site_of(plan_model(ModelLayers(model)), kind), Site.bind

    def fail(original):
        raise ZeroDivisionError(kind)

    failing = Site(wanted.owner, wanted.attribute, fail)
    with monkeypatch.context() as broken, pytest.raises(ZeroDivisionError, match=kind):
        broken.setattr(Site, "bind", lambda self, user: bind(failing if self == wanted else self, user))
        fa2patch.apply(model)
    assert found.again() and fa2patch.status(model) is None
    with fa2patch.apply(model):
        assert_close(logits(model, docs), alone(build(seam), docs), "logits of a later apply")


@every_seam
def test_a_second_models_failed_apply_leaves_the_first_patched(seam, monkeypatch, docs):
    first, second = build(seam, "sdpa"), build(seam, "sdpa")
    fa2patch.apply(first)
    found = Found(second)
    second.model.layers[1] = OtherAttention()
    with pytest.raises(errors.LayerNotPatchable):
        fa2patch.apply(second)
    assert found.bound() == found.bindings
    assert_close(logits(first, docs), alone(build(seam), docs), "the first model's logits")


@contextlib.contextmanager
def put_back(patch, kind):
    # Other code puts the attribute back by hand like this, here within the block.
    site = site_of(patch.plan, kind)
    owner, attribute = site.owner, site.attribute
    used = next(used for used in binding.used_by(patch) if (used.owner, used.attribute) == (owner, attribute))
    if used.original is binding.ABSENT:
        delattr(owner, attribute)
    else:
        setattr(owner, attribute, used.original)
    try:
        yield
    finally:
        setattr(owner, attribute, used.replacement)


LOUD = [
    *(("interface", made, "registry") for made in ("sdpa", "flash_attention_2")),
    *(("interface", "eager", kind) for kind in ("eager", "mask")),
    *((seam, made, "layer") for seam in ("function", "method") for made in IMPLEMENTATIONS),
    *((seam, "sdpa", "mask") for seam in ("function", "method")),
]


@pytest.mark.parametrize("seam, implementation, kind", LOUD)
def test_a_stock_function_that_is_handed_a_packed_mask_fails_loudly(seam, implementation, kind, docs, flash_attn):
    patch = fa2patch.apply(model := build(seam, implementation))
    with put_back(patch, kind), pytest.raises((TypeError, errors.PackingNotIsolated)):
        model(**pack(docs))
    assert_close(logits(model, docs), alone(build(seam), docs), "logits of the patch put in place again")


EVERY_SITE = [(seam, made, kind) for made, seam in itertools.product(IMPLEMENTATIONS, KINDS) for kind in KINDS[seam]]


@pytest.mark.parametrize("seam, implementation, kind", EVERY_SITE)
def test_no_site_put_back_by_hand_gives_wrong_numbers(seam, implementation, kind, docs):
    patch = fa2patch.apply(model := build(seam, implementation))
    with put_back(patch, kind):
        found = outcome(model, pack(docs))
    if isinstance(found, torch.Tensor):
        assert_close(found[0], alone(build(seam), docs), "logits")
    else:
        assert issubclass(found, (TypeError, NameError, ImportError, errors.PackingNotIsolated))


@every_seam
def test_no_base_model_put_back_by_hand_gives_wrong_numbers_for_a_mask_of_document_numbers(seam, docs):
    patch = fa2patch.apply(model := build(seam, "sdpa"))
    numbers = torch.cat([torch.full_like(doc, number) for number, doc in enumerate(docs, start=1)])
    batch = {"input_ids": torch.cat(docs)[None], "attention_mask": numbers[None]}
    assert_close(model(**batch).logits[0], alone(build(seam), docs), "logits")
    with put_back(patch, "base_model"), pytest.raises(errors.PackingNotIsolated):
        model(**batch)


@every_seam
def test_a_layer_that_ignores_its_attention_function_is_noticed(seam, docs):
    fa2patch.apply(model := build(seam, "sdpa"))
    model.model.layers[1] = OtherAttention()
    with pytest.raises(errors.LayerNotPatchable, match=r"without one: layers\.1 \(OtherAttention\)"):
        model(**pack(docs))


@every_seam
def test_of_two_models_each_is_patched_until_its_own_revert(seam, docs):
    first, second = build(seam, "sdpa"), build(seam, "sdpa")
    found, expected, leaking = Found(first), alone(first, docs), logits(first, docs)
    fa2patch.apply(first)
    assert torch.equal(logits(second, docs), leaking)
    fa2patch.apply(second)
    fa2patch.revert(first)
    assert torch.equal(logits(first, docs), leaking)
    assert_close(logits(second, docs), expected, "the second model's logits")
    fa2patch.revert(second)
    assert found.again()


class Elsewhere:
    # In some remote code, a base model's forward is defined in another file than its attention.

    def forward(self, input_ids=None, attention_mask=None, position_ids=None, inputs_embeds=None):
        return super().forward(input_ids, attention_mask, position_ids, inputs_embeds)


@pytest.mark.parametrize("seam, implementation", [("interface", "eager"), ("function", "sdpa"), ("method", "sdpa")])
def test_attention_of_another_modeling_file_than_the_base_models(seam, implementation, docs):
    model = build(seam, implementation)
    model.model.__class__ = type("Elsewhere", (Elsewhere, class_of(seam, "Model")), {})
    with fa2patch.apply(model):
        assert_close(logits(model, docs), alone(build(seam), docs), "logits")


@every_seam
def test_a_forward_replaced_by_one_without_names_still_works_by_keyword(seam, monkeypatch, docs):
    model, base = build(seam), class_of(seam, "Model")
    stock, expected = base.forward, alone(model, docs)
    monkeypatch.setattr(base, "forward", lambda self, *args, **kwargs: stock(self, *args, **kwargs))
    with fa2patch.apply(model):
        assert torch.equal(model.model(docs[0][None])[0], model.model(input_ids=docs[0][None])[0])
        batch = pack(docs)
        found = model.model(batch["input_ids"], position_ids=batch["position_ids"])[0]
        assert_close(model.lm_head(found)[0], expected, "logits")
        with pytest.raises(errors.PackingNotIsolated, match="with keywords"):
            model.model(batch["input_ids"], None, batch["position_ids"])


def test_a_base_model_that_was_compiled_after_apply_is_still_reached(docs):
    if not hasattr(torch.nn.Module, "compile"):
        pytest.skip(f"torch {torch.__version__} compiles no module in place")
    fa2patch.apply(model := build("interface", "sdpa"))
    model.model.compile(backend="eager")
    assert_close(logits(model, docs), alone(build("interface"), docs), "logits")


def test_an_unknown_tensor_for_attention_is_named_with_what_to_do():
    with pytest.raises(errors.PackingNotIsolated, match="'token_type_ids'.*column of your batch.*leave it out"):
        interface._options(torch.nn.Identity(), {"token_type_ids": torch.zeros(1, 5, dtype=torch.int64)})
