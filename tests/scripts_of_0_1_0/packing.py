# docs/packing.md, line 11
import fa2patch
import torch
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained("Qwen/Qwen2.5-0.5B")
tokenizer = AutoTokenizer.from_pretrained("Qwen/Qwen2.5-0.5B")
fa2patch.apply(model)
dataset = [tokenizer(f"What is {n} and {n}? " + "It is. " * (n % 9)) for n in range(64)]
lengths = [len(example["input_ids"]) for example in dataset]


# docs/packing.md, line 29
collate = fa2patch.DataCollatorWithFlattening(return_flash_attn_kwargs=True)
loader = DataLoader(dataset, batch_size=8, shuffle=True, collate_fn=collate)
for batch in loader:
    loss = model(**batch).loss
print(batch["input_ids"].shape, len(batch["cu_seq_lens_q"]) - 1, "documents")


# docs/packing.md, line 43
collate = fa2patch.DataCollatorWithFlattening(pad_to_multiple_of=64, return_seq_idx=True)
batch = collate([{"input_ids": [5, 6, 7], "weights": [1.0, 1.0, 0.5]}, {"input_ids": [8, 9], "weights": [1.0, 2.0]}])
assert batch["input_ids"].shape == (1, 64)  # the padding is a document of its own, without labels
print(batch["weights"][0, :5], batch["seq_idx"][0, :6], batch["labels"][0, :6])
assert batch["real_tokens"].sum() == 5  # a patched model's router losses do not count the padding


# docs/packing.md, line 59
position_ids = torch.tensor([[0, 1, 2, 0, 1, 2, 3], [0, 1, 2, 3, 4, 0, 1]])
ids = torch.arange(14).view(2, 7)
fa2patch.verify(model, batch={"input_ids": ids, "position_ids": position_ids})


# docs/packing.md, line 69
found = fa2patch.boundaries(torch.tensor([[0, 1, 2, 0, 5, 6, 0, 1]]))
print(found.cu_seqlens, found.lengths)
assert found.lengths == (3, 1, 2, 2)


# docs/packing.md, line 95
model(input_ids=torch.arange(3, 10)[None], cu_seqlens=torch.tensor([0, 3, 7]), max_seqlen=4)


# docs/packing.md, line 106
plan = fa2patch.packing.plan(lengths, max_tokens=256)
print(plan, plan.fill, plan.rows[0])
collate = fa2patch.DataCollatorWithFlattening(return_flash_attn_kwargs=True)
batch = collate(plan.examples(dataset, 0))  # the first row
assert batch["input_ids"].shape[1] <= 256


# docs/packing.md, line 136
for strategy in ("best_fit_decreasing", "first_fit_decreasing", "in_order", "sorted"):
    print(strategy, len(fa2patch.packing.plan(lengths, max_tokens=256, strategy=strategy)), "rows")
print(fa2patch.packing.plan(lengths, None, strategy="mini_batches", batch_size=8))


# docs/packing.md, line 147
sampler = fa2patch.packing.PackedBatchSampler(lengths, max_tokens=256)
collate = fa2patch.DataCollatorWithFlattening(return_flash_attn_kwargs=True)
loader = DataLoader(dataset, batch_sampler=sampler, collate_fn=collate)
for epoch in range(2):
    sampler.set_epoch(epoch)
    for batch in loader:
        loss = model(**batch).loss


# docs/packing.md, line 163
from transformers import Trainer, TrainingArguments


class PackedTrainer(Trainer):
    def get_train_dataloader(self):
        sampler = fa2patch.packing.PackedBatchSampler(lengths, max_tokens=256, rank="all")
        return self.accelerator.prepare(DataLoader(dataset, batch_sampler=sampler, collate_fn=self.data_collator))


args = TrainingArguments("out", max_steps=4, report_to="none", accelerator_config={"even_batches": False})
PackedTrainer(model, args, train_dataset=dataset, data_collator=fa2patch.DataCollatorWithFlattening()).train()


# docs/packing.md, line 199
collate = fa2patch.DataCollatorWithFlattening(pad_to_multiple_of=2)  # sp_size=2
batch = collate(dataset[:3])
assert all(tensor.shape[0] == 1 and tensor.shape[1] % 2 == 0 for tensor in batch.values())


# docs/packing.md, line 209
sampler = fa2patch.packing.PackedBatchSampler(
    lengths, None, strategy="mini_batches", batch_size=4, num_replicas=2, rank=0
)
print(len(sampler), "steps", fa2patch.packing.imbalance(sampler.costs()))


# docs/packing.md, line 221
plan = fa2patch.packing.plan([40, 700, 90], max_tokens=256, too_long="truncate")
print(plan.truncated, plan.dropped, plan.tokens_left_out)
pieces = fa2patch.packing.plan([40, 700, 90], max_tokens=256, too_long="split")
print(pieces.pieces(0))


# docs/packing.md, line 234
rows = fa2patch.packing.stream(dataset, max_tokens=256, buffer=32)
collate = fa2patch.DataCollatorWithFlattening(return_flash_attn_kwargs=True)
for batch in DataLoader(rows, batch_size=None, collate_fn=collate):
    loss = model(**batch).loss


# docs/packing.md, line 251
from transformers import DataCollatorForLanguageModeling

padding = DataCollatorForLanguageModeling(tokenizer, mlm=False)
print(model.eval()(**padding(dataset[:8])).loss)
