"""Encoders: attention in both directions inside documents, the loss of masked tokens, and pooled embeddings."""

import inspect
import warnings

import pytest
import torch
import transformers

import fa2patch
from compat_matrix import tiny_models, tiny_overrides
from compat_matrix.check.cell import Cell, NotApplicable
from compat_matrix.check.compare import assert_close
from compat_matrix.check.points import POINTS
from compat_matrix.check.rows import alone, documents, pack
from fa2patch import errors
from fa2patch.upstream.find_layers import ModelLayers
from fa2patch.upstream.find_models import models

LENGTHS = (5, 9, 1, 3, 7)
PRESENT = [name for name in tiny_models.ENCODERS if tiny_models.is_present(name)]
TYPICAL = [name for name in ("bert:masked", "esm:masked", "modernbert:masked", "roberta:masked") if name in PRESENT]


def refused(family):
    # Why ``apply`` refuses a family; empty if it does not.
    try:
        fa2patch.apply(tiny_models.build(family)).revert()
    except (errors.LayerNotPatchable, errors.UnsupportedModel) as error:
        return str(error)
    return ""


TAKEN = [name for name in PRESENT if not refused(name)]


def needs(family):
    return pytest.mark.skipif(family not in TAKEN, reason=f"no {family} with a seam in this version")


def test_every_one_is_taken():
    assert TAKEN == PRESENT and {"bert:masked", "esm:masked", "roberta:masked"} <= {*PRESENT}


@pytest.mark.parametrize("point", [name for name in POINTS if name not in ("generation", "reverted")])
@pytest.mark.parametrize(
    "family",
    [
        name if name == "bert:masked" else pytest.param(name, marks=pytest.mark.slow)
        for name in TYPICAL
        if name in TAKEN
    ],
)
def test_point(family, point):
    try:
        POINTS[point](Cell(family, "sdpa"))
    except NotApplicable as reason:
        known = (
            "no sliding window", "takes no such rope scaling", "tokens see later tokens", "returns no cache",
            "returns no router logits",
        )  # fmt: skip
        assert any(words in str(reason) for words in known)


@pytest.mark.parametrize("family", TAKEN)
def test_tokens_see_both_ways_inside_their_document_and_nothing_beyond(family):
    docs, model = documents(6, 8, 5), tiny_models.build(family)
    batch = pack(docs)
    with fa2patch.apply(model, prove=False):  # the hook only looks
        before = model(**batch).logits[0]
        for at in (6, 13):  # the first and the last token of the second document
            ids = batch["input_ids"].clone()
            ids[0, at] = 3 + (ids[0, at] + 7) % 90
            after = model(**{**batch, "input_ids": ids}).logits[0]
            moved = (after != before).any(-1)
            assert moved[6:14].all(), "not both ways"
            assert not moved[:6].any() and not moved[14:].any()
        table = model.get_input_embeddings()
        seen = []
        hook = table.register_forward_hook(lambda module, args, output: seen.append(output) or output)
        logits = model(**batch).logits[0]
        hook.remove()
        (gradient,) = torch.autograd.grad(logits[6:14].square().sum(), seen[0])
        crossing = gradient.view(-1, gradient.shape[-1]).abs().sum(-1)
        assert (crossing[6:14] > 0).all() and not crossing[:6].any() and not crossing[14:].any()


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
@pytest.mark.parametrize("family", [name for name in TYPICAL if name in TAKEN])
def test_the_loss_of_masked_tokens_is_the_padded_run_s(family, implementation):
    docs = documents(*LENGTHS)
    reference, model = tiny_models.build(family, "eager"), tiny_models.build(family, implementation)
    labels = [doc.clone() for doc in docs]
    for label in labels:
        label[1::2] = -100  # labels are not shifted, so a document's first token is predicted too
    rows = torch.nn.utils.rnn.pad_sequence(docs, batch_first=True)
    padded = reference(
        input_ids=rows,
        attention_mask=(rows != 0).long(),
        labels=torch.nn.utils.rnn.pad_sequence(labels, batch_first=True, padding_value=-100),
    ).loss
    start = 1 if reference.config.model_type in tiny_models.NOT_FROM_ZERO else 0
    collate = fa2patch.DataCollatorWithFlattening(separator_id=None, position_ids_start=start)
    batch = collate([{"input_ids": doc.tolist(), "labels": label.tolist()} for doc, label in zip(docs, labels)])
    with fa2patch.apply(model):
        packed = model(**batch).loss
        assert_close(packed, padded, "loss")
        packed.backward()
    padded.backward()
    given = {name: p.grad for name, p in reference.named_parameters() if p.grad is not None}
    largest = max(float(gradient.abs().max()) for gradient in given.values())
    for name, parameter in model.named_parameters():
        if name in given:
            expected = given[name].clone()
            if name.endswith("position_embeddings.weight"):
                expected[0] = parameter.grad[0]  # in the padded run, it may include the gradient of padding
            assert_close(parameter.grad, expected, name, 5e-5, at_least=0.01 * largest)


