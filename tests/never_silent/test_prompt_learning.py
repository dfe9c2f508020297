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

import fa2patch
from compat_matrix import tiny_configs, tiny_models
from compat_matrix.check.compare import assert_close
from compat_matrix.check.rows import alone, documents, pack
from fa2patch import errors

peft = pytest.importorskip("peft")

VIRTUAL = 3
LENGTHS = (5, 9, 3)
ORDERS = ("apply first", "peft first", "peft first, apply to the model inside")
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
    if order == "apply first":
        fa2patch.apply(model)
    torch.manual_seed(3)
    wrapped = peft.get_peft_model(model, getattr(peft, kind)(**SETTINGS[kind])).eval()
    if order == "peft first":
        fa2patch.apply(wrapped)
    elif order:
        fa2patch.apply(model)
    return wrapped


def lora():
    return peft.LoraConfig(
        r=2, target_modules=["q_proj", "v_proj"], init_lora_weights=False, task_type="CAUSAL_LM", lora_dropout=0.0
    )


def called(model, batch, kind=""):
    """Return the logits, or upstream's own error as text where these versions cannot compute the batch."""
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


def forms_of_packing():
    row = pack(documents(*LENGTHS))
    ids = {"input_ids": row["input_ids"]}
    ends = torch.tensor([0, 5, 14, 17], dtype=torch.int32)
    numbers = torch.cat([torch.full((n,), i + 1) for i, n in enumerate(LENGTHS)])[None]
    return {
        "position_ids": row,
        "position_ids and a mask of ones": {**row, "attention_mask": torch.ones_like(numbers)},
        "cu_seq_lens": {**ids, "cu_seq_lens_q": ends, "cu_seq_lens_k": ends, "max_length_q": 9, "max_length_k": 9},
        "seq_idx": {**ids, "seq_idx": numbers.int() - 1},
        "document numbers": {**ids, "attention_mask": numbers},
    }


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
        with pytest.raises(errors.PackingNotIsolated, match=r"virtual tokens.*(LoRA|padded)"):
            called(model, batch, kind)
    with pytest.raises(errors.PackingNotIsolated, match="3 documents in 1 row"):
        called(model, pack(documents(*LENGTHS)), kind)


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
    row = pack(documents(*LENGTHS))
    for call in (model.forward, lambda **batch: model.generate(**batch, max_new_tokens=2)):
        with pytest.raises(errors.PackingNotIsolated, match="virtual tokens"):
            call(**row)
    ids = documents(7)[0][None]
    given = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "max_new_tokens": 3, "do_sample": False}
    before = adapted("PromptTuningConfig").generate(**given)
    assert torch.equal(model.generate(**given), before)


@pytest.mark.parametrize("order", ORDERS)
def test_training_on_packed_rows_is_refused_and_on_padded_ones_is_not(order):
    model = adapted("PromptTuningConfig", order).train()
    row = pack(documents(*LENGTHS))
    with pytest.raises(errors.PackingNotIsolated, match="virtual tokens"):
        model(**row, labels=row["input_ids"])
    ids = documents(7)[0][None]
    model(input_ids=ids, attention_mask=torch.ones_like(ids), labels=ids).loss.backward()
    assert any(p.grad is not None and p.grad.abs().sum() > 0 for p in model.parameters())


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("task", ["SEQ_CLS", "FEATURE_EXTRACTION"])
def test_wrappers_for_other_tasks_refuse_too(task, order):
    cls = {"SEQ_CLS": transformers.LlamaForSequenceClassification, "FEATURE_EXTRACTION": transformers.LlamaModel}[task]
    model = cls(tiny_models.build("llama", "sdpa").config).eval()
    if order == "apply first":
        fa2patch.apply(model)
    try:
        wrapped = peft.get_peft_model(model, peft.PromptTuningConfig(task_type=task, num_virtual_tokens=VIRTUAL))
    except TypeError as error:
        assert "low_cpu_mem_usage" in str(error)
        pytest.skip(f"PEFT {peft.__version__} cannot make one: {error}")
    if order != "apply first":
        fa2patch.apply(wrapped if order == "peft first" else model)
    with pytest.raises(errors.PackingNotIsolated, match="virtual tokens"):
        wrapped(**pack(documents(*LENGTHS)))


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("kind", KINDS)
def test_where_the_adapter_is_disabled_the_model_computes_packed_rows(kind, order):
    docs = documents(*LENGTHS)
    model = adapted(kind, order)
    expected = alone(tiny_models.build("llama", "eager"), docs)
    with model.disable_adapter():
        assert_close(model(**pack(docs)).logits[0], expected, "logits without the adapter")
    with pytest.raises(errors.PackingNotIsolated, match="virtual tokens"):
        called(model, pack(docs), kind)


