"""What packed pairs cost beyond attention: reads from the device, operators, calls of Python. Times are the bench's."""

from __future__ import annotations

import pytest
import transformers
from pairs import built, pairs

import fa2patch
from compat_matrix.bench import operators
from compat_matrix.check import reads as counting

FAMILIES = ("t5", "bart", "mbart", "m2m_100", "whisper")


def collated(batch):
    collate = fa2patch.DataCollatorForSeq2Seq()
    sides = zip(batch.sources, batch.targets)
    return collate([{"input_ids": source[0].tolist(), "labels": target[0].tolist()} for source, target in sides])


@pytest.mark.parametrize("family", FAMILIES)
def test_the_boundaries_of_a_row_are_read_once_and_not_at_all_with_lengths(family):
    model, batch = built(family).train(), pairs(family)
    fa2patch.apply(model, prove=False, kernel="reference")
    ways = {"ids": batch.packed(), **({} if family == "whisper" else {"lengths": collated(batch)})}
    for way, given in ways.items():
        model(**given)
        with counting.counted(packages=("fa2patch",)) as count:  # LayerDrop of upstream reads, too
            model(**given)
        rows = ("position_ids" in given) + 1 if way == "ids" else 0
        assert (count.reads, count.derived, count.arguments) == (rows, rows, 0), (way, count.where)


@pytest.mark.parametrize("family", FAMILIES)
def test_more_pairs_of_the_same_lengths_need_no_more_operators(family):
    model, found = built(family).train(), []
    fa2patch.apply(model, prove=False, kernel="reference")
    for number in (4, 16):
        batch = pairs(family, (6,) * number, (4,) * number).packed()
        model(**batch)
        model.zero_grad()
        with operators.counted() as count:
            model(**batch).loss.backward()
        found.append(sum(count.values()))
    assert found[0] == found[1]


@pytest.mark.skipif(not hasattr(transformers, "AttentionMaskInterface"), reason="a kernel is called by hand since 4.53")
def test_a_layer_costs_what_it_costs_with_the_kernel_called_by_hand():
    # A layer of each stack has three attentions, each of which calls another function than by hand.
    from compat_matrix.bench import bench_pairs

    few, many = (bench_pairs.counts(layers, with_lengths=True) for layers in (2, 4))
    more = {name: (many[name] - few[name]) / 2 for name in few}
    assert more["operators, forward"] == more["operators, step"] == more["reads"] == 0
    assert more["calls, forward"] <= 3 and more["calls, step"] <= 3