@pytest.mark.parametrize("family", [name for name in TYPICAL if name in TAKEN])
def test_mean_pooled_embeddings_are_those_of_documents_alone(family):
    docs = documents(*LENGTHS)
    cls = type(models(tiny_models.build(family))[-1])
    both = [cls._from_config(tiny_models.config_of(family), attn_implementation=name) for name in ("eager", "sdpa")]
    for model in both:
        tiny_models.scale_up(model.eval())
    reference, model = both
    expected = [reference(input_ids=doc[None]) for doc in docs]
    cu = torch.tensor([0, *map(len, docs)]).cumsum(0).int()
    batch = {"input_ids": torch.cat(docs)[None], "cu_seq_lens_q": cu, "cu_seq_lens_k": cu}
    batch.update(max_length_q=9, max_length_k=9)
    with fa2patch.apply(model):
        output = model(**batch)
        by_tuple = model(**batch, return_dict=False)
    for document, own in zip(output.last_hidden_state[0].split(list(LENGTHS)), expected):
        assert_close(document.mean(0), own.last_hidden_state[0].mean(0), "mean")
    if getattr(model, "pooler", None) is not None:
        assert_close(output.pooler_output, torch.cat([own.pooler_output for own in expected]), "pooled")
        assert torch.equal(by_tuple[1], output.pooler_output)


@needs("roberta:masked")
def test_roberta_counts_from_behind_its_padding_s_position():
    docs = documents(*LENGTHS)
    changes = {"pad_token_id": 1}
    reference, model = (tiny_models.build("roberta:masked", name, **changes) for name in ("eager", "sdpa"))
    expected = alone(reference, docs, counts_itself=True)  # its positions start at 2, as in its checkpoints
    collate = fa2patch.DataCollatorWithFlattening(position_ids_start=2, return_seq_idx=True)
    batch = collate([{"input_ids": doc.tolist()} for doc in docs])
    del batch["labels"]
    with fa2patch.apply(model) as patch:
        assert patch.facts.first_position == 2
        assert_close(model(**batch).logits[0], expected, "ids from 2")
        seq_idx = {name: batch[name] for name in ("input_ids", "seq_idx")}
        assert_close(model(**seq_idx).logits[0], expected, "no ids: counted from 2")
    ids = {"input_ids": batch["input_ids"], "position_ids": batch["position_ids"] - 2}
    with fa2patch.apply(model), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        from_zero = model(**ids).logits[0]
        model(**ids)
        assert (from_zero - expected).abs().max() > 1e-2 * expected.abs().max()
    (said,) = [str(one.message) for one in caught if one.category is errors.OtherPositions]
    assert "counts from 2" in said and "position_ids_start=2" in said
    assert fa2patch.apply(tiny_models.build("bert:masked")).facts.first_position == 0


@needs("modernbert:masked")
@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_modernbert_s_local_layers_see_their_window_to_both_sides(implementation):
    docs = documents(40, 1, 33, 3)
    model = tiny_models.build("modernbert:masked", implementation)  # it has local_attention=6
    with fa2patch.apply(model):
        assert_close(model(**pack(docs)).logits[0], alone(tiny_models.build("modernbert:masked"), docs), "logits")


@needs("esm:masked")
def test_esm_scales_each_document_by_its_own_masked_tokens():
    docs = documents(6, 8, 5)
    model = tiny_models.build("esm:masked")
    with fa2patch.apply(model):
        before = model(**pack(docs)).logits[0]
        docs[0][:3] = tiny_overrides.MASK_TOKEN
        after = model(**pack(docs)).logits[0]
    assert torch.equal(after[6:], before[6:]) and not torch.equal(after[:6], before[:6])
    assert_close(after, alone(tiny_models.build("esm:masked"), docs), "logits")


def small(cls, **changes):
    config = cls.config_class
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    return cls(config(vocab_size=9, **sizes, **changes)).eval()


@pytest.mark.parametrize("name", ["ForNextSentencePrediction", "ForMultipleChoice", "ForPreTraining"])
def test_heads_that_read_one_vector_per_row_are_refused(name):
    with pytest.raises(
        errors.UnsupportedModel, match=r"reads one vector per row, made of its first token by BertPooler"
    ):
        fa2patch.apply(small(getattr(transformers, f"Bert{name}")))


