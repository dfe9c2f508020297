"""The table of attention options, and what must follow it where a loop over it would be traced in every layer."""

from __future__ import annotations

import pytest
import torch
from definition_cases import asks

from fa2patch.kernels import FEATURES, Options
from fa2patch.kernels.options import TABLE, described_call, from_keywords
from fa2patch.kernels.trial_rows import options_of

Q = torch.zeros(1, 4, 2, 8)


def value_of(row):
    if row.name == "bias":
        return torch.full((2, 3, 3), 0.5)
    return torch.full((2,), 0.5) if row.by_head else 1


@pytest.mark.parametrize("row", TABLE, ids=lambda row: row.name)
def test_each_option_asks_for_its_feature_alone(row):
    options = Options(**{row.name: value_of(row)})
    *_, needed, _ = described_call(Q, Q, Q, options, False, False)
    assert [name for name, is_on in zip(FEATURES, needed) if is_on] == [row.feature]
    assert options.features() == {row.feature} and options.by_head is row.by_head


@pytest.mark.parametrize(
    ("row", "keyword"), [(row, keyword) for row in TABLE for keyword in row.keywords], ids=lambda each: str(each)[:40]
)
def test_each_keyword_reaches_its_option(row, keyword):
    options = from_keywords({keyword: value_of(row)}, causal=True)
    assert options.features() == {row.feature}
    assert torch.equal(torch.as_tensor(getattr(options, row.name)), torch.as_tensor(value_of(row)))


def test_the_trial_has_a_value_for_each_option_but_dropout():
    drawn = torch.Generator().manual_seed(0)
    found = options_of(asks(FEATURES, dtype=torch.bfloat16), drawn, torch.device("cpu"))
    assert found.features() == {row.feature for row in TABLE} - {"dropout"}
    assert found.sinks.dtype == found.bias.dtype == torch.bfloat16 and found.alibi_slopes.dtype == torch.float32
    assert options_of(asks(), drawn, torch.device("cpu")).features() == set()
