"""FlashAttention 2, 3, 4 and the hub's builds, each replaced by a stand-in with its signature."""

import functools
import importlib.util
import json
import sys
from dataclasses import replace
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace

import pytest
import torch
from definition_cases import asks, errors_of, sinks_of

from compat_matrix.check import stand_in
from compat_matrix.check.kernel_cases import LENGTHS, WINDOWS, brute_force, documents, largest_errors, states
from fa2patch import kernels
from fa2patch.errors import KernelUnavailable
from fa2patch.kernels import Options, trial, varlen
from fa2patch.kernels.varlen import FlashAttn, FlashAttn3, FlashAttn4, Hub

MODULES = {"flash_attn": "flash_attn", "flash_attn_3": "flash_attn_interface", "flash_attn_4": "flash_attn.cute"}
asks_cuda = functools.partial(asks, device="cuda")

# Builds with the signature of each generation


def flash_attn_2_1(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p=0.0, softmax_scale=None,
                   causal=False, return_attn_probs=False):  # fmt: skip
    return stand_in.flash_attn_varlen_func(
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p, softmax_scale, causal
    )


def flash_attn_3(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, seqused_q=None, seqused_k=None,
                 softmax_scale=None, causal=False, qv=None, q_descale=None, k_descale=None, v_descale=None,
                 window_size=(-1, -1), attention_chunk=0, softcap=0.0, num_splits=1, pack_gqa=None,
                 deterministic=False, sm_margin=0, return_attn_probs=False):  # fmt: skip
    return stand_in.flash_attn_varlen_func(
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, 0.0, softmax_scale, causal, window_size,
        softcap,
    )  # fmt: skip


def flash_attn_4(q, k, v, qv=None, cu_seqlens_q=None, cu_seqlens_k=None, max_seqlen_q=None, max_seqlen_k=None,
                 min_seqlen_k=None, seqused_q=None, seqused_k=None, page_table=None, softmax_scale=None, causal=False,
                 window_size=(None, None), learnable_sink=None, softcap=0.0, num_splits=1, pack_gqa=None,
                 deterministic=False, score_mod=None, return_lse=False):  # fmt: skip
    # 4.0.0b36 returns ``(output, log-sum-exp or None)``. The second one is None here.
    options = Options(
        scale=softmax_scale, causal=causal, softcap=softcap or None, sinks=learnable_sink,
        window=None if window_size[0] is None else window_size[0] + 1,
    )  # fmt: skip
    ends = cu_seqlens_q.tolist()
    lengths = [b - a for a, b in zip(ends, ends[1:])]
    return kernels.named("reference")(q, k, v, documents(lengths), options), None


BUILDS = {"flash_attn": stand_in.flash_attn_varlen_func, "flash_attn_3": flash_attn_3, "flash_attn_4": flash_attn_4}


@pytest.fixture
def install(monkeypatch):
    # A function of None means that the package is not installed.
    monkeypatch.setattr(varlen, "entry_points", {})

    def put(function, name="flash_attn", **attributes):
        module = None
        if function is not None:
            module = ModuleType(name)
            module.__spec__ = ModuleSpec(name, loader=None, is_package=True)
            module.flash_attn_varlen_func = function
            vars(module).update(attributes)
        if name == "flash_attn.cute":
            parent = ModuleType("flash_attn")
            parent.__path__ = []
            monkeypatch.setitem(sys.modules, "flash_attn", parent)
        monkeypatch.setitem(sys.modules, name, module)
        varlen.entry_points.clear()
        return module

    return put


@pytest.fixture
def flash_attn(install):
    calls = []

    @functools.wraps(stand_in.flash_attn_varlen_func)
    def flash_attn_varlen_func(q, k, v, **kwargs):
        calls.append({"q": q, "k": k, "v": v, **kwargs})
        return stand_in.flash_attn_varlen_func(q, k, v, **kwargs)

    install(flash_attn_varlen_func)
    yield calls
    stand_in.CALLS.clear()


