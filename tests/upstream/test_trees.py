"""Trees of segments through patched models: labels, pooled heads, rope by length, mixers, and what is refused."""

import pytest
import torch
import transformers
from packed_rows import built
from tree_cases import tree_batch

import fa2patch
from compat_matrix import tiny_models
from compat_matrix.check import reads
from fa2patch.documents.trees import Tree
from fa2patch.errors import BadBatch, BadParents, PackingNotIsolated

LENGTHS, PARENTS = [5, 3, 4, 2, 6, 3], [-1, 0, 0, 2, -1, 4]
PATHS = [(0, 1), (0, 2, 3), (4, 5)]


def patched(family, **changes):
    model = built(family, **changes)
    fa2patch.apply(model)
    return model


def places(path):
    tree = Tree(LENGTHS, PARENTS, torch.device("cpu"))
    return tree.along(torch.arange(sum(LENGTHS)), path[-1])


def test_the_loss_is_that_of_the_labels_inside_segments():
    model = patched("llama")
    batch = tree_batch(LENGTHS, PARENTS, labels=True)
    output = model(**batch)
    logits, labels = output.logits[0, :-1], batch["labels"][0, 1:]
    expected = torch.nn.functional.cross_entropy(logits, labels, ignore_index=-100)
    torch.testing.assert_close(output.loss, expected)
    assert (labels != -100).sum() == sum(LENGTHS) - len(LENGTHS)


def test_a_label_that_no_token_predicts_is_an_error():
    model = patched("llama")
    batch = tree_batch(LENGTHS, PARENTS, labels=True)
    roots = batch["labels"].clone()
    roots[0, [0, 14]] = 5  # as in any packed row, the first tokens of roots are not predicted, and this is no error
    torch.testing.assert_close(model(**{**batch, "labels": roots}).loss, model(**batch).loss)
    for first in (5, 8, 12, 20):
        labels = batch["labels"].clone()
        labels[0, first] = 5
        with pytest.raises(BadBatch, match="the first token of a segment with a parent has a label"):
            model(**{**batch, "labels": labels})
    with pytest.raises(BadBatch, match="with segment_parents"):
        model(**{**batch, "labels": batch["labels"][:, -4:]}, logits_to_keep=4)


def test_a_shifted_label_may_stand_at_a_parents_last_token():
    # The label is the token that every branch starts with. At a leaf's last token it is ignored.
    model = patched("llama")
    batch = tree_batch(LENGTHS, PARENTS)
    if "loss_function" not in dir(model):
        pytest.skip("this Transformers has no shift_labels")
    shift_labels = batch["input_ids"].clone()
    found = model(**batch, labels=shift_labels.fill_(7).index_fill(1, torch.tensor([0, 5, 8, 12, 14, 20]), -100),
                  shift_labels=shift_labels)  # fmt: skip
    kept = torch.ones(sum(LENGTHS), dtype=torch.bool)
    kept[[7, 13, 22]] = False
    expected = torch.nn.functional.cross_entropy(found.logits[0][kept], shift_labels[0][kept])
    torch.testing.assert_close(found.loss, expected)


def test_a_pooled_head_scores_every_path():
    config = tiny_models.build("llama", "sdpa").config
    config.num_labels = 3
    torch.manual_seed(0)
    model = transformers.LlamaForSequenceClassification(config).eval()
    batch = tree_batch(LENGTHS, PARENTS)
    expected = torch.cat([model(input_ids=batch["input_ids"][:, places(path)]).logits for path in PATHS])
    with fa2patch.apply(model):
        found = model(**batch, labels=torch.tensor([0, 2, 1]))
        torch.testing.assert_close(found.logits, expected, rtol=1e-4, atol=1e-5)
        with pytest.raises(BadBatch, match="each of the batch's 3 documents"):
            model(**batch, labels=torch.zeros(6, dtype=torch.int64))


