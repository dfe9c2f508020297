"""What single encoder-decoders do otherwise, found by the matrix: each is packed as it is alone, or refused by name."""

from __future__ import annotations

import pytest
import torch

import fa2patch
from compat_matrix import tiny_models
from compat_matrix.check.cell import Cell
from compat_matrix.check.points.pairs import POINTS
from compat_matrix.tiny_pairs import pairs
from fa2patch import evidence
from fa2patch.errors import BadBatch, LayerNotPatchable, PackingNotIsolated, UnsupportedModel
from fa2patch.upstream.packed_mask import PackedMask


def present(family):
    if not tiny_models.is_present(family):
        pytest.skip(f"this Transformers has no {family}")
    return family


@pytest.mark.parametrize(
    "family, point",
    [
        ("canary:pairs", "packed_row"),  # its loss takes labels for shifted
        ("moonshine:pairs", "packed_row"),  # so does this one, from 5.24 on
        ("mbart:pairs", "padding"),  # it looks for a row's last label, and padding has none
        ("plbart:pairs", "padding"),
        ("mvp:pairs", "packed_row"),  # computed by document, each target with its source, and proven
        ("mvp:pairs", "nothing_crosses"),
        ("speecht5:pairs", "packed_row"),
        ("pix2struct:pairs", "packed_row"),  # it shifts labels by a method of its own
        ("seamless_m4t:pairs", "packed_row"),  # its layers say is_causal=False
        ("speech_to_text:pairs", "packed_row"),
    ],
)
def test_packed_as_alone(family, point):
    try:
        POINTS[point](Cell(present(family), "eager"))
    except LayerNotPatchable as error:  # up to 4.57 nothing says that Pix2Struct's decoder is one
        assert family == "pix2struct:pairs" and "may hide later tokens" in error.message  # noqa: PT017


@pytest.mark.parametrize(
    "family, why",
    [
        ("fsmt:pairs", "FSMTEncoder, which is no Transformers model by itself"),
        ("parakeet_rnnt:pairs", "ParakeetRNNTDecoder, which is no Transformers model by itself"),
        ("musicgen:pairs", "reads several tokens at a time"),
        ("dia:pairs", "reads several tokens at a time"),
        ("moonshine_streaming:pairs", "its decoder adds positions to what the encoder made"),
        ("nllb-moe:pairs", "its routers read the padding"),
    ],
)
def test_refused_in_apply(family, why):
    with pytest.raises(UnsupportedModel, match=why):
        fa2patch.apply(tiny_models.build(present(family)))


def test_a_model_that_does_not_say_where_its_stacks_are(monkeypatch):
    # as Blip for questions up to 4.57
    model = tiny_models.build("bart:pairs")
    for cls in {type(each) for each in model.modules()}:
        for base in cls.__mro__:
            if "get_encoder" in vars(base):
                monkeypatch.delattr(base, "get_encoder")
    with pytest.raises(UnsupportedModel, match="has no get_encoder"):
        fa2patch.apply(model)


def test_an_encoder_and_a_decoder_of_any_kind_are_proven(monkeypatch):
    # The matrix's evidence is of one encoder and one decoder.
    monkeypatch.setattr(evidence, "isolates", lambda *_: True)
    for family, must in (("encoder-decoder:pairs", True), ("bart:pairs", False)):
        with fa2patch.apply(tiny_models.build(family)) as patch:
            assert patch.examination.must is must


@pytest.mark.parametrize("family", ["whisper:pairs", "canary:pairs"])
def test_sounds_with_targets_in_two_rows_are_refused(family):
    batch, model = pairs(present(family), (1,) * 4, (3, 4, 5, 2)), tiny_models.build(family)
    packed = batch.packed()
    rows = {name: packed[name].view(2, 7) for name in ("labels", "decoder_position_ids")}
    fa2patch.apply(model, prove=False)
    with pytest.raises(BadBatch, match="expected the targets in one row, found 2 rows"):
        model(**{**packed, **rows})
    assert torch.isfinite(model(**packed).loss)


def test_a_packed_mask_is_taken_for_one_with_padding():
    # Moonshine's flash models up to 4.57 keep a mask only if one of its values is 0.
    mask, other = (PackedMask.__new__(PackedMask) for _ in range(2))
    assert (mask == 0.0).any() and not (mask == 1.0).any()
    assert mask == mask and mask != other and len({mask, other}) == 2  # noqa: PLR0124
    assert mask.masked_fill(other, 0.0) is mask
    with pytest.raises(TypeError):
        mask.masked_fill(torch.ones(2, dtype=torch.bool), 0.0)
    # Qwen's models with pictures or sound fill positions and labels where a mask is 0.
    assert (mask == 0) is False
    with pytest.raises(TypeError):
        torch.ones(2).masked_fill(mask == 0.0, 0)


def test_what_is_added_to_a_packed_mask_hides_later_tokens_alone():
    # LED's decoder adds its causal mask up to 4.57. Another one would be lost.
    mask = PackedMask.__new__(PackedMask)
    causal = torch.full((1, 1, 4, 4), float("-inf")).triu(1)
    assert causal + mask is mask
    with pytest.raises(PackingNotIsolated, match="hides other tokens than later ones"):
        causal.masked_fill(torch.eye(4, dtype=torch.bool), -1e4) + mask
    with pytest.raises(TypeError, match="PackedMask"):
        torch.zeros(1, 4, 4, 4) + mask
