# docs/right.md, line 9
import fa2patch
from transformers import AutoModelForCausalLM, AutoTokenizer, Trainer, TrainingArguments

model = AutoModelForCausalLM.from_pretrained("Qwen/Qwen2.5-0.5B")
tokenizer = AutoTokenizer.from_pretrained("Qwen/Qwen2.5-0.5B")
dataset = [tokenizer(f"What is {n} and {n}? It is {2 * n}.") for n in range(64)]


# docs/right.md, line 23
fa2patch.apply(model)
found = fa2patch.verify(model)  # raises PackingNotIsolated if a document reaches another
print(found)


# docs/right.md, line 31
fa2patch.apply(model)
collate = fa2patch.DataCollatorWithFlattening()
fa2patch.verify(model, batch=collate(dataset[:4]))


# docs/right.md, line 86
fa2patch.revert(model)
found = fa2patch.verify(model, strict=False)  # this model is not patched
assert not found.ok and not found.patched
print(found.first_leak, found.leak_class, found.reason)
print(max(document.moved for document in found.documents))


# docs/right.md, line 98
fa2patch.apply(model)
batch = fa2patch.DataCollatorWithFlattening()(dataset)  # 64 documents
print(fa2patch.verify(model, batch=batch, max_documents=4).ok)


# docs/right.md, line 108
args = TrainingArguments("out", per_device_train_batch_size=8, report_to="none")
collate = fa2patch.DataCollatorWithFlattening()
trainer = Trainer(model, args, train_dataset=dataset, data_collator=collate)
fa2patch.apply(model)
print(fa2patch.verify(model, batch=next(iter(trainer.get_train_dataloader()))))


# docs/right.md, line 119
try:
    import torch

    ids = torch.tensor([dataset[0]["input_ids"] + dataset[1]["input_ids"]])
    fa2patch.verify(model, batch={"input_ids": ids, "attention_mask": torch.ones_like(ids)})
except fa2patch.errors.BadBatch:
    pass
else:
    raise AssertionError("expected BadBatch")


# docs/right.md, line 138
patch = fa2patch.apply(model)
model(**fa2patch.DataCollatorWithFlattening()(dataset[:4]))
for layer in patch.layers:
    print(layer.name, layer.seam, layer.state, layer.kernel)


# docs/right.md, line 268
try:
    class Mixing(type(model.model.layers[0].mlp)):  # your own module, and it looks along the row
        def forward(self, x):
            return super().forward(x) + x.cumsum(1)


    model.model.layers[0].mlp.__class__ = Mixing
    fa2patch.apply(model)
    model(**fa2patch.DataCollatorWithFlattening()(dataset[:4]))
except fa2patch.errors.PackingNotIsolated:
    pass
else:
    raise AssertionError("expected PackingNotIsolated")
