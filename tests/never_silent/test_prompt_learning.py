"""PEFT prepends virtual tokens to a row, not to a document, and drops position ids: packed rows are refused.
This holds in both orders of ``fa2patch.apply`` and ``get_peft_model``. Every other batch is computed as before.
"""

import contextlib
import copy
import gc
import subprocess
import sys
import warnings

import pytest
import torch
import transformers
from adapters import LORA, ORDERS, in_order, with_lora
from small_models import WAYS, told

import fa2patch
from compat_matrix import tiny_configs, tiny_models
from compat_matrix.check.compare import assert_close
from compat_matrix.check.rows import alone, documents, pack
from fa2patch import errors

peft = pytest.importorskip("peft")

VIRTUAL = 3
DOCS = documents(5, 9, 3)
_SIZES = {"task_type": "CAUSAL_LM", "num_virtual_tokens": VIRTUAL}
_TOKENS = {"cpt_token_ids": [4, 5, 6], "cpt_mask": [1, 1, 1], "cpt_tokens_type_mask": [1, 2, 4]}
SETTINGS = {
    "PromptTuningConfig": _SIZES,
    "MultitaskPromptTuningConfig": {**_SIZES, "num_tasks": 2},
    "PromptEncoderConfig": {**_SIZES, "encoder_hidden_size": 8},
    "PrefixTuningConfig": _SIZES,
    "CPTConfig": {"task_type": "CAUSAL_LM", **_TOKENS},
    "CartridgeConfig": _SIZES,
}
KINDS = [name for name in SETTINGS if hasattr(peft, name)]


def adapted(kind, order="", model=None):
    model = tiny_models.build("llama", "sdpa") if model is None else model
    return in_order(order, model, lambda model: peft.get_peft_model(model, getattr(peft, kind)(**SETTINGS[kind])))


def called(model, batch, kind=""):
    # Where these versions cannot compute the batch, upstream's own error is returned as text.
    if kind.startswith("Multitask"):
        batch = {**batch, "task_ids": torch.zeros(len(batch["input_ids"]), dtype=torch.long)}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return model(**batch).logits
        except errors.Fa2PatchError:
            raise
        except Exception as error:
            return f"{type(error).__name__}: {error}"


def same(found, expected):
    return found == expected if isinstance(expected, str) else torch.equal(found, expected)


def refused(call, match="virtual tokens"):
    with pytest.raises(errors.PackingNotIsolated, match=match):
        call()


def assert_as_alone(model):
    # The reference is the model without an adapter.
    expected = alone(tiny_models.build("llama", "eager"), DOCS)
    assert_close(model(**pack(DOCS)).logits[0], expected, "logits without the adapter")


def forms_of_packing():
    forms = {way: told(DOCS, way) for way in WAYS}
    return {**forms, "a mask of ones": {**pack(DOCS), "attention_mask": torch.ones(1, 17, dtype=torch.long)}}


def other_batches():
    ids = torch.randint(3, tiny_configs.VOCABULARY, (2, 6), generator=torch.Generator().manual_seed(1))
    ones = torch.ones_like(ids)
    right, left = ones.clone(), ones.clone()
    right[1, 4:], left[1, :2] = 0, 0
    return {
        "ids alone": {"input_ids": ids},
        "dense": {"input_ids": ids, "attention_mask": ones},
        "padded on the right": {"input_ids": ids, "attention_mask": right},
        "padded on the left": {"input_ids": ids, "attention_mask": left},
        "one document a row": {"input_ids": ids, "position_ids": torch.arange(6).expand(2, 6)},
    }


def test_every_kind_of_this_peft_is_tried():
    def below(cls):
        return {cls}.union(*(below(sub) for sub in cls.__subclasses__()))

    base = peft.PromptLearningConfig
    assert {cls.__name__ for cls in below(base) - {base} if cls.__module__.startswith("peft.")} == {*KINDS}


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("kind", KINDS)
def test_packed_rows_are_refused(kind, order):
    model = adapted(kind, order)
    for batch in forms_of_packing().values():
        refused(lambda batch=batch: called(model, batch, kind), r"virtual tokens.*(LoRA|padded)")
    refused(lambda: called(model, pack(DOCS), kind), "3 documents in 1 row")


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("kind", KINDS)
def test_every_other_batch_goes_on_as_before(kind, order):
    before, model = adapted(kind), adapted(kind, order)
    for name, batch in other_batches().items():
        assert same(called(model, batch, kind), called(before, batch, kind)), name
    fa2patch.revert(model)
    for batch in forms_of_packing().values():
        assert same(called(model, batch, kind), called(before, batch, kind))


@pytest.mark.parametrize("order", ORDERS)
def test_a_direct_call_of_forward_and_generate_are_looked_at_too(order):
    model = adapted("PromptTuningConfig", order)
    refused(lambda: model.forward(**pack(DOCS)))
    refused(lambda: model.generate(**pack(DOCS), max_new_tokens=2))
    ids = documents(7)[0][None]
    given = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "max_new_tokens": 3, "do_sample": False}
    before = adapted("PromptTuningConfig").generate(**given)
    assert torch.equal(model.generate(**given), before)


