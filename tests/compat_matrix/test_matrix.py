"""The matrix's points pass in this environment, and fail when something that matters is broken."""

import argparse
import sys

import numpy as np
import pytest
import torch
from evidence import MADE, POINTS, evidence

import fa2patch
from compat_matrix import environments, keys, run, tiny_models
from compat_matrix.__main__ import check, failures, left_over, main
from compat_matrix.check import found
from compat_matrix.check.cell import AloneFails, Cell, NotApplicable, assert_unmoved
from compat_matrix.check.compare import assert_close, assert_same_gradients
from compat_matrix.check.points import POINTS as POINTS_BY_NAME
from compat_matrix.results import judged, read_file
from compat_matrix.run import merged
from fa2patch import Boundaries
from fa2patch.documents import find, given_boundaries, tensors
from fa2patch.upstream import forward, packed_mask, refusals
from fa2patch.upstream.find_layers import ModelLayers

CELLS = [("llama", "sdpa"), ("qwen2", "eager"), ("falcon", "sdpa"), ("smollm3", "sdpa")]
architectures = sys.modules["fa2patch.upstream.architectures"]


@pytest.mark.parametrize("point", POINTS_BY_NAME)
@pytest.mark.parametrize(
    ("family", "implementation"), [CELLS[0], *(pytest.param(*each, marks=pytest.mark.slow) for each in CELLS[1:])]
)
def test_point(family, implementation, point):
    try:
        POINTS_BY_NAME[point](Cell(family, implementation))
    except NotApplicable as reason:
        known = ("no sliding window", "returns no router logits", "changes nothing")
        assert any(words in str(reason) for words in known)


def red(*points, family="llama"):
    for point in points:
        with pytest.raises(Exception) as caught:  # noqa: PT011
            POINTS_BY_NAME[point](Cell(family, "sdpa"))
        assert not isinstance(caught.value, (NotApplicable, AloneFails))


def falling(ids, real, previous, step):
    left = np.take_along_axis(ids, np.maximum(previous, 0), axis=1)
    return real & ((previous < 0) | (ids < left))


NOT_PLAIN = (find, "is_plain", lambda *given: False)
PROMPTS = ("shared_prompts", "shared_prompts_checkpointed")
# Every segment continues the one before it.
CHAIN = (given_boundaries, "_require_tree", lambda cu, *rest: torch.arange(-1, len(cu) - 2, dtype=torch.int32))