@pytest.fixture
def hub(install, monkeypatch):
    # The list of outcomes (errors or builds), and what was asked for. With no outcome left, the package gives a build.
    outcomes, asked, package = [], [], ModuleType("kernels")

    def get_kernel(repo_id, revision=None):
        asked.append((repo_id, revision))
        outcome = outcomes.pop(0) if outcomes else SimpleNamespace(flash_attn_varlen_func=flash_attn_2_8)
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    package.__spec__, package.get_kernel = ModuleSpec("kernels", loader=None), get_kernel
    monkeypatch.setitem(sys.modules, "kernels", package)
    install(None)
    return SimpleNamespace(outcomes=outcomes, asked=asked)


# Numbers


@pytest.mark.parametrize("groups", [1, 4], ids=["MHA", "MQA"])
@pytest.mark.parametrize("scale", [None, 0.7])
@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("window", WINDOWS.values(), ids=WINDOWS)
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "both ways"])
def test_flash_attn_equals_the_definition(flash_attn, causal, window, softcap, scale, groups):
    options = Options(causal=causal, window=window, softcap=softcap, scale=scale)
    assert errors_of(FlashAttn(), options, groups=groups) < 1e-11


@pytest.mark.parametrize("kernel", [FlashAttn3(), FlashAttn4()], ids=["3", "4"])
@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("window", [None, 1, 4])
@pytest.mark.parametrize("sinks", [False, True], ids=["no sinks", "sinks"])
def test_later_generations_equal_the_definition(install, kernel, window, softcap, sinks):
    install(BUILDS[kernel.name], MODULES[kernel.name])
    assert kernel.available() == (True, "")
    needed = [name for name, there in (("window", window), ("softcap", softcap), ("sinks", sinks)) if there]
    lacks = sinks and kernel.name == "flash_attn_3"
    assert kernel.supports(asks_cuda(needed)) == ((False, "it has no sinks") if lacks else (True, ""))
    if not lacks:
        options = Options(window=window, softcap=softcap, sinks=sinks_of(sinks))
        assert errors_of(kernel, options) < 1e-11


@pytest.mark.parametrize(("dim", "value_dim"), [(12, 12), (12, 8), (8, 12), (20, 6)], ids=str)
def test_head_dimensions_that_a_kernel_lacks_are_padded(flash_attn, dim, value_dim):
    assert errors_of(FlashAttn(), Options(), dim=dim, value_dim=value_dim) < 1e-11
    (call,) = flash_attn
    assert call["q"].shape[-1] == call["k"].shape[-1] == call["v"].shape[-1]
    assert call["q"].shape[-1] % 8 == 0


def test_an_older_flash_attn_computes_what_it_has(install):
    install(flash_attn_2_1)
    assert FlashAttn().supports(asks_cuda()) == (True, "")
    assert errors_of(FlashAttn(), Options()) < 1e-12


# Arguments of the calls


def test_flash_attn_is_handed_the_boundaries_as_they_are(flash_attn):
    q, k, v = states()
    boundaries = replace(documents(LENGTHS), max_seqlen=11)
    FlashAttn()(q, k, v, boundaries, Options())
    (call,) = flash_attn
    assert call["q"] is q and call["k"] is k and call["v"] is v
    assert call["cu_seqlens_q"] is call["cu_seqlens_k"] is boundaries.cu_seqlens
    assert call["max_seqlen_q"] == call["max_seqlen_k"] == 11
    assert type(call["max_seqlen_q"]) is type(call["max_seqlen_k"]) is int
    assert boundaries._lengths is None, "the lengths were read from the device"


OPTIONAL = {"window_size", "softcap", "alibi_slopes", "dropout_p"}


@pytest.mark.parametrize(
    ("options", "handed"),
    [
        (Options(), {"softmax_scale": 8**-0.5, "causal": True}),
        (Options(scale=0.3), {"softmax_scale": 0.3}),
        (Options(dropout=0.1), {"dropout_p": 0.1}),
        (Options(causal=False), {"causal": False}),
        (Options(window=1), {"window_size": (0, 0)}),
        (Options(window=4), {"window_size": (3, 0)}),
        (Options(window=4, causal=False), {"window_size": (3, 3)}),
        (Options(softcap=30.0), {"softcap": 30.0}),
    ],
    ids=str,
)
def test_flash_attn_is_handed_the_options_and_nothing_that_was_not_asked_for(flash_attn, options, handed):
    FlashAttn()(*states(), documents(LENGTHS), options)
    (call,) = flash_attn
    assert {name: call[name] for name in handed} == handed
    assert OPTIONAL & set(call) == OPTIONAL & set(handed)