def test_two_rows_each_with_a_tree():
    model, reference = patched("llama"), tiny_models.build("llama", "eager")
    one, other = tree_batch([4, 2, 3], [-1, 0, 0], seed=1), tree_batch([3, 6], [-1, 0], seed=2)
    batch = {
        **{name: torch.cat([one[name], other[name]]) for name in ("input_ids", "position_ids")},
        **dict.fromkeys(("cu_seq_lens_q", "cu_seq_lens_k"), torch.tensor([0, 4, 6, 9, 12, 18], dtype=torch.int32)),
        **dict.fromkeys(("max_length_q", "max_length_k"), 6),
        "segment_parents": torch.tensor([-1, 0, 0, -1, 3]),
    }
    found = model(**batch).logits
    for row, path in ((0, [0, 1, 2, 3, 4, 5]), (0, [0, 1, 2, 3, 6, 7, 8]), (1, list(range(9)))):
        alone = reference(input_ids=batch["input_ids"][row : row + 1, path]).logits[0]
        torch.testing.assert_close(found[row, path], alone, rtol=1e-4, atol=1e-4)


def test_parents_need_lengths_and_a_causal_model():
    batch = tree_batch(LENGTHS, PARENTS)
    without = {name: batch[name] for name in ("input_ids", "position_ids", "segment_parents")}
    with pytest.raises(BadParents, match="segment_parents came without cu_seq_lens_q"):
        patched("llama")(**without)
    if "bert:masked" in tiny_models.architectures():
        with pytest.raises(BadParents, match="tokens see later tokens"):
            patched("bert:masked")(**batch)


def test_a_mixer_that_looks_at_later_tokens_is_found():
    # ConvBERT has no attention layer that would say so: what its paths share is not the same on each of them.
    if "convbert:masked" not in tiny_models.architectures():
        pytest.skip("this Transformers has no ConvBERT")
    with pytest.raises(BadParents, match="looks at later tokens"):
        patched("convbert:masked")(**tree_batch(LENGTHS, PARENTS))


def test_longrope_cannot_share_a_prompt_across_its_limit():
    # Sequences longer than the limit have other factors: the prompt's keys would be needed twice.
    factors = {"short_factor": [1.0] * 4, "long_factor": [3.0] * 4}
    scaling = {"type": "longrope", "rope_type": "longrope", **factors}
    changes = {"rope_scaling": scaling, "original_max_position_embeddings": 8, "max_position_embeddings": 64}
    model = patched("phi3", **changes)
    with pytest.raises(PackingNotIsolated, match="the prompt would be needed twice"):
        model(**tree_batch([4, 3, 6], [-1, 0, 0]))
    reference = tiny_models.build("phi3", "eager", **changes)
    for lengths, parents in (([4, 3, 4], [-1, 0, 0]), ([7, 3, 6], [-1, 0, 0])):
        batch = tree_batch(lengths, parents)
        found = model(**batch).logits[0]
        tree = Tree(lengths, parents, torch.device("cpu"))
        for leaf in tree.leaves:
            path = tree.along(torch.arange(sum(lengths)), leaf)
            alone = reference(input_ids=batch["input_ids"][:, path]).logits[0]
            torch.testing.assert_close(found[path], alone, rtol=1e-4, atol=1e-4)


def test_a_packed_row_without_parents_is_computed_as_before():
    model = patched("llama")
    batch = tree_batch([4, 6, 3], [-1, -1, -1])
    plain = {name: value for name, value in batch.items() if name != "segment_parents"}
    torch.testing.assert_close(model(**batch).logits, model(**plain).logits, rtol=0, atol=1e-6)


@pytest.mark.parametrize("family", ["llama", "gemma2"])
@pytest.mark.parametrize("layers", [2, 4])
def test_a_tree_is_read_once_whatever_the_layers(family, layers):
    model = patched(family, **tiny_models.with_layers(family, layers))
    batch = tree_batch(LENGTHS, PARENTS)
    with reads.counted(packages=("fa2patch",)) as count:
        model(**batch)
    assert (count.reads, count.kernel) == (0, 1), count.where  # by the first layer