@pytest.mark.parametrize("order", ORDERS)
def test_training_on_packed_rows_is_refused_and_on_padded_ones_is_not(order):
    model = adapted("PromptTuningConfig", order).train()
    refused(lambda: model(**pack(DOCS), labels=pack(DOCS)["input_ids"]))
    ids = documents(7)[0][None]
    model(input_ids=ids, attention_mask=torch.ones_like(ids), labels=ids).loss.backward()
    assert any(p.grad is not None and p.grad.abs().sum() > 0 for p in model.parameters())


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("task", ["SEQ_CLS", "FEATURE_EXTRACTION"])
def test_wrappers_for_other_tasks_refuse_too(task, order):
    cls = {"SEQ_CLS": transformers.LlamaForSequenceClassification, "FEATURE_EXTRACTION": transformers.LlamaModel}[task]
    model = cls(tiny_models.build("llama", "sdpa").config).eval()

    def wrap(model):
        try:
            return peft.get_peft_model(model, peft.PromptTuningConfig(task_type=task, num_virtual_tokens=VIRTUAL))
        except TypeError as error:
            assert "low_cpu_mem_usage" in str(error)
            pytest.skip(f"PEFT {peft.__version__} cannot make one: {error}")

    wrapped = in_order(order, model, wrap)
    refused(lambda: wrapped(**pack(DOCS)))


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("kind", KINDS)
def test_where_the_adapter_is_disabled_the_model_computes_packed_rows(kind, order):
    model = adapted(kind, order)
    with model.disable_adapter():
        assert_as_alone(model)
    refused(lambda: called(model, pack(DOCS), kind))


def test_an_object_that_kept_its_classs_forward_from_before_apply_is_refused_too():
    # PEFT leaves the bound forward on the object when ``disable_adapter`` ends. accelerate wraps it there.
    inner = tiny_models.build("llama", "sdpa")
    model = adapted("PromptTuningConfig", model=inner)
    with model.disable_adapter():
        pass
    fa2patch.apply(inner)
    refused(lambda: called(model, pack(DOCS)))
    with model.disable_adapter():
        assert_as_alone(model)


@pytest.mark.parametrize("order", ORDERS)
def test_a_lora_beside_the_prompt_is_not_refused(order):
    # Of two adapters of one model with separate wrappers, only the prompt's is refused.
    inner = tiny_models.build("llama", "sdpa")
    prompt = adapted("PromptTuningConfig", order, model=inner)
    other = with_lora(inner)
    with contextlib.ExitStack() as off:
        off.callback(fa2patch.revert, inner)
        found = other(**pack(DOCS)).logits[0]
        refused(lambda: called(prompt, pack(DOCS)))
    assert_close(found, alone(other, DOCS), "logits with LoRA")


def test_a_switch_to_lora_is_seen():
    # In some versions one wrapper can hold both. Then the active adapter decides.
    model = adapted("PromptTuningConfig", "peft first")
    model.peft_config["low_rank"] = peft.LoraConfig(**LORA)
    model.base_model = peft.LoraModel(model.base_model, {"low_rank": peft.LoraConfig(**LORA)}, "low_rank")
    model.active_adapter = "low_rank"
    found = model(**pack(DOCS)).logits[0]
    fa2patch.revert(model.base_model.model)
    assert_close(found, alone(model, DOCS), "logits with LoRA")


def test_an_unpatched_model_is_left_alone_beside_a_patched_one():
    patched, other = adapted("PromptTuningConfig", "peft first"), adapted("PromptTuningConfig")
    expected = called(adapted("PromptTuningConfig"), pack(DOCS))
    assert torch.equal(called(other, pack(DOCS)), expected)
    assert fa2patch.status(patched) is not None


def test_a_copy_is_refused_too():
    model = adapted("PromptTuningConfig", "peft first")
    copied = copy.deepcopy(model)
    fa2patch.revert(model)
    refused(lambda: called(copied, pack(DOCS)))


def test_revert_leaves_no_trace_in_peft():
    def spaces():
        module = sys.modules["peft.peft_model"]
        classes = [value for value in vars(module).values() if isinstance(value, type)]
        return [dict(vars(space)) for space in (module, *classes)]

    gc.collect()  # what covers a binding of another test may be gone, and not collected
    before = spaces()
    for order in ORDERS:
        model = adapted("PromptTuningConfig", order)
        assert spaces() != before
        fa2patch.revert(model)
        assert spaces() == before
    del model
    adapted("PromptTuningConfig", "peft first")
    gc.collect()
    assert spaces() == before, "a model that is gone"


@pytest.mark.slow
@pytest.mark.parametrize("order", ORDERS)
def test_compiled(order):
    model = torch.compile(adapted("PromptTuningConfig", order), backend="eager")
    refused(lambda: called(model, pack(DOCS)))
    batch = other_batches()["padded on the right"]
    assert_close(called(model, batch), called(adapted("PromptTuningConfig"), batch), "padded")


LATER = """
import sys
import fa2patch
from compat_matrix import tiny_models
from compat_matrix.check.rows import documents, pack

model = tiny_models.build("llama", "sdpa")
loaded = {name for name in sys.modules if name.split(".")[0] == "peft"}
assert not loaded, loaded
reverted = tiny_models.build("llama", "sdpa")
patch = fa2patch.apply(model)
fa2patch.apply(reverted).revert()
assert not {name for name in sys.modules if name.split(".")[0] == "peft"}, "fa2patch must not import it"

import peft

wrapped = peft.get_peft_model(model, peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3))
try:
    wrapped(**pack(documents(5, 9)))
except fa2patch.errors.PackingNotIsolated as error:
    assert "virtual tokens" in str(error)
else:
    raise AssertionError("not refused")


def bound():
    classes = [value for value in vars(sys.modules["peft.peft_model"]).values() if isinstance(value, type)]
    codes = [getattr(value, "__code__", None) for cls in classes for value in vars(cls).values()]
    return [code for code in codes if getattr(code, "co_filename", "").endswith("peft_models.py")]


assert bound()
patch.revert()
assert not bound()
"""


@pytest.mark.slow
def test_peft_may_be_imported_after_apply():
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", LATER], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
