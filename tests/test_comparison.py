"""Differences and gradients are told apart, whatever is not finite."""

import pytest
import torch

from fa2patch.comparison import distance, gradients

NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize(
    ("found", "expected", "is_off_by"),
    [
        ([1.0, 2.0], [1.0, 4.0], 0.5),
        ([1.0, NAN, -INF], [1.0, NAN, -INF], 0.0),
        ([1.0, NAN], [1.0, 2.0], INF),
        ([1.0, 2.0], [1.0, INF], INF),
        ([1.0, 2.5, -INF], [1.0, 2.0, -INF], 0.25),  # an infinity is no scale
        ([0.0], [0.0], 0.0),
        ([1.0], [1.0, 1.0], INF),
        ([], [], 0.0),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_a_distance_is_relative_to_the_largest_expected_value(found, expected, is_off_by, dtype):
    found, expected = torch.tensor(found, dtype=dtype), torch.tensor(expected, dtype=dtype)
    assert distance([found], [expected]) == is_off_by


def test_each_pair_of_a_distance_has_its_own_scale_and_tokens_choose_what_is_compared():
    expected = [torch.full((1, 3, 2), 1000.0), torch.ones(1, 3)]
    found = [one.clone() for one in expected]
    found[1][0, 2] += 0.5
    tokens = torch.tensor([[True, True, False]])
    assert distance(found, expected) == 0.5 and distance(found, expected, least=2.0) == 0.25
    assert distance(found, expected, tokens) == 0.0 and distance(found, expected, ~tokens) == 0.5
    assert distance(found, expected[:1]) == INF


def test_gradients_of_some_tokens_are_zero_where_nothing_leads():
    states, unused = torch.randn(1, 3, 2).requires_grad_(), torch.zeros(2, requires_grad=True)
    tokens = torch.tensor([[True, False, False]])
    one, other = gradients([states * 0, states.detach()], [states, unused], tokens, again=True)
    assert not one.any() and not other.any()
    (mixed,) = gradients([states.cumsum(1) - states.cumsum(1).detach()], [states], ~tokens)
    assert mixed[tokens].any(), "a value of zero hides no gradient"
    assert not gradients([states.detach()], [states])[0].any()
    behind = torch.where(tokens[..., None], states, NAN)
    assert gradients([behind], [states], tokens)[0].isfinite().all()