def test_flash_attn_is_handed_alibi_slopes_in_float32(flash_attn):
    slopes = torch.tensor([0.5, 0.25, 0.125, 0.0625], dtype=torch.bfloat16)
    FlashAttn()(*states(), documents(LENGTHS), Options(alibi_slopes=slopes))
    (call,) = flash_attn
    assert call["alibi_slopes"].dtype == torch.float32
    assert torch.equal(call["alibi_slopes"], slopes.float())


@pytest.mark.parametrize("deterministic", [True, False])
def test_flash_attn_is_deterministic_where_torch_is_asked_to_be(flash_attn, deterministic):
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(deterministic)
    try:
        FlashAttn()(*states(), documents(LENGTHS), Options())
    finally:
        torch.use_deterministic_algorithms(before)
    assert flash_attn[0]["deterministic"] is deterministic


def test_a_build_that_refuses_to_be_deterministic_fails_its_trial_only_then(install):
    # FlashAttention 4 does so on compute capability 12: ``_flash_attn_bwd`` in flash_attn/cute/interface.py.

    @functools.wraps(flash_attn_4)
    def refusing(q, k, v, deterministic, **more):
        assert deterministic is False, "deterministic backward not supported on SM 12.0"
        return flash_attn_4(q, k, v, **more)

    install(refusing, MODULES["flash_attn_4"])
    kernel = FlashAttn4()
    torch.use_deterministic_algorithms(True)
    try:
        able, reason = trial.passes_trial(kernel, asks(["deterministic"]), torch.device("cpu"))
    finally:
        torch.use_deterministic_algorithms(False)
    assert not able and reason.endswith("AssertionError: deterministic backward not supported on SM 12.0")
    assert trial.passes_trial(kernel, asks(), torch.device("cpu")) == (True, "")


@pytest.mark.parametrize("causal", [True, False])
def test_flash_attn_4_keeps_its_own_default_of_the_window(install, causal):
    # The default is ``(None, None)`` there and ``(-1, -1)`` in the others. Its parameters were moved: all go by name.
    seen = []

    @functools.wraps(flash_attn_4)
    def noting(*given, **more):
        seen.append((len(given), more))
        return flash_attn_4(*given, **more)

    install(noting, MODULES["flash_attn_4"])
    FlashAttn4()(*states(), documents(LENGTHS), Options(causal=causal))
    ((positional, more),) = seen
    assert positional == 3 and "window_size" not in more


# Availability and missing features


def test_a_kernel_that_is_not_installed_is_unavailable(install):
    install(None)
    assert FlashAttn().available() == (False, "the package flash_attn is not installed")
    with pytest.raises(KernelUnavailable) as error:
        kernels.check_name("flash_attn")
    assert error.value.message == (
        "kernel='flash_attn' cannot run here: the package flash_attn is not installed. Use kernel='auto'."
    )
    with pytest.raises(KernelUnavailable, match="kernel='flash_attn' cannot run here: the package flash_attn is not"):
        FlashAttn()(*states(), documents(LENGTHS), Options())


@pytest.mark.parametrize(
    ("needed", "missing"),
    [
        (["window"], "no window"),
        (["softcap"], "no softcap"),
        (["alibi"], "no alibi"),
        (["window", "softcap", "alibi"], "no window, no softcap, no alibi"),
        (["deterministic"], "no deterministic backward"),
    ],
    ids=str,
)
def test_what_an_older_flash_attn_lacks_is_refused(install, needed, missing):
    install(flash_attn_2_1)
    assert FlashAttn().supports(asks_cuda(needed)) == (False, f"it has {missing}")
    with pytest.raises(KernelUnavailable, match=f"kernel='flash_attn' cannot compute this layer: it has {missing}."):
        kernels.pick("flash_attn", asks_cuda(needed), torch.device("cuda"), try_it=False)


@pytest.mark.parametrize(
    ("asked", "reason"),
    [
        (asks(device="cpu"), "it needs a cuda device, found cpu"),
        (asks_cuda(["sinks"]), "it has no sinks"),
        (asks_cuda(dtype=torch.float32), "it needs float16 or bfloat16, found float32"),
        (asks_cuda(dtype=torch.float64), "it needs float16 or bfloat16, found float64"),
        (asks_cuda(dim=264), "its head dimensions end at 256, found 264"),
        (asks_cuda(dim=64, value_dim=512), "its head dimensions end at 256, found 512"),
    ],
    ids=["CPU", "sinks", "float32", "float64", "too large", "values too large"],
)
def test_what_flash_attn_does_not_support_has_a_reason(flash_attn, asked, reason):
    assert FlashAttn().supports(asked) == (False, reason)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("dim", [8, 60, 64, 96, 256])
