"""Remote code is loaded as users load it: a hand-written checkpoint for each seam, and two that must be refused."""

import copy
import dataclasses
import io
import json
import pickle
import shutil
import sys
from pathlib import Path

import pytest
import torch
import transformers
from packed_rows import assert_equals_alone, assert_nothing_crosses, leaks, logits
from transformers import AutoModelForCausalLM, dynamic_module_utils

import fa2patch
from compat_matrix import tiny_models
from compat_matrix.check.compare import assert_close
from compat_matrix.check.rows import alone, documents
from fa2patch import errors

STYLES = {"fused_qkv": "formula", "latent": "formula", "sinks": "interface"}
MIXTURE = "sinks"
# This style loads with flash attention even without flash-attn, since its file chooses the class by itself.
FLASH = ("fused_qkv", {"attn_implementation": "flash_attention_2"})
LENGTHS = (5, 9, 1, 3)

registry = sys.modules["fa2patch.upstream.architectures"]
every_style = pytest.mark.parametrize("style", STYLES)


@pytest.fixture(scope="module", autouse=True)
def modules(tmp_path_factory):
    # Copies of remote code are in a temporary folder. The imported modules are removed afterwards.
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path_factory.mktemp("modules")))
        patched.setattr(sys, "path", list(sys.path))
        yield
    for name in imported():
        del sys.modules[name]


def imported():
    return [name for name in sys.modules if name.split(".")[0] == "transformers_modules"]


@pytest.fixture(scope="module")
def checkpoint(modules, tmp_path_factory):
    # A style's folder has the same weights every time.
    written = {}

    def folder(style):
        if style == MIXTURE and not hasattr(transformers.modeling_utils, "ALL_ATTENTION_FUNCTIONS"):
            pytest.skip(
                f"Transformers {transformers.__version__} has no ALL_ATTENTION_FUNCTIONS for this file to import"
            )
        if style not in written:
            written[style] = tmp_path_factory.mktemp("checkpoints") / style
            shutil.copytree(Path(__file__).parent / "remote_code" / style, written[style])
            reference = json.loads((written[style] / "config.json").read_text())["auto_map"]["AutoModelForCausalLM"]
            cls = dynamic_module_utils.get_class_from_dynamic_module(reference, str(written[style]))
            model = cls(cls.config_class())
            tiny_models.scale_up(model)
            model.save_pretrained(written[style])
        return written[style]

    return folder


@pytest.fixture
def load(checkpoint, monkeypatch):
    # Models are reverted after the test.
    monkeypatch.setattr(AutoModelForCausalLM._model_mapping, "_extra_content", {})
    monkeypatch.setattr(registry, "_rows", dict(registry._rows))
    loaded = []

    def from_pretrained(style, folder=None, **options):
        folder = folder or checkpoint(style)
        loaded.append(AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True, **options).eval())
        return loaded[-1]

    yield from_pretrained
    for model in loaded:
        fa2patch.revert(model)


@pytest.fixture
def docs():
    return documents(*LENGTHS)


def namespaces(model):
    # All attributes that a patch could touch. Their values are kept alive, so that identities stay valid.
    classes = {cls for module in model.modules() for cls in type(module).__mro__ if "transformers_modules" in str(cls)}
    owners = [*classes, *{sys.modules[cls.__module__] for cls in classes}, *model.modules()]
    return [(owner, name, value) for owner in owners for name, value in vars(owner).items()]


def same(before, after):
    return len(before) == len(after) and all(a is b for old, new in zip(before, after) for a, b in zip(old, new))


@every_style
def test_it_is_patched_without_a_row(style, load):
    model = load(style)
    assert type(model).__module__.startswith("transformers_modules.")
    layers = fa2patch.apply(model).layers
    assert [layer.name.rpartition(".")[0] for layer in layers] == ["layers.0", "layers.1"]
    assert {(layer.seam, layer.state) for layer in layers} == {(STYLES[style], "applied")}


