"""``apply``, ``revert`` and ``status``: which model is patched, for how long, and what is refused."""

import copy
import functools
import gc
import inspect
import pickle
import pydoc
import re
import subprocess
import sys
import types

import pytest
import torch
import transformers
from packed_rows import leaks, logits
from torch.utils import checkpoint

import fa2patch
from compat_matrix import tiny_models
from compat_matrix.check.compare import assert_close
from compat_matrix.check.rows import alone, documents, pack
from fa2patch import errors, kernels
from fa2patch.binding import users
from fa2patch.documents import names
from fa2patch.upstream import hooks, packed_mask

LENGTHS = (5, 9, 1, 3)


def test_packed_rows_leak_before_apply_and_not_after(model, docs, expected):
    assert leaks(model, docs, expected)
    patch = fa2patch.apply(model)
    assert_close(logits(model, docs), expected, "logits")
    patch.revert()
    assert leaks(model, docs, expected)


def test_status_and_repr_tell_what_is_patched(model):
    assert fa2patch.status(model) is None
    patch = fa2patch.apply(model, kernel="reference")
    assert len(patch.layers) == model.config.num_hidden_layers
    layer = patch.layers[0]
    assert layer.name == "layers.0.self_attn" and layer.seam in ("interface", "formula")
    assert hasattr(layer.owner, layer.attribute) and layer.state == "applied"
    assert patch.kernel == "reference" and patch.architecture.model_type == "llama"
    assert "2 llama attention layers" in repr(patch) and "applied" in repr(patch)
    patch.revert()
    assert patch.layers[0].state == "off" and "reverted" in repr(patch)


def test_reverting_twice_or_an_unpatched_model_is_a_no_op(model):
    fa2patch.revert(model)
    patch = fa2patch.apply(model)
    patch.revert()
    patch.revert()
    assert fa2patch.status(model) is None


def test_context_manager_reverts_also_after_an_error(model):
    with pytest.raises(ZeroDivisionError), fa2patch.apply(model):
        raise ZeroDivisionError
    assert fa2patch.status(model) is None


def test_an_unpatched_model_of_the_same_class_stays_as_it_was(model, docs, expected):
    other = tiny_models.build("llama", "sdpa")
    before = logits(other, docs)
    fa2patch.apply(model)
    assert torch.equal(logits(other, docs), before)
    assert_close(logits(model, docs), expected, "the patched one")


def test_the_base_model_alone_can_be_patched(model, docs, expected):
    fa2patch.apply(model.model)
    assert_close(model.lm_head(model.model(**pack(docs)).last_hidden_state)[0], expected, "logits")


@pytest.mark.parametrize("padded", [False, True])
def test_collator_lengths_end_at_the_base_model(model, docs, expected, padded):
    # Cohere's base model in 4.47 takes them and hands them to its layers, which do not.

    def takes_no_lengths(layer, args, kwargs):
        found = {*kwargs}.intersection(names.LENGTHS)
        assert not found, f"forward() got unexpected keyword arguments {found}"

    for layer in model.model.layers:
        layer.register_forward_pre_hook(takes_no_lengths, with_kwargs=True)
    fa2patch.apply(model, padded_batches=True)
    if padded:
        mask = torch.arange(max(LENGTHS)) < torch.tensor(LENGTHS)[:, None]
        batch = {"input_ids": torch.nn.utils.rnn.pad_sequence(docs, batch_first=True), "attention_mask": mask.long()}
        hidden = model.model(**batch).last_hidden_state[mask]
    else:
        ends = torch.tensor([0, *LENGTHS]).cumsum(0).int()
        hidden = model.model(**pack(docs), cu_seq_lens_q=ends, cu_seq_lens_k=ends).last_hidden_state[0]
    assert_close(model.lm_head(hidden), expected, "logits")


def test_signatures_stay_as_they_were(model):
    before = [inspect.signature(module.forward) for module in (model, model.model)]
    fa2patch.apply(model)
    assert [inspect.signature(module.forward) for module in (model, model.model)] == before


