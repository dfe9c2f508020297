"""A classifier pools in every document the token that padded training pools in this version, also if pad is eos.

Transformers up to 4.48 pools before the first padding token, newer ones at the last token that is no padding, and those
of 2023 at the number of other tokens. With eos as padding inside of a document, these differ.
"""

import pytest
import torch
import transformers
from small_models import class_of, config_of, documents, llama, logits_alone, padded, patched, refusal, small

import fa2patch
from compat_matrix.check.compare import assert_close

EOS = 2
PLAIN = documents(5, 4, 7, 3, 1)


def with_eos(*places):
    # Negative places count from the end.
    made = []
    for doc in PLAIN:
        for place in places:
            at = min(place, len(doc)) if place >= 0 else len(doc) + 1 + place
            doc = torch.cat([doc[:at], torch.tensor([EOS]), doc[at:]])
        made.append(doc)
    return made


EVERYWHERE = {
    "nowhere": PLAIN,
    "end": with_eos(-1),
    "twice at the end": with_eos(-1, -1),
    "inside": with_eos(1),
    "inside and end": with_eos(1, -1),
    "inside, twice": with_eos(1, 3),
}

NAMES = {
    "llama": "LlamaForSequenceClassification", "gpt2": "GPT2ForSequenceClassification",
    "mistral": "MistralForSequenceClassification", "falcon": "FalconForSequenceClassification",
    "opt": "OPTForSequenceClassification", "gpt_neox": "GPTNeoXForSequenceClassification",
    "qwen2": "Qwen2ForSequenceClassification",
}  # fmt: skip


def classifier(family="llama", cls=None):
    changes = {"pad_token_id": EOS, "eos_token_id": EOS, "num_labels": 3, "classifier_dropout": 0.0}
    model = small(cls or class_of(NAMES[family]), config_of(family, **changes))
    with torch.no_grad():
        table = model.get_input_embeddings().weight
        table[EOS] = table[EOS + 1 :].mean(0)  # Transformers begins with zeros, which would hide who reads padding
    return model


def padded_rows(docs):
    return {**padded(docs, EOS), "labels": torch.arange(len(docs)) % 3}


def packed(docs, **options):
    collate = fa2patch.DataCollatorWithFlattening(document_labels=True, **options)
    return collate([{"input_ids": doc.tolist(), "label": number % 3} for number, doc in enumerate(docs)])


def step(model, batch):
    # The embedding's gradient tells the documents' pooled tokens apart.
    model.zero_grad()
    output = model(**batch)
    output.loss.backward()
    gradient = model.get_input_embeddings().weight.grad.clone()
    return output.logits.detach(), output.loss.detach(), gradient


def assert_same(found, expected):
    for name, one, other in zip(("logits", "loss", "gradient"), found, expected):
        assert_close(one, other, name)


@pytest.mark.parametrize(
    "family, where",
    [("llama", where) for where in EVERYWHERE] + [(family, "inside and end") for family in NAMES if family != "llama"],
)
def test_padding_tokens_inside_of_documents(family, where):
    model = classifier(family)
    expected = step(model, padded_rows(EVERYWHERE[where]))
    fa2patch.apply(model)
    for options in ({}, {"return_flash_attn_kwargs": True}, {"pad_to_multiple_of": 32}):
        assert_same(step(model, packed(EVERYWHERE[where], **options)), expected)


def test_it_would_be_seen():
    # The places of eos that are compared give different vectors of the same tokens.
    model = classifier()
    with torch.no_grad():
        ends, inside = (model(**padded_rows(EVERYWHERE[where])).logits for where in ("end", "inside"))
    assert (ends - inside).abs().amax(-1)[:4].min() > 1e-2


def test_documents_of_padding_tokens_alone():
    # Padded, some versions pool what stands behind such a document. Then its last token is taken, as if it was alone. A
    # document that begins with the padding token is treated likewise.
    model = classifier()
    docs = [torch.tensor([EOS]), PLAIN[0], torch.tensor([EOS, EOS]), torch.tensor([EOS, 5, 6, 7])]
    expected = logits_alone(model, docs)
    fa2patch.apply(model)
    with torch.no_grad():
        assert_close(model(**packed(docs)).logits, expected, "logits")