class NoPlaceForIds(transformers.BertModel):
    # Like DistilBERT up to 4.57, it counts positions along the row and has no argument to change that.

    def forward(self, input_ids=None, attention_mask=None):
        return super().forward(input_ids=input_ids, attention_mask=attention_mask)


@needs("bert:masked")
def test_positions_that_cannot_restart_are_refused():
    model = small(NoPlaceForIds, max_position_embeddings=32) if hasattr(NoPlaceForIds, "config_class") else None
    before = dict(vars(NoPlaceForIds))
    with pytest.raises(errors.UnsupportedModel, match=r"reads no position_ids.*embeddings\.position_embeddings"):
        fa2patch.apply(model)
    assert dict(vars(NoPlaceForIds)) == before and fa2patch.status(model) is None


def test_modernbert_that_unpads_on_its_own_is_refused():
    if "modernbert:masked" not in PRESENT or "qkv" not in inspect.getsource(tiny_models.modeling("modernbert:masked")):
        pytest.skip("not in this version")
    model = tiny_models.build("modernbert:masked", "sdpa")
    if not any(layer.fused for layer in ModelLayers(model).attention):
        return  # from 5.1 on it uses the common interface
    model.config._attn_implementation = "flash_attention_2"
    with pytest.raises(errors.UnsupportedModel, match="takes padding out on its own"):
        fa2patch.apply(model)


class TableOfTypes(transformers.BertModel):
    # Like BERT up to 4.57, it cuts its table of token types to the length of the row.

    def forward(self, input_ids=None, attention_mask=None, token_type_ids=None, position_ids=None, **kwargs):
        if token_type_ids is None:
            token_type_ids = self.embeddings.token_type_ids[:, : input_ids.shape[1]].expand(input_ids.shape)
        return super().forward(input_ids, attention_mask, token_type_ids, position_ids, **kwargs)


def test_a_row_may_be_longer_than_a_table_of_token_types():
    model, docs = small(TableOfTypes, max_position_embeddings=16), [doc % 9 for doc in documents(13, 16, 9)]
    expected = torch.cat([model(doc[None]).last_hidden_state[0] for doc in docs])
    with fa2patch.apply(model):
        assert_close(model(**pack(docs)).last_hidden_state[0], expected, "states of a long row")
        types = torch.cat([torch.ones_like(doc) for doc in docs])[None]
        given = model(**pack(docs), token_type_ids=types).last_hidden_state[0]
        assert not torch.allclose(given, expected), "token types of the batch are used"


class OwnTable(torch.nn.Module):
    # The embeddings count positions along the row, as DistilBERT's up to 4.57.

    def __init__(self, config):
        super().__init__()
        self.word_embeddings = torch.nn.Embedding(32, config.hidden_size)
        self.position_embeddings = torch.nn.Embedding(32, config.hidden_size)
        self.register_buffer("position_ids", torch.arange(32)[None])

    def forward(self, input_ids=None, **kwargs):
        places = self.position_embeddings(self.position_ids[:, : input_ids.shape[1]])
        return self.word_embeddings(input_ids) + places


class CountsByItself(transformers.BertModel):
    def __init__(self, config):
        super().__init__(config)
        self.embeddings = OwnTable(config)

    def forward(self, input_ids=None, attention_mask=None):
        return super().forward(input_ids=input_ids, attention_mask=attention_mask)


@pytest.mark.parametrize("others", [0, 1], ids=["alone", "beside a patched BertModel"])
@pytest.mark.parametrize("lengths", [(5,), (1,), (4, 3)])
def test_position_ids_of_one_document_come_to_a_model_that_takes_none(lengths, others):
    model, docs = small(CountsByItself), [doc % 9 for doc in documents(*lengths)]
    patched = [fa2patch.apply(small(transformers.BertModel)) for _ in range(others)]
    expected = torch.cat([model(doc[None]).last_hidden_state[0] for doc in docs])
    fa2patch.apply(model)
    assert_close(model(**pack(docs)).last_hidden_state[0], expected, "states")
    width = max(lengths) + 2
    ids, positions, mask = (torch.zeros(len(docs), width, dtype=torch.long) for _ in range(3))
    for row, doc in enumerate(docs):
        ids[row, : len(doc)], positions[row, : len(doc)], mask[row, : len(doc)] = doc, torch.arange(len(doc)), 1
    padded = model(input_ids=ids, position_ids=positions, attention_mask=mask).last_hidden_state
    assert_close(padded[mask.bool()], expected, "states of a padded batch")
    other_ids = model(docs[0][None], position_ids=torch.arange(1, len(docs[0]) + 1)[None]).last_hidden_state[0]
    assert not torch.allclose(other_ids, expected[: len(other_ids)])
    for patch in patched:
        patch.revert()