def test_what_fails_in_the_middle_of_apply_leaves_no_trace(model, docs, monkeypatch):
    add, before = hooks.add, users()
    found = [dict(vars(owner)) for owner in (model, model.model, type(model), type(model.model))]

    def interrupted(module):
        add(module)
        if module is model.model:
            raise KeyboardInterrupt

    monkeypatch.setattr(hooks, "add", interrupted)
    with pytest.raises(KeyboardInterrupt):
        fa2patch.apply(model)
    assert found == [dict(vars(owner)) for owner in (model, model.model, type(model), type(model.model))]
    assert fa2patch.status(model) is None and users() == before
    assert not model._forward_pre_hooks and not model.model._forward_pre_hooks


def test_a_deep_copy_is_patched_and_independent(model, docs, expected):
    patch = fa2patch.apply(model)
    copied = copy.deepcopy(model)
    with torch.no_grad():
        model.lm_head.weight.zero_()
    assert fa2patch.status(copied) is not patch and fa2patch.status(copied).model is copied
    assert_close(logits(copied, docs), expected, "the copy, with weights of its own")
    patch.revert()
    assert_close(logits(copied, docs), expected, "the copy after the first was reverted")
    fa2patch.revert(copied)
    assert leaks(copied, docs, expected)


def test_a_pickled_model_is_patched(model, docs, expected):
    fa2patch.apply(model)
    loaded = pickle.loads(pickle.dumps(model))
    fa2patch.revert(model)
    assert fa2patch.status(loaded).model is loaded
    assert_close(logits(loaded, docs), expected, "the loaded model")


@pytest.mark.slow
def test_a_model_loaded_in_a_fresh_process_is_patched(model, docs, expected, tmp_path):
    fa2patch.apply(model)
    torch.save((model, pack(docs)), tmp_path / "model.pt")
    script = f"""
import torch
model, batch = torch.load({str(tmp_path / "model.pt")!r}, weights_only=False)
torch.save(model(**batch).logits[0].detach(), {str(tmp_path / "logits.pt")!r})
"""
    subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, timeout=120)
    assert_close(torch.load(tmp_path / "logits.pt"), expected, "logits in another process")


def test_a_forgotten_model_takes_its_patch_along():
    owner = type(tiny_models.build("mistral"))
    before = dict(vars(owner))
    fa2patch.apply(tiny_models.build("mistral"))
    gc.collect()
    assert dict(vars(owner)) == before


never_collected = []


@pytest.mark.parametrize("time", ["first", "second"])
def test_the_patches_of_a_test_end_with_it(time):
    # The fixture in ``tests/conftest.py`` does it, and tests that compare a class with what it was before need it.
    model = tiny_models.build("mistral")
    assert not users()
    fa2patch.apply(model)
    never_collected.append(model)