def test_an_object_that_kept_its_classs_forward_from_before_apply_is_refused_too():
    """PEFT leaves the bound forward on the object when ``disable_adapter`` ends; accelerate wraps it there."""
    inner = tiny_models.build("llama", "sdpa")
    model = adapted("PromptTuningConfig", model=inner)
    with model.disable_adapter():
        pass
    fa2patch.apply(inner)
    with pytest.raises(errors.PackingNotIsolated, match="virtual tokens"):
        called(model, pack(documents(*LENGTHS)))
    with model.disable_adapter():
        assert_close(
            model(**pack(documents(*LENGTHS))).logits[0],
            alone(tiny_models.build("llama", "eager"), documents(*LENGTHS)),
            "logits without the adapter",
        )


@pytest.mark.parametrize("order", ORDERS)
def test_a_lora_beside_the_prompt_is_not_refused(order):
    """Of two adapters of one model with separate wrappers, only the prompt's is refused."""
    docs = documents(*LENGTHS)
    inner = tiny_models.build("llama", "sdpa")
    prompt = adapted("PromptTuningConfig", order, model=inner)
    other = peft.get_peft_model(inner, lora()).eval()
    with contextlib.ExitStack() as off:
        off.callback(fa2patch.revert, inner)
        found = other(**pack(docs)).logits[0]
        with pytest.raises(errors.PackingNotIsolated, match="virtual tokens"):
            called(prompt, pack(docs))
    assert_close(found, alone(other, docs), "logits with LoRA")


def test_a_switch_to_lora_is_seen():
    """In some versions one wrapper can hold both; then the active adapter decides."""
    docs = documents(*LENGTHS)
    model = adapted("PromptTuningConfig", "peft first")
    model.peft_config["low_rank"] = lora()
    model.base_model = peft.LoraModel(model.base_model, {"low_rank": lora()}, "low_rank")
    model.active_adapter = "low_rank"
    found = model(**pack(docs)).logits[0]
    fa2patch.revert(model.base_model.model)
    assert_close(found, alone(model, docs), "logits with LoRA")


def test_an_unpatched_model_is_left_alone_beside_a_patched_one():
    patched, other = adapted("PromptTuningConfig", "peft first"), adapted("PromptTuningConfig")
    expected = called(adapted("PromptTuningConfig"), pack(documents(*LENGTHS)))
    assert torch.equal(called(other, pack(documents(*LENGTHS))), expected)
    assert fa2patch.status(patched) is not None


def test_a_copy_is_refused_too():
    model = adapted("PromptTuningConfig", "peft first")
    copied = copy.deepcopy(model)
    fa2patch.revert(model)
    with pytest.raises(errors.PackingNotIsolated, match="virtual tokens"):
        called(copied, pack(documents(*LENGTHS)))


def test_revert_leaves_no_trace_in_peft():
    def spaces():
        module = sys.modules["peft.peft_model"]
        classes = [value for value in vars(module).values() if isinstance(value, type)]
        return [dict(vars(space)) for space in (module, *classes)]

    gc.collect()
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
    with pytest.raises(errors.PackingNotIsolated, match="virtual tokens"):
        called(model, pack(documents(*LENGTHS)))
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