NO_TREE = (given_boundaries, "_require_tree", lambda cu, *rest: torch.full_like(cu[1:], -1))
FAULTS = {
    "a boundary only where ids are zero": (
        [NOT_PLAIN, (find, "_changes", lambda ids, real, previous, step: real & (ids == 0))], "llama", "every_layout",
    ),
    "a boundary only where ids fall": (
        [NOT_PLAIN, (find, "_changes", falling)], "llama", "packed_row", "every_layout",
    ),
    "a sibling that is seen": ([CHAIN], "llama", *PROMPTS),
    "a sibling that is seen by a mixer": ([CHAIN], "jamba", *PROMPTS),
    "a parent that is not seen": ([NO_TREE], "llama", *PROMPTS),
    "a parent that is not seen by a mixer": ([NO_TREE], "jamba", *PROMPTS),
    "a refusal that is not made": (
        [
            (ModelLayers, "carrying", {}),
            (refusals, "_require_layers", lambda model: None),
            (ModelLayers, "mixers", ()),
        ],
        "jamba", "packed_row", "nothing_crosses",
    ),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_red(monkeypatch, fault):
    changes, family, *points = FAULTS[fault]
    for change in changes:
        monkeypatch.setattr(*change)
    red(*points, family=family)


def test_one_document_for_the_whole_row_is_red(monkeypatch):
    attend = packed_mask.PackedMask.attend

    def leaking(self, module, q, k, v, options):
        tokens = q.shape[0] * q.shape[1]
        self.boundaries = Boundaries(self.boundaries.cu_seqlens[[0, -1]], tokens, None, (tokens,))
        return attend(self, module, q, k, v, options)

    monkeypatch.setattr(packed_mask.PackedMask, "attend", leaking)
    red("packed_row", "packed_rows", "padding", "lengths", "nothing_crosses", "checkpointing", "half_precision")


def test_position_ids_dropped_on_the_way_are_red(monkeypatch):
    found_mask = forward.packed_mask_of

    def without_ids(call, *args, **kwargs):
        return found_mask({**call, "position_ids": None}, *args, **kwargs)

    monkeypatch.setattr(forward, "packed_mask_of", without_ids)
    red("packed_rows", "every_layout", family="llama")  # at these points Transformers alone leaks
    red("packed_row", "packed_rows", "nothing_crosses", family="gpt_bigcode")


def test_a_row_without_its_quirk_is_red(monkeypatch):
    monkeypatch.setitem(architectures._rows, "llama4_text", fa2patch.Architecture("llama4_text"))
    red("packed_row", "every_layout", family="llama4")


def test_every_version_has_a_block_and_a_release_without_one_the_defaults():
    blocks = environments.versions()
    minors = {tuple(map(int, block.transformers.split(".")[:2])) for name, block in blocks.items() if name != "main"}
    assert {(4, minor) for minor in range(34, 58)} <= minors
    assert blocks["4.36.2-py3.9-torch2.1"].python == "3.9"
    assert environments.version("5.99.0").requirements[:2] == ["torch==2.13.0", "transformers==5.99.0"]


ALL = len(POINTS)
CODE = {"commit": "1" * 40, "dirty": False}
KNOWN = "AttributeError: 'NoneType' object has no attribute 'shape' (modeling_llava.py:303)"


def part(**architectures):
    """What one of the two processes prints of its cells."""
    made = {key: value for key, value in MADE.items() if key not in CODE}
    return {name: {"made": made, **cell} for name, cell in architectures.items() if cell}


def patched(ok=ALL, seam="function", **fail):
    return {"seam": [seam], "fa2patch": {"sdpa": {"ok": ok, "n/a": {}, "fail": fail}}, "upstream": {}}


def in_matrix(tmp_path, first, second):
    header = {name: value for name, value in evidence("4.46.3", {}).items() if name != "architectures"}
    cells = {name: merged(first.get(name, {}), second.get(name, {}), CODE) for name in {**first, **second}}
    file = tmp_path / "4.46.3.json"
    file.write_text(run.text(run.written(header, cells)))
    return failures(read_file(file))


def test_a_failure_in_either_process_is_one(tmp_path):
    refused = {"refused": "UnsupportedModel: Mamba", "upstream": {}}
    assert in_matrix(tmp_path, part(llama=patched(), jamba=refused), part(llama=patched(), jamba=refused)) == []
    assert (
        "padding: off" in in_matrix(tmp_path, part(llama=patched()), part(llama=patched(ok=ALL - 1, padding="off")))[0]
    )
    assert "not function" not in str(in_matrix(tmp_path, part(llama=patched()), part(llama=patched())))
    assert "do not add up" in in_matrix(tmp_path, part(llama=patched(ok=ALL - 1)), {})[0]
    assert failures("uv failed") == ["uv failed"]


def test_cells_are_written_one_by_one_and_say_with_which_points_they_were_run(monkeypatch, tmp_path):
    # The earlier run had fewer points. What is merged into its file does not change what was checked then.
    version, file = environments.version("4.46.3"), tmp_path / "4.46.3.json"
    given = argparse.Namespace(
        evidence=tmp_path, environments=tmp_path, points=None, stale=False, all_points=True, rotation=None, chosen=None
    )

    def run_with(points, families, *names, stops=False):
        def found(version, folder, packages, *options, keep):
            header = {key: value for key, value in evidence("4.46.3", {}).items() if key != "architectures"}
            header = {**header, "points": points}
            for name in names:
                keep(header, name, merged(part(x=patched(ok=len(points)))["x"], {}, CODE))
            if stops:
                raise KeyboardInterrupt
            return {**header, "architectures": {}}

        monkeypatch.setattr(run, "evidence", found)
        return check(version, argparse.Namespace(**vars(given), families=families), tmp_path, lambda: None)

    with pytest.raises(KeyboardInterrupt):
        run_with(POINTS[:-1], None, "mistral", "phi", stops=True)
    assert set(read_file(file).cells) == {"mistral", "phi"}
    kept = run_with(POINTS, ["llama"], "llama")
    assert {name: cell.state for name, cell in kept.cells.items()} == {"mistral": "ok", "phi": "ok", "llama": "ok"}
    run_with(POINTS, ["mistral", "phi"], "mistral", "phi")
    assert "points" not in file.read_text().partition("architectures")[2]


def test_what_is_left_over_is_what_failed_what_is_stale_and_what_is_missing(tmp_path):
    sources = keys.Sources(environments.HERE.parent)
    fresh = sources.depended(["fa2patch/errors.py"], [])
    cells = {
        name: {"made": {**MADE, "key": key}, **patched(), **more}
        for name, key, more in (
            ("good", fresh, {}),
            ("bad", fresh, {"error": "KeyError"}),
            ("stale", dict.fromkeys(fresh, "other"), {}),
        )
    }
    cells["without"] = {"made": MADE, **patched()}
    header = evidence("4.46.3", {}, requirements=environments.version("4.46.3").stated)
    file = tmp_path / "4.46.3.json"
    file.write_text(run.text(run.written(header, cells)))
    found = read_file(file)
    assert left_over(["missing", *cells], found, sources) == ["missing", "bad", "stale", "without"]
    other = evidence("4.46.3", {}, requirements=["python3.11", "torch==1.0"])
    file.write_text(run.text(run.written(other, {"good": cells["good"]})))
    assert left_over(["good"], read_file(file), sources) == ["good"], "it was made in another environment"


def test_who_is_vouched_for_is_ok_only_if_the_voucher_is(tmp_path):
    reasons = dict.fromkeys(POINTS[1:], f"{found.VOUCHED}llama")
    vouched = {"seam": ["interface"], "fa2patch": {"sdpa": {"ok": 1, "n/a": reasons, "fail": {}}}, "upstream": {}}
    assert in_matrix(tmp_path, part(llama=patched(), phi=vouched), {}) == []
    (failure, *_) = in_matrix(tmp_path, part(phi=vouched), {})
    assert "phi: vouched for by llama, which is not ok" in failure
    failing = in_matrix(tmp_path, part(llama=patched(ok=ALL - 1, padding="off"), phi=vouched), {})
    assert len(failing) == 2


def test_a_failure_is_printed_when_its_version_ends_and_again_behind_the_table(monkeypatch, tmp_path, capsys):
    def without_a_release(*_, **__):
        raise OSError("expected [a, b]")

    monkeypatch.setattr(run, "evidence", without_a_release)
    assert main(["--versions", "4.46.3", "--evidence", str(tmp_path), "--environments", str(tmp_path)]) == 1
    printed = capsys.readouterr()
    assert "4.46.3 OSError: expected [a, b]" in printed.err and "4.46.3 OSError: expected [a, b]" in printed.out


def test_refused_in_one_process_and_patched_in_the_other_is_a_failure(tmp_path):
    refused = {"refused": "UnsupportedModel: it cannot be", "upstream": {}}
    for first, second in ((patched(), refused), (refused, patched())):
        (failure,) = in_matrix(tmp_path, part(llama=first), part(llama=second))
        assert found.REFUSED_AND_PATCHED in failure and "it cannot be" in failure


def test_refused_where_transformers_alone_fails_is_not_run(tmp_path):
    # ESM's class for flash attention in 4.55 calls a method that it does not have.
    refused = {"refused": "LayerNotPatchable: it has no such method"}
    outcomes = {"one row": "error: AttributeError: no attribute 'transpose_for_scores'"}
    assert in_matrix(tmp_path, part(esm=patched()), part(esm={**refused, "upstream": {"flash": outcomes}})) == []
    outcomes["two rows"] = "leak"
    (failure,) = in_matrix(tmp_path, part(esm=patched()), part(esm={**refused, "upstream": {"flash": outcomes}}))
    assert found.REFUSED_AND_PATCHED in failure


@pytest.mark.parametrize("refusing", ["sdpa", "eager"])
def test_refused_with_one_implementation_and_patched_with_another_is_a_failure(monkeypatch, tmp_path, refusing):
    apply = fa2patch.apply

    def refuses(model, **options):
        if model.config._attn_implementation == refusing:
            raise fa2patch.errors.UnsupportedModel("it cannot be")
        return apply(model, **options)

    monkeypatch.setattr(fa2patch, "apply", refuses)
    cell = found.cell("llama", ("sdpa", "eager"), ["packed_row"])
    assert found.REFUSED_AND_PATCHED in cell["error"] and "fa2patch" in cell
    (failure,) = in_matrix(tmp_path, part(llama=cell), {})
    assert found.REFUSED_AND_PATCHED in failure and "it cannot be" in failure


def test_a_point_that_fails_is_a_failure_and_one_that_does_not_apply_or_fails_alone_says_why(monkeypatch):
    def raising(error):
        def point(cell):
            raise error

        return point

    errors = {
        "off": AssertionError("logits: off by 1"),
        "raises": KeyError("no such thing"),
        "elsewhere": NotApplicable("not in this version"),
        "fails": AloneFails("no position_ids"),
    }
    for name, error in errors.items():
        monkeypatch.setitem(POINTS_BY_NAME, name, raising(error))
    monkeypatch.setitem(POINTS_BY_NAME, "holds", lambda cell: None)
    counts = found._results(Cell("llama", "sdpa"), [*errors, "holds"], {})
    counts["fail"] = {name: what.partition(" (")[0] for name, what in counts["fail"].items()}
    assert counts == {
        "ok": 1,
        "n/a": {"elsewhere": "not in this version"},
        "fail": {"off": "AssertionError: logits: off by 1", "raises": "KeyError: 'no such thing'"},
        "alone": {"fails": "no position_ids"},
    }


NUMBERS, NAN = torch.tensor([1.0, 2.0, 3.0]), torch.tensor([1.0, float("nan"), 3.0])


@pytest.mark.parametrize("where", [0, 2])
@pytest.mark.parametrize("family", ["llama", "mixtral"])
@pytest.mark.parametrize(("found", "expected"), [(NAN, NUMBERS), (NUMBERS, NAN), (NAN, NAN)], ids=str)
def test_a_number_that_is_none_passes_nowhere(found, expected, family, where):
    # Python's ``max`` keeps or loses NaN depending on its place.
    good = {"a": NUMBERS, "b": NUMBERS, "c": NUMBERS}
    name = sorted(good)[where]
    with pytest.raises(AssertionError):
        assert_close(found, expected, "logits")
    with pytest.raises(AssertionError, match=f"gradient of {name}"):
        assert_same_gradients({**good, name: found}, {**good, name: expected}, floor=0.01)
    with pytest.raises(AssertionError):
        assert_unmoved(Cell(family, "sdpa"), found, expected)


def test_a_known_failure_is_one_only_if_every_failure_is_that_one_in_a_point_that_is_named(tmp_path):
    def of(name, **fail):
        cell = patched(ok=len(POINTS) - len(fail), **fail)
        return in_matrix(tmp_path, part(**{name: cell}), part(**{name: cell}))

    assert of("llava", padding=KNOWN) == of("llava", padding=KNOWN, lengths=KNOWN) == []
    assert of("llava", padding=KNOWN, lengths="AssertionError: off") and of("llama", padding=KNOWN)
    assert of("llava", inertness=KNOWN), "xfail.toml names no such point"
    assert "Remove the version from the entry" in of("llava")[0]
    alone = {"seam": ["method"], "fa2patch": {"sdpa": {"alone": {"document": KNOWN}}}}
    assert "no point" in in_matrix(tmp_path, part(llama=alone), {})[0]
    assert "no point" in in_matrix(tmp_path, part(llava=alone), {})[0], "one document is not named"


def test_a_known_failure_of_transformers_alone(tmp_path):
    error = "RuntimeError: Expected 3D (unbatched) or 4D (batched) input to conv2d"
    alone = {"made": MADE, "seam": ["method"], "fa2patch": {"sdpa": {"alone": {"document": error}}}}
    assert judged("pixtral:picture", "4.48.3", alone, POINTS)["link"].startswith("https://")
    assert judged("pixtral:picture", "4.49.0", alone, POINTS) == {}
    assert "error" in judged("pixtral:picture", "4.48.3", patched(), POINTS)


def test_an_implementation_with_which_transformers_alone_fails_is_not_run(monkeypatch):
    def fails(*args, **kwargs):
        raise KeyError("position_ids")

    monkeypatch.setattr(tiny_models.modeling("llava:picture").LlavaModel, "get_image_features", fails)
    cell = found.cell("llava:picture", ("sdpa",), ["packed_row", "refusals"])
    assert list(cell["fa2patch"]["sdpa"]) == ["alone"] and "KeyError" in cell["fa2patch"]["sdpa"]["alone"]["document"]
    assert cell["upstream"]["sdpa"]["one row"].startswith("error")


@pytest.mark.parametrize(
    ("point", "in_every_layer"),
    [
        ("host_reads", lambda mask, q: tensors.read(mask.boundaries.cu_seqlens)),
        ("no_dense_mask", lambda mask, q: q.new_zeros(q.shape[1], q.shape[1])),
    ],
)
def test_boundaries_or_a_mask_of_the_rows_length_squared_in_every_layer_are_red(monkeypatch, point, in_every_layer):
    attend = packed_mask.PackedMask.attend

    def more(self, module, q, k, v, options):
        in_every_layer(self, q)
        return attend(self, module, q, k, v, options)

    monkeypatch.setattr(packed_mask.PackedMask, "attend", more)
    red(point)