class TestWrappers:
    def test_compiled(self, model, docs, expected):
        compiled = torch.compile(model, backend="eager")
        fa2patch.apply(compiled)
        assert_close(compiled(**pack(docs), use_cache=False).logits[0], expected, "compiled")
        other = documents(6, 12)
        found = compiled(**pack(other), use_cache=False).logits[0]
        assert_close(found, alone(tiny_models.build("llama", "eager"), other), "another layout, not recompiled wrongly")

    @pytest.mark.parametrize("family", ["llama", "falcon"])
    def test_hooks_of_accelerate(self, family, docs):
        hooks = pytest.importorskip("accelerate.hooks")
        model = tiny_models.build(family, "sdpa")
        for module in model.modules():
            hooks.add_hook_to_module(module, hooks.AlignDevicesHook(io_same_device=False))
        before = [dict(vars(module)) for module in model.modules()]
        if "_old_forward" not in getattr(model.forward, "func", model.forward).__code__.co_names:
            with pytest.raises(errors.LayerNotPatchable, match="before whatever replaces it"):
                fa2patch.apply(model)  # hooks of accelerate versions of 4.34's time hold the forward itself
            return
        with fa2patch.apply(model):
            copied = copy.deepcopy(model)
            expected = alone(tiny_models.build(family, "sdpa"), docs)
            assert_close(logits(model, docs), expected, "hooked")
        assert [dict(vars(module)) for module in model.modules()] == before
        assert_close(logits(copied, docs), expected, "a copy of the hooked model")

    @pytest.mark.parametrize("hooked", ["above", "below", "with it inside", "held by a known function"])
    def test_a_loss_of_ones_own_with_hooks_of_accelerate(self, model, docs, expected, hooked):
        hooks = pytest.importorskip("accelerate.hooks")

        def forward(self, input_ids=None, position_ids=None, labels=None, **kwargs):
            logits = self.lm_head(self.model(input_ids, position_ids=position_ids, **kwargs)[0])
            return torch.nn.functional.cross_entropy(logits[0, :-1], labels[0, 1:]), logits

        ids = torch.cat(docs)
        starts = torch.tensor([0, *(len(doc) for doc in docs[:-1])]).cumsum(0)
        right = torch.nn.functional.cross_entropy(expected[:-1], ids.index_fill(0, starts, -100)[1:])
        call = {**pack(docs), "labels": ids[None], "use_cache": False}
        with fa2patch.apply(model):
            if hooked == "above":
                model.forward = types.MethodType(forward, model)
            if hooked != "held by a known function":
                hooks.add_hook_to_module(model, hooks.ModelHook())
            if hooked == "with it inside":
                model._old_forward = types.MethodType(forward, model)
            if hooked == "below":
                model.forward = types.MethodType(forward, model)
            if hooked == "held by a known function":
                held = functools.partial(forward, model)
                model.forward = functools.partial(checkpoint.checkpoint, held, use_reentrant=False)
            with pytest.raises(errors.PackingNotIsolated, match="was replaced after"):
                model.forward(**call)
            assert_close(model(**call)[0], right, "called")

    def test_prepared_by_accelerate(self, model, docs, expected):
        accelerate = pytest.importorskip("accelerate")
        prepared = accelerate.Accelerator(cpu=True, mixed_precision="bf16").prepare(model)
        with fa2patch.apply(prepared):
            assert_close(logits(prepared, docs), expected, "prepared", 5e-2)
            changed = [documents(5, seed=7)[0], *docs[1:]]
            assert torch.equal(logits(prepared, docs)[5:], logits(prepared, changed)[5:])

    def test_a_replaced_forward_that_has_caught_the_original_is_refused(self, model):
        model.model.forward = types.MethodType(lambda self, *args, **kwargs: None, model.model)
        with pytest.raises(errors.LayerNotPatchable, match="replaced on the object itself"):
            fa2patch.apply(model)
        assert fa2patch.status(model) is None


def test_seq_idx_speaks_where_cu_seq_lens_only_repeat_the_mask(model, docs, expected):
    row, tokens = torch.cat(docs)[None], sum(LENGTHS)
    cu = torch.tensor([0, tokens], dtype=torch.int32)
    seq_idx = torch.repeat_interleave(torch.arange(len(docs)), torch.tensor(LENGTHS))[None].int()
    with fa2patch.apply(model):
        found = model(
            input_ids=row, attention_mask=torch.ones_like(row), seq_idx=seq_idx, cu_seq_lens_q=cu, cu_seq_lens_k=cu,
            max_length_q=tokens, max_length_k=tokens,
        )  # fmt: skip
        assert_close(found.logits[0], expected, "logits")


def test_a_class_inside_a_function_is_patched_and_its_copy_too(docs):
    class Local(tiny_models.model_class("llama")):
        def forward(self, *args, **kwargs):
            return super().forward(*args, **kwargs)

    model = Local(tiny_models.config_of("llama")).eval()
    tiny_models.scale_up(model)
    expected = alone(model, docs)
    fa2patch.apply(model)
    copied = copy.deepcopy(model)
    fa2patch.revert(model)
    assert_close(logits(copied, docs), expected, "the copy's logits")