def test_several_rows():
    model = classifier()
    one, other, *_ = EVERYWHERE["inside and end"]
    docs = [one, other, other, one]
    expected = step(model, padded_rows(docs))
    rows = [packed(docs[:2]), packed(docs[2:])]
    batch = {name: torch.cat([row[name] for row in rows]) for name in ("input_ids", "position_ids")}
    assert_same(step(patched(model), {**batch, "labels": torch.arange(4) % 3}), expected)


@pytest.mark.parametrize("where", ["in the prompt", "in the answers", "an answer of eos alone"])
def test_shared_prompts(where):
    # The padding token is looked for along the whole path.
    prompt, answers = torch.tensor([5, 6, 7, 8]), [torch.tensor([9, 10, 11]), torch.tensor([12, 13])]
    if where == "in the prompt":
        prompt[1] = EOS
    elif where == "in the answers":
        answers = [torch.tensor([9, EOS, 11]), torch.tensor([12, EOS])]
    else:
        answers[1] = torch.tensor([EOS])
    model = classifier()
    docs = [torch.cat([prompt, answer]) for answer in answers]
    expected = step(model, padded_rows(docs))
    fa2patch.apply(model)
    shared = fa2patch.packing.share(docs, prompts=[len(prompt)] * 2, least=1)
    assert len(shared.batch["segment_parents"]) == 3
    assert_same(step(model, {**shared.batch, "labels": torch.arange(2) % 3}), expected)


class Pools(transformers.LlamaForSequenceClassification):
    # ``place`` says which token it pools.

    def forward(self, input_ids=None, attention_mask=None, position_ids=None, labels=None, **kwargs):
        outputs = self.model(input_ids=input_ids, attention_mask=attention_mask, position_ids=position_ids)
        logits = self.score(outputs[0])
        pooled_logits = self.place(input_ids, logits)
        loss = None if labels is None else torch.nn.functional.cross_entropy(pooled_logits, labels)
        return transformers.modeling_outputs.SequenceClassifierOutputWithPast(loss=loss, logits=pooled_logits)


def at(logits, places):
    return logits[torch.arange(len(logits), device=logits.device), places]


def by_the_number(self, ids, logits):
    # BLOOM, Falcon and MPT did so in 2023.
    return at(logits, torch.ne(ids, self.config.pad_token_id).sum(-1) - 1)


def before_the_first(self, ids, logits):
    return at(logits, torch.eq(ids, self.config.pad_token_id).int().argmax(-1) - 1)


def the_last(self, ids, logits):
    places = torch.arange(ids.shape[1], device=ids.device) * (ids != self.config.pad_token_id)
    return at(logits, places.argmax(-1))


def pooling(place):
    return type("Pooling", (Pools,), {"place": place})


OTHERS = {
    "mean": lambda self, ids, logits: logits.mean(1),
    "first": lambda self, ids, logits: logits[:, 0],
    "largest": lambda self, ids, logits: logits.amax(1),
}


@pytest.mark.parametrize("where", ["end", "inside, twice"])
@pytest.mark.parametrize("place", [by_the_number, before_the_first, the_last])
def test_the_models_own_code_decides(place, where):
    model, docs = classifier(cls=pooling(place)), EVERYWHERE[where]
    expected = step(model, padded_rows(docs))
    assert_same(step(patched(model), packed(docs)), expected)


@pytest.mark.parametrize("place", OTHERS.values(), ids=OTHERS)
def test_another_way_to_pool_is_refused(place):
    with refusal("one vector per row, in another way than by its last token", fa2patch.errors.UnsupportedModel):
        fa2patch.apply(classifier(cls=pooling(place)))


def test_without_a_padding_token():
    model = patched(llama(transformers.LlamaForSequenceClassification, pad_token_id=None, num_labels=3))
    with pytest.raises(fa2patch.errors.BadBatch, match="no pad_token_id in its config"):
        model(**packed(PLAIN))
    model.config.pad_token_id = 0
    assert model(**packed(PLAIN)).logits.shape == (len(PLAIN), 3)