@pytest.mark.parametrize("style, options", [*((style, {}) for style in STYLES), FLASH], ids=str)
def test_packed_equals_alone(style, options, load, docs):
    model, reference = load(style, **options), load(style)
    assert leaks(reference, docs, alone(reference, docs))
    fa2patch.apply(model)
    assert_equals_alone(model, reference, docs)


@every_style
def test_nothing_crosses(style, load, docs):
    fa2patch.apply(model := load(style))
    assert_nothing_crosses(model, docs, exactly=style != MIXTURE)


def test_dynamic_rope_scaling_goes_by_the_document_not_by_the_row(load, docs):
    options = {"rope_scaling": {"type": "dynamic", "factor": 2.0}, "max_position_embeddings": 9}
    expected = alone(load("fused_qkv", **options), docs)
    fa2patch.apply(model := load("fused_qkv", **options))
    assert_close(logits(model, docs), expected, "logits")
    with pytest.raises(errors.PackingNotIsolated, match="'dynamic' stretches positions"):
        logits(model, documents(10, 3))


@every_style
def test_revert_leaves_everything_as_found(style, load, docs):
    model = load(style)
    before, found = logits(model, docs), namespaces(model)
    with fa2patch.apply(model):
        logits(model, docs)
        assert not same(found, namespaces(model))
    assert same(found, namespaces(model))
    assert torch.equal(logits(model, docs), before)


@every_style
def test_a_pickle_is_patched_where_the_remote_code_is_yet_to_be_imported(style, load, docs, monkeypatch):
    model = load(style)
    try:
        pickle.dumps(model)
    except pickle.PicklingError as error:
        pytest.skip(f"Transformers {transformers.__version__} loads it as a class that no pickle finds: {error}")
    expected = alone(model, docs)
    fa2patch.apply(model)
    torch.save(model, saved := io.BytesIO())
    for name in imported():
        monkeypatch.delitem(sys.modules, name)
    saved.seek(0)
    loaded = torch.load(saved, weights_only=False)
    assert type(loaded) is not type(model)
    assert_close(logits(loaded, docs), expected, "the loaded model's logits")
    assert_close(logits(model, docs), expected, "the first model's logits")
    fa2patch.revert(loaded)


@every_style
def test_a_patched_model_saved_is_remote_code_as_before(style, load, docs, tmp_path):
    model = load(style)
    before = logits(model, docs)
    fa2patch.apply(model)
    model.save_pretrained(tmp_path / style)
    assert not any(
        "fa2patch" in file.read_text() for ending in ("py", "json") for file in tmp_path.rglob(f"*.{ending}")
    )
    again = load(style, tmp_path / style)
    assert type(again).__module__.startswith("transformers_modules.") and fa2patch.status(again) is None
    assert torch.equal(logits(again, docs), before)


@every_style
def test_of_two_revisions_loaded_at_once_only_one_is_patched(style, load, docs, checkpoint, tmp_path):
    models = []
    for revision in ("a" * 40, "b" * 40):
        shutil.copytree(checkpoint(style), tmp_path / f"models--somebody--{style}" / "snapshots" / revision)
        models.append(load(style, f"somebody/{style}", revision=revision, cache_dir=tmp_path))
    first, second = models
    assert type(first).__module__.replace("a" * 40, "b" * 40) == type(second).__module__ != type(first).__module__
    expected, leaking = alone(first, docs), logits(second, docs)
    fa2patch.apply(first)
    assert_close(logits(first, docs), expected, "the patched one's logits")
    assert torch.equal(logits(second, docs), leaking)
    fa2patch.apply(second)
    fa2patch.revert(first)
    assert torch.equal(logits(first, docs), leaking)
    assert_close(logits(second, docs), expected, "the other one's logits")