def test_flash_attn_supports_half_precision_on_a_gpu(flash_attn, dim, dtype):
    everything = ["window", "softcap", "alibi", "dropout", "deterministic"]
    assert FlashAttn().available() == (True, "")
    assert FlashAttn().supports(asks_cuda(everything, dtype=dtype, dim=dim)) == (True, "")


@pytest.mark.parametrize("name", BUILDS)
def test_what_a_class_claims_its_newest_build_has(install, name):
    install(BUILDS[name], MODULES[name])
    assert kernels.named(name).features() == kernels.named(name).FEATURES


def test_a_package_that_does_not_import_is_not_available(install):
    del install(flash_attn_2_1).flash_attn_varlen_func
    able, reason = FlashAttn().available()
    assert not able
    assert reason.startswith("the package flash_attn does not import (AttributeError: ")


def test_a_stub_without_a_spec_is_not_available(install):
    install(flash_attn_2_1, __spec__=None)
    able, _ = FlashAttn().available()
    assert isinstance(able, bool)


def test_the_fourth_generation_is_not_there_where_only_the_second_is(install):
    install(flash_attn_2_1)
    assert FlashAttn4().available() == (False, "the package flash_attn.cute is not installed")


def test_a_package_whose_import_ran_out_of_memory_is_imported_again(install, monkeypatch):
    outcomes = [RuntimeError("CUDA error: out of memory"), install(stand_in.flash_attn_varlen_func)]

    def imported(name):
        outcome = outcomes.pop(0)
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    monkeypatch.setattr(varlen, "importlib", SimpleNamespace(util=importlib.util, import_module=imported))
    with pytest.raises(RuntimeError, match="out of memory"):
        kernels.check_name("flash_attn")
    kernels.check_name("flash_attn")


# The hub and compiled calls


def test_a_hub_build_loads_from_a_local_folder(install, tmp_path):
    pytest.importorskip("kernels")
    for variant in ("torch-cpu", "torch-universal"):  # different versions of the package look for different names
        package = tmp_path / "flash-attn2" / "build" / variant
        for folder in (package, package / "flash_attn2"):
            folder.mkdir(parents=True, exist_ok=True)
            (folder / "__init__.py").write_text("from compat_matrix.check.stand_in import flash_attn_varlen_func\n")
        (package / "metadata.json").write_text('{"version": 1, "python-depends": []}')
    kernel = kernels.named(f"hub:{tmp_path / 'flash-attn2'}")
    assert kernel.available() == (True, "")
    assert errors_of(kernel, Options(window=3)) < 1e-11


@torch.library.custom_op("fa2patch_tests::varlen", mutates_args=())
def varlen_operator(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu_seqlens: torch.Tensor, longest: int, scale: float
) -> torch.Tensor:
    return stand_in.flash_attn_varlen_func(q, k, v, cu_seqlens, cu_seqlens, longest, longest, 0.0, scale, True)


@varlen_operator.register_fake
def _(q, k, v, cu_seqlens, longest, scale):
    return torch.empty_like(q)


def flash_attn_2_8(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p=0.0, softmax_scale=None,
                   causal=False, window_size=(-1, -1), softcap=0.0, alibi_slopes=None,
                   deterministic=False):  # fmt: skip
    # Since 2.7 the function is an operator of torch, so torch.compile need not trace into it.
    return varlen_operator(q, k, v, cu_seqlens_q, max_seqlen_q, softmax_scale)


@pytest.mark.parametrize("kernel", ["flash_attn", "hub:someone/fast"])
def test_an_installed_build_does_not_break_the_graph(kernel, hub, install):
    install(flash_attn_2_8)
    run, (q, k, v) = kernels.named(kernel), states()
    assert run.available() == (True, "")
    compiled = torch.compile(run, backend="eager", fullgraph=True)
    output = compiled(q, k, v, documents(LENGTHS), Options())
    assert largest_errors([output], [brute_force(q, k, v, LENGTHS, Options())])[0] < 1e-12


