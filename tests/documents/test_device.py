"""What crosses to a device: assertions, which name their conditions and are as short as a CUDA device takes them."""

import pytest
import torch

from fa2patch.documents import device, stated
from fa2patch.documents.stated import from_cu_seqlens


def ints(*values):
    return torch.tensor(values, dtype=torch.int32)


@pytest.fixture
def asserted(monkeypatch):
    """The devices and messages of assertions, which may be as long as a CUDA device takes them."""
    found = []

    def assert_async(held, message):
        assert len(message) < 255, "torch: Message length must be smaller than 255"
        found.append((held.device.type, message))

    monkeypatch.setattr(device, "assert_async", assert_async)
    return found


def test_on_a_device_the_conditions_of_a_collators_batch_become_one_assertion_there(asserted):
    tokens = 10**7
    cu, ids = ints(0, 3, tokens).to("meta"), torch.zeros(1, tokens, dtype=torch.long, device="meta")
    from_cu_seqlens(cu, tokens, (1, tokens), cu_seqlens_k=cu, position_ids=ids)
    ((where, message),) = asserted
    assert where == "meta"
    for part in ("must rise from 0", "max_length is 10000000", "into the next", "restart inside"):
        assert part in message


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"attention_mask": torch.ones(1, 6, device="meta")}, "... The same batch on a CPU says all."),
        ({"cu_seqlens_k": ints(0, 3, 6).to("meta")}, "cu_seq_lens_q and cu_seq_lens_k differ"),
        ({"parents": ints(-1, -1).to("meta")}, "into the next"),
    ],
    ids=["mask", "keys", "tree"],
)
def test_on_a_device_a_long_message_is_cut_and_says_where_the_rest_is(asserted, more, said):
    ids = torch.zeros(1, 6, dtype=torch.long, device="meta")
    from_cu_seqlens(ints(0, 3, 6).to("meta"), 3, (1, 6), position_ids=ids, **more)
    assert all(message.startswith("cu_seq_lens must rise") for _, message in asserted[:1])
    assert said in asserted[0][1] and {where for where, _ in asserted} == {"meta"}


def test_a_message_that_no_device_takes_is_cut():
    words = "word " * 100
    assert len(device.fitting([words])) == device.LONGEST
    assert device.fitting([words]).endswith("The same batch on a CPU says all.")
    assert device.fitting(["Short. And more.", "Short. And more."]) == "Short. And more."
    assert device.fitting(["One. " + words, "Two."]) == "One. Or: Two."


def test_on_a_device_a_longest_document_that_is_too_short_is_asserted(asserted):
    from_cu_seqlens(ints(0, 3, 6).to("meta"), 2, (1, 6))
    assert any("max_length is 2" in message for _, message in asserted)


def test_on_a_device_every_condition_is_part_of_the_assertion(monkeypatch):
    checks = []
    monkeypatch.setattr(stated, "require_all", checks.extend)
    cu, like = ints(0, 3, 6).to("meta"), {"dtype": torch.long, "device": "meta"}
    given = {"position_ids": torch.zeros(1, 6, **like), "attention_mask": torch.ones(1, 6, **like)}
    from_cu_seqlens(cu, 3, (1, 6), cu_seqlens_k=cu.clone(), **given)
    assert {check.held.device.type for check in checks} == {"meta"}
    messages = " ".join(check.message for check in checks)
    for part in ("must rise from 0", "differ", "into the next", "numbers change", "hides tokens", "restart inside"):
        assert part in messages
