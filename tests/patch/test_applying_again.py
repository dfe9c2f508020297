"""``apply`` on a model that is patched already: the arguments that are given replace those of the first call."""

import pytest
import torch
from transformers.models.llama import modeling_llama

import fa2patch
from compat_matrix import tiny_models
from compat_matrix.check.compare import assert_close
from compat_matrix.check.rows import alone, pack
from fa2patch import errors
from fa2patch.binding import used_by
from fa2patch.kernels import picks
from fa2patch.kernels.reference import Reference


class Counting(Reference):
    name = "counting"
    calls = 0

    def attend(self, *args, **kwargs):
        type(self).calls += 1
        return super().attend(*args, **kwargs)


@pytest.fixture
def counting(monkeypatch):
    monkeypatch.setattr(picks, "_registered", [(Counting(), None)])
    monkeypatch.setattr(Counting, "calls", 0)
    return Counting


def kernels_used(model):
    return {layer.kernel for layer in fa2patch.status(model).layers}


def test_another_kernel_is_used_from_the_next_batch_on(model, docs, counting):
    patch = fa2patch.apply(model, kernel="reference")
    first = model(**pack(docs)).logits
    assert kernels_used(model) == {"reference"} and not counting.calls
    assert fa2patch.apply(model, kernel="counting") is patch and patch.kernel == "counting"
    assert "kernel 'counting'" in repr(patch)
    second = model(**pack(docs)).logits
    assert counting.calls and kernels_used(model) == {"counting"} and torch.equal(first, second)
    before = counting.calls
    fa2patch.apply(model, kernel="auto")
    model(**pack(docs))
    assert counting.calls == before and kernels_used(model) == {"reference"}


def test_an_argument_that_is_left_out_keeps_its_value(model, counting):
    patch = fa2patch.apply(model, kernel="counting", architecture="mistral", prove=True)
    fa2patch.apply(model)
    assert (patch.kernel, patch.named, patch.examination.prove) == ("counting", "mistral", True)
    picks = patch.picks
    assert fa2patch.apply(model, kernel="counting").picks is picks  # what was chosen is kept


def test_a_kernel_object_switches_too(model, docs, counting):
    patch = fa2patch.apply(model)
    kernel = counting()
    fa2patch.apply(model, kernel=kernel)
    model(**pack(docs))
    assert counting.calls and patch.picks.given is kernel
    picks = patch.picks
    assert fa2patch.apply(model, kernel=kernel).picks is picks


@pytest.mark.skipif(not hasattr(modeling_llama, "ALL_ATTENTION_FUNCTIONS"), reason="this Transformers has no registry")
def test_what_other_code_has_replaced_since_is_replaced_again():
    original, model = modeling_llama.ALL_ATTENTION_FUNCTIONS, tiny_models.build("llama", "sdpa")
    patch = fa2patch.apply(model)
    assert modeling_llama.ALL_ATTENTION_FUNCTIONS is not original
    modeling_llama.ALL_ATTENTION_FUNCTIONS = original
    assert fa2patch.apply(model) is patch
    assert modeling_llama.ALL_ATTENTION_FUNCTIONS is not original
    fa2patch.revert(model)
    assert modeling_llama.ALL_ATTENTION_FUNCTIONS is original


def test_prove_and_architecture_are_switched(model, docs):
    patch = fa2patch.apply(model)
    assert not patch.examination.must
    fa2patch.apply(model, prove=True)
    assert patch.examination.must and not patch.examination.proven
    model(**pack(docs))
    assert {what for what, _ in patch.examination.proven} == {"documents"}  # no segments continue the same one
    fa2patch.apply(model, architecture="mistral")
    assert patch.architecture.model_type == "mistral" and patch.examination.prove is True
    fa2patch.apply(model, prove=False)
    assert patch.examination.prove is False and not patch.examination.must


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ({"kernel": "no such kernel"}, errors.UnknownKernel),
        ({"kernel": ""}, errors.UnknownKernel),
        ({"kernel": ["reference"]}, errors.UnknownKernel),
        ({"kernel": "reference", "architecture": "no_such_row"}, errors.UnknownArchitecture),
        ({"kernel": "reference", "prove": "perhaps"}, errors.BadArgument),
    ],
)
def test_an_error_leaves_the_patch_as_it_was(model, docs, counting, arguments, error):
    patch = fa2patch.apply(model, kernel="counting")
    with pytest.raises(error):
        fa2patch.apply(model, **arguments)
    assert fa2patch.status(model) is patch and patch.kernel == "counting" and patch.named is None
    model(**pack(docs))
    assert kernels_used(model) == {"counting"}


def test_a_new_patch_does_not_take_an_empty_name_for_auto(model):
    with pytest.raises(errors.UnknownKernel):
        fa2patch.apply(model, kernel="")
    assert fa2patch.status(model) is None


def in_ddp(model):
    torch.distributed.init_process_group("gloo", init_method="tcp://127.0.0.1:0", rank=0, world_size=1)
    return torch.nn.parallel.DistributedDataParallel(model)


def in_peft(model):
    peft = pytest.importorskip("peft")
    return peft.get_peft_model(model, peft.LoraConfig(target_modules=["q_proj"], task_type="CAUSAL_LM"))


@pytest.mark.parametrize("wrapped", [in_ddp, in_peft])
def test_wrappers_switch_the_model_inside_and_revert_restores_it(model, docs, counting, wrapped):
    before = model(**pack(docs)).logits
    outer = wrapped(model)
    try:
        patch = fa2patch.apply(outer, kernel="reference")
        expected = outer(**pack(docs)).logits
        assert fa2patch.apply(outer, kernel="counting") is patch is fa2patch.status(model)
        assert torch.equal(outer(**pack(docs)).logits, expected) and kernels_used(outer) == {"counting"}
        assert_close(expected[0], alone(tiny_models.build("llama", "eager"), docs), "logits")
        fa2patch.revert(outer)
        assert fa2patch.status(outer) is None and patch.layers[0].state == "off" and not used_by(patch)
        assert torch.equal(model(**pack(docs)).logits, before)  # LoRA starts with zeros
    finally:
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()


def test_a_compiled_model_switches(model, docs, counting):
    compiled = torch.compile(model, backend="eager")
    fa2patch.apply(model, kernel="reference")
    with torch.no_grad():
        expected = compiled(**pack(docs)).logits
        assert not counting.calls
        fa2patch.apply(compiled, kernel="counting")
        assert torch.equal(compiled(**pack(docs)).logits, expected) and counting.calls


def test_a_graph_that_was_captured_before_is_captured_again(model):
    # A graph holds the number of the examination, so that another argument ``prove`` reaches compiled models too.
    number = fa2patch.apply(model).examination.number
    assert fa2patch.apply(model, prove=True).examination.number != number