def test_the_hub_is_asked_for_a_revision(hub):
    for name in ("hub", "hub:someone/fast", "hub:someone/fast@v2"):
        kernels.check_name(name)
    assert hub.asked == [("kernels-community/flash-attn2", "main"), ("someone/fast", "main"), ("someone/fast", "v2")]


def test_a_build_of_the_hub_is_one_kernel_whoever_asks():
    # One object has one trial, which counts for all models and layers.
    assert kernels.named("hub:a/b@v1") is kernels.named("hub:a/b@v1")
    assert kernels.named("hub:a/b@v1") is not kernels.named("hub:a/b@v2")


def test_a_hub_that_cannot_be_reached_once_is_asked_again(hub):
    hub.outcomes += [OSError("no network"), MemoryError()]
    with pytest.raises(
        KernelUnavailable, match=r"kernel='hub:a/b' cannot run here: a/b does not load \(OSError: no network\)"
    ):
        kernels.check_name("hub:a/b")
    with pytest.raises(MemoryError):
        kernels.check_name("hub:a/b")
    for _ in range(2):
        kernels.check_name("hub:a/b")
    assert len(hub.asked) == 3


def test_a_hub_without_a_build_for_this_torch_says_so(hub):
    # ``kernels`` 0.16 says it so (kernels-community#1082). Errors of the network are subclasses of its class.
    missing = "Cannot find a build variant for this system in a/b (revision: v1):\n\ntorch212-cu126: rejected"
    hub.outcomes += [FileNotFoundError(missing)]
    with pytest.raises(KernelUnavailable) as error:
        kernels.check_name("hub:a/b@v1")
    said = f"a/b@v1 has no build for torch {torch.__version__} on this machine (Cannot find a build variant for this"
    assert said in str(error.value) and "rejected" not in str(error.value)
    assert "as in kernel='hub:a/b@revision'" in str(error.value)

    class NoNetwork(FileNotFoundError):
        pass

    hub.outcomes += [NoNetwork("offline")]
    with pytest.raises(KernelUnavailable, match=r"a/b@v1 does not load \(NoNetwork: offline\)"):
        kernels.check_name("hub:a/b@v1")


CARDS = [
    # code of the build, card, whether it has code for it
    (["8.0", "9.0a"], (9, 0), True),
    (["8.0", "9.0a"], (8, 6), True),
    (["8.0", "9.0a"], (7, 5), False),  # transformers#47926
    (["8.0", "9.0a"], (10, 0), False),  # huggingface/kernels#707: the process would end
    (["7.5", "8.0"], (7, 5), True),
    (["9.0+PTX"], (12, 0), True),
    (["10.0f"], (10, 3), True),
    (["12.0"], (10, 0), False),
    (["something new"], (10, 0), True),
    ([], (8, 0), True),
    ([], (7, 5), False),
]


@pytest.mark.parametrize("nested", [False, True], ids=["own folder", "folder of the variant"])
@pytest.mark.parametrize(("codes", "card", "there"), CARDS, ids=str)
def test_a_build_of_the_hub_without_code_for_this_card_is_refused(
    hub, tmp_path, monkeypatch, codes, card, there, nested
):
    monkeypatch.setattr(varlen, "capability", lambda: card)
    (tmp_path / "metadata.json").write_text(json.dumps({"backend": {"type": "cuda", "archs": codes}}))
    file = tmp_path / "flash_attn2" / "__init__.py" if nested else tmp_path / "__init__.py"
    hub.outcomes += [SimpleNamespace(flash_attn_varlen_func=flash_attn_2_8, __file__=str(file))]
    able, reason = kernels.named("hub:a/b@v7").available()
    assert able is there
    said = f"its code is for {', '.join(codes)}" if codes else "it does not say what its code is for"
    assert there or reason == f"this card has compute capability {card[0]}.{card[1]}, and {said}"


def test_the_hub_is_never_auto_and_says_that_its_package_is_not_there(install, monkeypatch):
    assert not any(isinstance(kernel, Hub) for kernel in kernels.ORDER)
    install(flash_attn_2_1)
    monkeypatch.setitem(sys.modules, "kernels", None)
    with pytest.raises(KernelUnavailable, match="the package kernels is not installed"):
        kernels.check_name("hub")
