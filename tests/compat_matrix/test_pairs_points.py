"""The matrix's points of encoder-decoders pass, fail when something is broken, and cover all encoder-decoders."""

import pytest
import torch
import transformers

from compat_matrix import results, tiny_models, tiny_pairs
from compat_matrix.check import plan, upstream
from compat_matrix.check.cell import Cell, NotApplicable
from compat_matrix.check.points.pairs import POINTS
from compat_matrix.plans import seams
from fa2patch.upstream import cross, pairs


@pytest.mark.parametrize("point", POINTS)
@pytest.mark.parametrize(
    "family", ["bart:pairs", *(pytest.param(each, marks=pytest.mark.slow) for each in ("t5:pairs", "whisper:pairs"))]
)
def test_point(family, point):
    try:
        POINTS[point](Cell(family, "sdpa"))
    except NotApplicable as reason:
        assert family == "whisper:pairs" and not str(reason)  # noqa: PT017


def red(*points, family="bart:pairs"):
    for point in points:
        with pytest.raises(Exception) as caught:  # noqa: PT011
            POINTS[point](Cell(family, "sdpa"))
        assert not isinstance(caught.value, NotApplicable)


def test_labels_that_are_shifted_over_the_row_are_red(monkeypatch):
    monkeypatch.setattr(
        pairs, "_shifted", lambda model, labels, *_: model.prepare_decoder_input_ids_from_labels(labels)
    )
    red("packed_row", "lengths", "every_layout", "nothing_crosses")


def test_a_source_off_by_one_is_red(monkeypatch):
    given = cross.replace

    def off_by_one(mask, **changes):
        if "keys_of" in changes:
            own = changes["boundaries"]
            ends = own.sources.cu_seqlens.clone()
            ends[1:-1] -= 1
            lengths = tuple(ends.diff().tolist())
            sources = given(own.sources, cu_seqlens=ends, max_seqlen=max(lengths), _lengths=lengths, made={})
            changes["boundaries"] = given(own, sources=sources, made={})
        return given(mask, **changes)

    monkeypatch.setattr(cross, "replace", off_by_one)
    red("packed_row", "lengths", "nothing_crosses")


def test_generation_that_changes_is_red(monkeypatch):
    monkeypatch.setattr(pairs, "_with_masks", lambda model, patch, call, shift: {**call, "decoder_input_ids": None})
    red("generation", "packed_row")


def test_every_encoder_decoder_has_a_cell_or_a_reason():
    # as their configs say it; of the others, BLIP-2 and InstructBLIP hold one, and a transducer's decoder is an LSTM
    kinds = transformers.models.auto.configuration_auto.CONFIG_MAPPING_NAMES
    said = {kind for kind in kinds if tiny_models.is_of_two_stacks(transformers.CONFIG_MAPPING[kind])}
    named = {name.partition(":")[0] for name in filter(tiny_models.is_present, tiny_pairs.names())}
    assert said - named == {*tiny_pairs.WITHOUT_TARGETS} & {*kinds}
    assert len(said) > 60
    assert {f"{name}:pairs" for name in named} <= {*tiny_models.architectures()}


def test_a_plan_names_the_layers_of_both_stacks():
    (said,) = plan.of("t5:pairs", ["sdpa"]).values()
    assert sorted(said["layers"]) == [
        "decoder.block.N.layer.N.EncDecAttention: interface", "decoder.block.N.layer.N.SelfAttention: interface",
        "encoder.block.N.layer.N.SelfAttention: interface",
    ]  # fmt: skip
    assert seams({"sdpa": said}) == {"interface"} and {"encoder", "decoder"} <= {*said["found"]}


def test_transformers_alone_is_run_on_rows_of_pairs():
    rows = upstream.outcomes(Cell("bart:pairs", "sdpa"))
    assert set(rows) == set(results.ROWS_WITH_MEDIA) and set(rows.values()) == {"leak"}
    assert set(upstream.outcomes(Cell("blip-2:pairs", "sdpa")).values()) == {"unknown"}


def test_a_source_of_sound_is_what_the_model_computes():
    assert tiny_pairs.reads("whisper:pairs") == ("input_features", (1, 8, 32))
    assert tiny_pairs.reads("speech_to_text:pairs") == ("input_features", (1, 32, 8))
    assert tiny_pairs.reads("bart:pairs") == ("input_ids", ())
    batch = tiny_pairs.pairs("whisper:pairs", (1, 1), (3, 5)).packed()
    assert batch["input_features"].shape == (2, 8, 32)
    assert torch.equal(batch["decoder_position_ids"], torch.tensor([[0, 1, 2, 0, 1, 2, 3, 4]]))