class TestRefusals:
    def check(self, error, match, model, **options):
        owner = tiny_models.model_class("llama")
        before = dict(vars(owner))
        with pytest.raises(error, match=match):
            fa2patch.apply(model, **options)
        assert dict(vars(owner)) == before

    def test_not_a_model(self):
        self.check(errors.NotAModel, "found str", "meta-llama/Llama-2-7b")
        self.check(errors.NotAModel, "found Linear", torch.nn.Linear(2, 2))

    def test_attention_that_does_not_say_its_direction(self):
        config = transformers.BloomConfig(hidden_size=16, n_head=2, n_layer=1, vocab_size=32)
        self.check(errors.LayerNotPatchable, "BloomModel adds alibi", transformers.BloomForCausalLM(config))

    def test_state_outside_attention(self):
        class Convolved(torch.nn.Conv1d):
            def forward(self, hidden):
                return super().forward(hidden.mT)[..., : hidden.shape[1]].mT

        model = tiny_models.build("llama")
        model.model.layers[1].mlp = torch.nn.Sequential(Convolved(32, 32, 3, padding=2))
        self.check(errors.UnsupportedModel, r"Convolved \(a convolution .*\) at layers\.1\.mlp\.0.*leak there", model)

    def test_alibi_falcon(self):
        self.check(errors.UnsupportedModel, "alibi", tiny_models.build("falcon", alibi=True))

    def test_unknown_and_unavailable_kernels(self, model, monkeypatch):
        self.check(
            errors.UnknownKernel, "'auto', 'flash_attn_3', 'flash_attn', .*'reference'", model, kernel="flash-attention"
        )
        monkeypatch.setitem(sys.modules, "flash_attn", None)
        sys.modules["fa2patch.kernels.varlen"].entry_points.clear()
        self.check(errors.KernelUnavailable, "flash_attn", model, kernel="flash_attn")
        sys.modules["fa2patch.kernels.varlen"].entry_points.clear()

    def test_old_transformers(self, model, monkeypatch):
        monkeypatch.setattr(sys.modules["transformers"], "__version__", "4.33.3")
        self.check(errors.UnsupportedTransformers, "4.34 or newer, found 4.33.3", model)

    def test_torch_that_cannot_use_the_installed_numpy(self, model, monkeypatch):
        def from_numpy(array):
            raise RuntimeError("Numpy is not available")

        monkeypatch.setattr(torch, "from_numpy", from_numpy)
        self.check(errors.UnsupportedNumPy, "cannot exchange arrays .*Numpy is not available.*'numpy<2'", model)

    def test_architecture_by_name(self, model, docs, expected):
        model.config.model_type = "my-llama"
        self.check(errors.UnknownArchitecture, "your-llama.*fa2patch.register", model, architecture="your-llama")
        with fa2patch.apply(model, architecture="llama"):
            assert_close(logits(model, docs), expected, "logits")

    def test_output_attentions_of_a_packed_batch(self, docs):
        model = tiny_models.build("llama", "eager")
        with fa2patch.apply(model), pytest.raises(errors.PackingNotIsolated, match="output_attentions"):
            model(**pack(docs), output_attentions=True)


def test_moving_or_casting_a_layers_inputs_leaves_the_boundaries_right(docs):
    boundaries = fa2patch.boundaries(torch.cat([torch.arange(301), torch.arange(302)]))
    mask = packed_mask.PackedMask(boundaries, "auto", 1, 302)
    moved = mask.to("cpu", torch.bfloat16)
    assert torch.equal(moved.boundaries.cu_seqlens, boundaries.cu_seqlens)
    assert mask.to("meta").boundaries.cu_seqlens.device.type == "meta"


@pytest.mark.parametrize("options", [{"window": 0}, {"window": -1}])
def test_a_window_that_shows_nothing_is_refused(options):
    with pytest.raises(errors.PackingNotIsolated, match="None is no window"):
        kernels.Options(**options)


def test_help_names_the_kernels_in_the_order_of_auto():
    documented = re.findall(r'``"(\w+)"``', inspect.getdoc(fa2patch.apply).partition("kernel: what")[2])
    assert documented[: 1 + len(kernels.ORDER)] == ["auto", *(kernel.name for kernel in kernels.ORDER)]
    assert set(kernels.NAMES) <= set(documented)


def test_help_shows_an_example_and_every_error():
    shown = pydoc.plain(pydoc.render_doc(fa2patch.apply))
    assert "fa2patch.apply(model)" in shown and "DataCollatorWithFlattening" in shown
    raised = re.findall(r"\b[A-Z]\w+", inspect.getdoc(fa2patch.apply).partition("Raises:")[2])
    known = [name for name in raised if hasattr(errors, name)]
    assert {"NotAModel", "UnsupportedModel", "LayerNotPatchable", "UnknownKernel", "BadArgument"} <= set(known)
