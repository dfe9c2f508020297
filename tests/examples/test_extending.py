"""Kernels, traits and registry rows that users add: the examples run, and invalid objects are refused."""

from __future__ import annotations

import copy
import pickle
import re
from pathlib import Path

import pytest
import torch

import fa2patch
from compat_matrix import tiny_models
from compat_matrix.check.compare import assert_close
from compat_matrix.check.rows import alone, documents, pack
from fa2patch import errors, kernels
from fa2patch.kernels import packed_attention, picks
from fa2patch.kernels.reference import Reference
from fa2patch.patch import model_plan
from fa2patch.traits import Trait, register_trait

EXAMPLES = Path(__file__).parents[2] / "examples" / "extend"


def differences(text: str) -> list[float]:
    return [float(number) for number in re.findall(r"difference (\S+?),?\s", text)]


@pytest.mark.slow
def test_the_example_of_a_kernel(printed) -> None:
    text = printed(EXAMPLES / "own_kernel.py")
    assert max(differences(text)) < 1e-5 and len(differences(text)) == 2
    assert text.count("computed by dense-mask") == 2
    assert "with gradients: kernel='dense-mask' cannot compute this layer: it has no backward" in text


@pytest.mark.slow
def test_the_example_of_a_trait(printed) -> None:
    text = printed(EXAMPLES / "own_trait.py")
    assert "without the trait: StartForCausalLM holds what fa2patch does not know" in text
    assert max(differences(text)) < 1e-5


@pytest.mark.slow
def test_the_example_of_a_registry_row(printed) -> None:
    text = printed(EXAMPLES / "own_architecture.py")
    assert differences(text)[0] < 1e-5
    assert "refused: LlamaForCausalLM cannot be trained packed: its first tokens see all others." in text


class Counting(Reference):
    name = "counting"


class Doubling(Counting):
    name = "doubling"

    def attend(self, q, k, v, boundaries, options, scale):  # type: ignore[no-untyped-def]
        return 2 * super().attend(q, k, v, boundaries, options, scale)


class ForEval(Counting):
    name = "for eval"
    BACKWARD = False


class RoundsOtherwise(ForEval):
    # Its results differ from the reference's by rounding.

    def attend(self, q, k, v, boundaries, options, scale):  # type: ignore[no-untyped-def]
        return super().attend(q.double(), k.double(), v.double(), boundaries, options, scale).to(q.dtype)


class Transposed(Counting):
    # Its output is not contiguous.

    def attend(self, q, k, v, boundaries, options, scale):  # type: ignore[no-untyped-def]
        computed = super().attend(q, k, v, boundaries, options, scale)
        return computed.transpose(0, 1).contiguous().transpose(0, 1)


@pytest.fixture(autouse=True)
def nothing_stays_registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(picks, "_registered", [])
    monkeypatch.setattr(model_plan, "_registered", [])


def with_lengths(docs: list[torch.Tensor]) -> dict[str, object]:
    ends = torch.tensor([0, *map(len, docs)]).cumsum(0).to(torch.int32)
    longest = max(map(len, docs))
    lengths = {"cu_seq_lens_q": ends, "cu_seq_lens_k": ends, "max_length_q": longest, "max_length_k": longest}
    return {**pack(docs), **lengths}


def llama() -> torch.nn.Module:
    return tiny_models.build("llama", "sdpa")


@pytest.mark.parametrize("registered", [False, True])
@pytest.mark.parametrize("compiled", [False, True])
def test_a_kernel_of_ones_own_computes_a_packed_row(registered: bool, compiled: bool) -> None:
    docs, model = documents(5, 1, 9), llama()
    expected = alone(model, docs)
    if registered:
        kernels.register_kernel(Counting())
    with fa2patch.apply(model, kernel="counting" if registered else Counting()) as patch:
        if compiled:
            run = torch.compile(model, backend="eager", fullgraph=True)
            assert_close(run(**with_lengths(docs)).logits[0], expected, "logits")
        else:
            assert_close(model(**pack(docs)).logits[0], expected, "logits")
            assert {layer.kernel for layer in patch.layers} == {"counting"}
        assert patch.kernel == "counting"


def test_a_patch_with_such_a_kernel_is_copied_and_pickled() -> None:
    docs, model = documents(5, 1, 9), llama()
    expected = alone(model, docs)
    fa2patch.apply(model, kernel=Counting())
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert_close(other(**pack(docs)).logits[0], expected, "logits")
        assert {layer.kernel for layer in fa2patch.status(other).layers} == {"counting"}


