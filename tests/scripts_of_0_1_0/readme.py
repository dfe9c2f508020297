# README.md, line 16
import fa2patch
from transformers import AutoModelForCausalLM, AutoTokenizer, Trainer, TrainingArguments

name = "Qwen/Qwen2.5-0.5B"
tokenizer = AutoTokenizer.from_pretrained(name)
model = AutoModelForCausalLM.from_pretrained(name)
fa2patch.apply(model)  # in place

texts = [f"What is {n} and {n}? It is {2 * n}." for n in range(400)]
trainer = Trainer(
    model,
    TrainingArguments("out", per_device_train_batch_size=8, max_steps=20),
    train_dataset=[tokenizer(text) for text in texts],
    data_collator=fa2patch.DataCollatorWithFlattening(),  # no padding
)
trainer.train()


# README.md, line 132
from transformers import AutoModelForCausalLM
import fa2patch
model = AutoModelForCausalLM.from_pretrained("Qwen/Qwen2.5-0.5B")
fa2patch.apply(model)

print(fa2patch.verify(model))


# README.md, line 158
import fa2patch
from transformers import AutoModelForCausalLM
model = AutoModelForCausalLM.from_pretrained("Qwen/Qwen2.5-0.5B")
fa2patch.apply(model)
sequences = [list(range(3, 43)) + completion for completion in ([50, 51], [60], [70, 71, 72])]

row = fa2patch.packing.share(sequences)  # token ids: prompt + completion
logps = row.logps(model(**row.batch).logits)  # of each sequence's tokens


# docs/how.md, line 11
import fa2patch

collate = fa2patch.DataCollatorWithFlattening(return_flash_attn_kwargs=True)
batch = collate([{"input_ids": [11, 12, 13]}, {"input_ids": [21, 22]}])
print(batch["input_ids"])  # tensor([[11, 12, 13, 21, 22]])
print(batch["position_ids"])  # tensor([[0, 1, 2, 0, 1]])
print(batch["labels"])  # tensor([[-100,   12,   13, -100,   22]])
print(batch["cu_seq_lens_q"].tolist(), batch["max_length_q"])  # [0, 3, 5] 3


# docs/how.md, line 29
import fa2patch, torch

found = fa2patch.boundaries(torch.tensor([[7, 8, 9, 0, 1, 2, 3]]))
print(found.cu_seqlens.tolist(), found.max_seqlen)  # [0, 3, 7] 4


# docs/how.md, line 59
import transformers
import fa2patch
model = transformers.AutoModelForCausalLM.from_pretrained("Qwen/Qwen2.5-0.5B")

patch = fa2patch.apply(model)
for layer in patch.layers:
    print(layer.name, layer.seam, layer.owner, layer.attribute, layer.state)
patch.revert()  # nothing is left
