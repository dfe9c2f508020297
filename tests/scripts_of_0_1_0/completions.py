# docs/completions.md, line 10
import fa2patch
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained("Qwen/Qwen2.5-0.5B")
tokenizer = AutoTokenizer.from_pretrained("Qwen/Qwen2.5-0.5B")
fa2patch.apply(model)
texts = [f"Question: what is {n} and {n}?\nAnswer: it is {2 * n}." for n in range(16)]
examples = [{"input_ids": tokenizer(text)["input_ids"]} for text in texts]


# docs/completions.md, line 28
batch = fa2patch.DataCollatorWithFlattening()(examples[:3])
first = batch["position_ids"] == 0
assert (batch["labels"][first] == -100).all() and (batch["labels"][~first] != -100).all()
print(model(**batch).loss)


# docs/completions.md, line 39
collate = fa2patch.DataCollatorForCompletionOnlyLM("\nAnswer:", tokenizer=tokenizer, padding_free=True)
batch = collate(examples[:4])
learned = batch["labels"][0] != -100
print(tokenizer.decode(batch["input_ids"][0][learned]))
print(model(**batch).loss)


# docs/completions.md, line 55
collate = fa2patch.DataCollatorWithFlattening(loss_masks=("completion_mask", "assistant_masks"))
example = {"input_ids": [5, 6, 7, 8], "completion_mask": [0, 0, 1, 1]}
print(collate([example, example])["labels"].tolist())  # [[-100, -100, 7, 8, -100, -100, 7, 8]]


# docs/completions.md, line 68
collate = fa2patch.DataCollatorWithFlattening(loss_weights="document")
batch = collate(examples[:4])
print(model(**batch).loss)
assert (batch["labels"] != -100).sum() == 4  # one for each document


# docs/completions.md, line 100
packed = {"input_ids": [5, 6, 7, 8, 9], "seq_lengths": [2, 3]}
batch = fa2patch.DataCollatorWithFlattening()([packed, packed])
print(batch["position_ids"].tolist())  # [[0, 1, 0, 1, 2, 0, 1, 0, 1, 2]]
fa2patch.verify(model, batch=batch)


# docs/completions.md, line 113
from transformers import AutoModelForSequenceClassification

classifier = AutoModelForSequenceClassification.from_pretrained("Qwen/Qwen2.5-0.5B", num_labels=3)
fa2patch.apply(classifier)
collate = fa2patch.DataCollatorWithFlattening(document_labels=True)
batch = collate([{**example, "label": n % 3} for n, example in enumerate(examples[:4])])
output = classifier(**batch)
assert output.logits.shape == (4, 3)


# docs/completions.md, line 131
from transformers import AutoModelForTokenClassification

tagger = AutoModelForTokenClassification.from_pretrained("Qwen/Qwen2.5-0.5B", num_labels=5)
fa2patch.apply(tagger)
collate = fa2patch.DataCollatorWithFlattening(separator_id=None)
batch = collate([{**example, "labels": [n % 5 for n in example["input_ids"]]} for example in examples[:4]])
print(tagger(**batch).loss)


# docs/completions.md, line 181
import fa2patch
import torch
from transformers import AutoModelForCausalLM
model = AutoModelForCausalLM.from_pretrained("Qwen/Qwen2.5-0.5B")
fa2patch.apply(model)

from fa2patch.preference import DataCollatorForPreferenceFlattening, per_document_logps

pair = {"prompt_input_ids": [5, 6, 7], "chosen_input_ids": [8, 9], "rejected_input_ids": [10]}
batch = DataCollatorForPreferenceFlattening(max_length=512)([pair, pair])
logits = model(input_ids=batch["input_ids"], position_ids=batch["position_ids"]).logits
sums, counts = per_document_logps(logits, batch["labels"], batch["position_ids"])
chosen, rejected = sums.chunk(2)
assert counts.tolist() == [2, 2, 1, 1]


# docs/completions.md, line 201
from fa2patch.patch.padding import pack_padded_batches

ids, mask = torch.tensor([[5, 6, 7, 8], [9, 10, 0, 0]]), torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0]])
with pack_padded_batches(model):
    logits = model(input_ids=ids, attention_mask=mask, use_cache=False).logits
assert logits.shape[:2] == (2, 4)