def test_a_kernel_without_a_backward_serves_in_eval_and_auto_trains_with_another() -> None:
    kernels.register_kernel(ForEval(), before="efficient")
    docs, model = documents(5, 1, 9), llama()
    with fa2patch.apply(model) as patch:
        with torch.no_grad():
            model(**pack(docs))
        assert {layer.kernel for layer in patch.layers} == {"for eval"}
        model(**pack(docs)).logits.sum().backward()
        assert "for eval" not in {layer.kernel for layer in patch.layers}
    with fa2patch.apply(model, kernel="for eval"), pytest.raises(errors.KernelUnavailable, match="no backward"):
        model(**pack(docs))


def test_verify_compares_what_one_kernel_has_computed() -> None:
    kernels.register_kernel(RoundsOtherwise(), before="efficient")
    with fa2patch.apply(llama()) as patch:
        assert fa2patch.verify(patch.model).ok


def test_the_output_is_contiguous_whatever_a_kernel_returns() -> None:
    q = torch.randn(2, 8, 4, 6)
    starts = fa2patch.boundaries(torch.arange(8).expand(2, -1))
    output = packed_attention(q, q, q, starts, kernels.Options(), Transposed())
    assert output.is_contiguous()
    assert torch.equal(output, packed_attention(q, q, q, starts, kernels.Options(), Counting()))


def test_a_wrong_kernel_is_not_used() -> None:
    model = llama()
    with fa2patch.apply(model, kernel=Doubling()), pytest.raises(errors.KernelWrong, match="off by"):
        model(**pack(documents(5, 4)))
    kernels.register_kernel(Doubling(), before="reference")
    with fa2patch.apply(model) as patch:
        model(**pack(documents(5, 4)))
        assert {layer.kernel for layer in patch.layers} == {"reference"}


def test_kernels_are_tried_in_the_order_in_which_they_were_put() -> None:
    kernels.register_kernel(Counting(), before="reference")
    kernels.register_kernel(Doubling(), before="counting")
    kernels.register_kernel(ForEval())
    names = [kernel.name for kernel in kernels.order()]
    assert names[-3:] == ["doubling", "counting", "reference"]
    assert kernels.named("for eval").name == "for eval"
    assert [row["name"] for row in kernels.kernel_rows()][-1] == "for eval"
    kernels.register_kernel(Counting())  # registered again, in another place
    assert "counting" not in {kernel.name for kernel in kernels.order()} and kernels.named("counting")


@pytest.mark.parametrize("kernel, before, error", [
    ("counting", None, errors.BadArgument),
    (Counting, None, errors.BadArgument),
    (Reference(), None, errors.BadArgument),
    (Counting(), "no such kernel", errors.UnknownKernel),
    (Counting(), "hub", errors.UnknownKernel),
])  # fmt: skip
def test_what_is_no_kernel_is_refused(kernel: object, before: str | None, error: type[Exception]) -> None:
    with pytest.raises(error):
        kernels.register_kernel(kernel, before=before)  # type: ignore[arg-type]
    assert picks._registered == []


class Noting(Trait):
    # Each forward is noted twice: whether it is the outermost one, and whether the batch is packed.

    name = "noting"

    def __init__(self) -> None:
        self.seen: list[tuple[bool, bool]] = []

    def before(self, step, found):  # type: ignore[no-untyped-def]
        self.seen.append((step.role.outermost, step.mask is not None))

    def after(self, step, found, output):  # type: ignore[no-untyped-def]
        self.seen.append((step.role.outermost, step.mask is not None))
        return output


def test_a_trait_is_called_around_every_forward() -> None:
    noting, model = Noting(), llama()
    register_trait(noting)
    with fa2patch.apply(model) as patch:
        model(**pack(documents(3, 4)))
        model(input_ids=documents(4)[0][None])
    assert noting.seen == [(True, True), (False, True), (False, True), (True, True)] + [
        (True, False), (False, False), (False, False), (True, False),
    ]  # fmt: skip
    assert patch.found["noting"] is True


def test_a_registered_trait_is_replaced_by_one_of_its_name() -> None:
    first, second = Noting(), Noting()
    register_trait(first)
    register_trait(second)
    assert model_plan.traits()[-1] is second and first not in model_plan.traits()


class OurName(Trait):
    # The name is taken.

    name = "fused flash"


@pytest.mark.parametrize("trait", ["noting", Noting, Trait(), OurName()])
def test_what_is_no_trait_is_refused(trait: object) -> None:
    with pytest.raises(errors.BadArgument):
        register_trait(trait)  # type: ignore[arg-type]
    assert model_plan._registered == []


def test_names_of_traits_are_unique() -> None:
    names = [trait.name for trait in model_plan.TRAITS]
    assert len(names) == len(set(names))