class TestExecutedAgain:
    # Transformers 4.39 to 4.42 execute a modeling file again, in the same module, whenever a model is loaded. Later
    # versions do so if the file has changed.

    @staticmethod
    def execute(model):
        module = sys.modules[type(model).__module__]
        module.__spec__.loader.exec_module(module)

    @every_style
    def test_a_model_loaded_before_can_be_patched(self, style, load, docs):
        model = load(style)
        expected = alone(model, docs)
        self.execute(model)
        fa2patch.apply(model)
        assert_close(logits(model, docs), expected, "logits")

    @every_style
    def test_a_model_patched_before_and_its_copies_never_leak_in_silence(self, style, load, docs):
        model = load(style)
        expected = alone(model, docs)
        patch = fa2patch.apply(model)
        self.execute(model)
        self.isolated_or_loud(model, docs, expected)
        copied = copy.deepcopy(model)
        self.isolated_or_loud(copied, docs, expected)
        assert {layer.state for layer in patch.layers} <= {"applied", "covered"}
        fa2patch.revert(model)
        assert leaks(model, docs, expected)
        self.isolated_or_loud(copied, docs, expected)
        fa2patch.revert(copied)
        assert leaks(copied, docs, expected)

    @staticmethod
    def isolated_or_loud(model, docs, expected):
        try:
            found = logits(model, docs)
        except (TypeError, errors.PackingNotIsolated):
            return
        assert_close(found, expected, "logits")


class TestRegister:
    # A registry row states what cannot be found by looking at the modeling file.

    def test_refuse(self, load):
        def of_alibi(config):
            return "its alibi is in the mask, which packed rows do without" if config.alibi else None

        fa2patch.register(fa2patch.Architecture("fused_qkv", refuse=of_alibi))
        with fa2patch.apply(load("fused_qkv")) as patch:
            assert patch.architecture.refuse is of_alibi
        model = load("fused_qkv", alibi=True)
        found = namespaces(model)
        with pytest.raises(errors.UnsupportedModel, match="FusedQkvForCausalLM .* its alibi is in the mask"):
            fa2patch.apply(model)
        assert same(found, namespaces(model)) and fa2patch.status(model) is None

    def test_adjust(self, load, docs):
        model = load("sinks", attn_logit_cap=0.5)
        expected = alone(model, docs)
        with fa2patch.apply(model):
            assert leaks(model, docs, expected)
        modules = set()

        def capped(module, options):
            modules.add(module)
            return dataclasses.replace(options, softcap=module.config.attn_logit_cap)

        fa2patch.register(fa2patch.Architecture("sinks", adjust=capped))
        with fa2patch.apply(model, prove=False):
            assert_close(logits(model, docs), expected, "logits")
        assert modules == {layer.self_attn for layer in model.model.layers}

    def test_a_row_of_another_name(self, load):
        fa2patch.register(fa2patch.Architecture("mine", refuse=lambda config: "of a reason"))
        with pytest.raises(errors.UnsupportedModel, match="of a reason"):
            fa2patch.apply(load("latent"), architecture="mine")


class TestRefusals:
    # A refused model must be left unchanged.

    @staticmethod
    def refused(model, error, match):
        found = namespaces(model)
        with pytest.raises(error, match=match):
            fa2patch.apply(model)
        assert same(found, namespaces(model)) and fa2patch.status(model) is None

    def test_attention_that_is_called_directly(self, load):
        self.refused(load("core_attention"), errors.LayerNotPatchable, "CoreAttention does not say whether")

    def test_one_such_layer_among_others(self, load):
        model = load("latent")
        model.model.layers[1].self_attn = load("core_attention").transformer.encoder.layers[0].self_attention
        self.refused(model, errors.LayerNotPatchable, "CoreAttention does not say whether")

    def test_state_along_the_row(self, load):
        self.refused(load("time_mixing"), errors.UnsupportedModel, r"TimeMix .* at blocks\.0\.att ")

    @pytest.mark.parametrize("mixer", ["TimeMix", "GRU"])
    def test_state_beside_attention(self, mixer, load):
        model = load("latent")
        state = torch.nn.GRU(32, 32) if mixer == "GRU" else load("time_mixing").rwkv.blocks[0].att
        model.model.layers[1].mixer = state
        self.refused(model, errors.UnsupportedModel, rf"{mixer} .* at layers\.1\.mixer\b")
