# docs/stack/trainer.md, line 7
import fa2patch
from transformers import AutoModelForCausalLM, AutoTokenizer, Trainer, TrainingArguments

tokenizer = AutoTokenizer.from_pretrained("Qwen/Qwen2.5-0.5B")
model = AutoModelForCausalLM.from_pretrained("Qwen/Qwen2.5-0.5B")
fa2patch.apply(model)
dataset = [tokenizer(f"What is {n} and {n}? It is {2 * n}.") for n in range(100)]
args = TrainingArguments("out", per_device_train_batch_size=8, max_steps=5)
trainer = Trainer(model, args, train_dataset=dataset, data_collator=fa2patch.DataCollatorWithFlattening())
trainer.train()


# docs/stack/trainer.md, line 25
import fa2patch
from transformers import AutoModelForCausalLM, AutoTokenizer, Trainer, TrainingArguments

tokenizer = AutoTokenizer.from_pretrained("Qwen/Qwen2.5-0.5B")
callback = fa2patch.TrainerCallback()
trainer = Trainer(
    model_init=lambda: AutoModelForCausalLM.from_pretrained("Qwen/Qwen2.5-0.5B"),
    args=TrainingArguments("out", per_device_train_batch_size=8, max_steps=5),
    train_dataset=[tokenizer(f"What is {n} and {n}? It is {2 * n}.") for n in range(100)],
    data_collator=fa2patch.DataCollatorWithFlattening(),
    callbacks=[callback],
)
trainer.train()
assert callback.patch is fa2patch.status(trainer.model)


# docs/stack/own_loop.md, line 6
import fa2patch, torch
from transformers import AutoModelForCausalLM, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained("Qwen/Qwen2.5-0.5B")
model = AutoModelForCausalLM.from_pretrained("Qwen/Qwen2.5-0.5B").train()
fa2patch.apply(model)
collate = fa2patch.DataCollatorWithFlattening()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
for step in range(5):
    batch = collate([tokenizer(f"What is {n} and {step}? It is {n + step}.") for n in range(8)])
    model(**batch, use_cache=False).loss.backward()
    optimizer.step()
    optimizer.zero_grad()


# docs/stack/own_loop.md, line 33
import fa2patch, torch
from transformers import AutoModelForCausalLM
model = AutoModelForCausalLM.from_pretrained("Qwen/Qwen2.5-0.5B")
fa2patch.apply(model)

ids = torch.tensor([[5, 6, 7, 8, 9, 5, 6, 7]])
positions = torch.tensor([[0, 1, 2, 0, 1, 0, 1, 2]])  # documents of 3, 2 and 3 tokens
logits = model(input_ids=ids, position_ids=positions).logits
assert torch.allclose(logits[0, :3], logits[0, 5:], atol=1e-5)  # the same document, the same result


# docs/migrate.md, line 153
import fa2patch
from transformers import AutoModelForCausalLM, AutoTokenizer, Trainer, TrainingArguments

tokenizer = AutoTokenizer.from_pretrained("Qwen/Qwen2.5-0.5B")
model = AutoModelForCausalLM.from_pretrained("Qwen/Qwen2.5-0.5B")
fa2patch.apply(model)
dataset = [tokenizer(f"What is {n} and {n}? It is {2 * n}.") for n in range(40)]
collator = fa2patch.DataCollatorWithFlattening()  # was: DataCollatorForLanguageModeling(tokenizer, mlm=False)
trainer = Trainer(model, TrainingArguments("out", max_steps=5), train_dataset=dataset, data_collator=collator)
trainer.train()


# docs/migrate.md, line 174
from fa2patch import DataCollatorWithFlattening  # was: from transformers import DataCollatorWithFlattening

collate = DataCollatorWithFlattening(return_flash_attn_kwargs=True, pad_to_multiple_of=8)
batch = collate([{"input_ids": [10, 11, 12, 13]}, {"input_ids": [20, 21, 22]}])
assert batch["position_ids"].tolist() == [[0, 1, 2, 3, 0, 1, 2, 0]]  # the padding is a document of its own


# docs/migrate.md, line 193
from transformers import AutoModelForCausalLM, AutoTokenizer
import fa2patch, torch
tokenizer = AutoTokenizer.from_pretrained("Qwen/Qwen2.5-0.5B")
dataset = [tokenizer(f"What is {n} and {n}? It is {2 * n}.") for n in range(40)]

sampler = fa2patch.packing.PackedBatchSampler([len(one["input_ids"]) for one in dataset], max_tokens=128)
loader = torch.utils.data.DataLoader(dataset, batch_sampler=sampler, collate_fn=fa2patch.DataCollatorWithFlattening())
assert all(batch["input_ids"].numel() <= 128 for batch in loader)


# docs/migrate.md, line 207
from transformers import AutoModelForCausalLM

model = AutoModelForCausalLM.from_pretrained("Qwen/Qwen2.5-0.5B")
fa2patch.apply(model)  # padding_free
lengths = [len(one["input_ids"]) for one in dataset]
sampler = fa2patch.packing.PackedBatchSampler(lengths, None, strategy="mini_batches", batch_size=8)  # multipack
loader = torch.utils.data.DataLoader(dataset, batch_sampler=sampler, collate_fn=fa2patch.DataCollatorWithFlattening())
loss = model(**next(iter(loader))).loss


# docs/faq.md, line 9
import fa2patch
from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained("Qwen/Qwen2.5-0.5B")
tokenizer = AutoTokenizer.from_pretrained("Qwen/Qwen2.5-0.5B")
collate = fa2patch.DataCollatorWithFlattening()
batch = collate([tokenizer("One example."), tokenizer("And another one.")])


# docs/faq.md, line 47
import torch

fa2patch.apply(model)
mask = torch.ones_like(batch["input_ids"])
assert torch.equal(model(**batch, attention_mask=mask).logits, model(**batch).logits)


# docs/faq.md, line 138
import peft

lora = peft.get_peft_model(model, peft.LoraConfig(target_modules=["q_proj", "v_proj"]))
fa2patch.apply(lora)
lora(**batch).loss.backward()
merged = lora.merge_and_unload()


# docs/faq.md, line 151
fa2patch.apply(model)
model.gradient_checkpointing_enable()
model.train()(**batch, use_cache=False).loss.backward()


# docs/faq.md, line 185
fa2patch.apply(model)
model.eval()
prompt = tokenizer("What is 2 and 2?", return_tensors="pt")
ids = model.generate(prompt["input_ids"], max_new_tokens=8, do_sample=False)
print(tokenizer.decode(ids[0]))


# docs/faq.md, line 198
names = set(model.state_dict())
fa2patch.apply(model)
assert set(model.state_dict()) == names
model.save_pretrained("trained")
assert fa2patch.status(AutoModelForCausalLM.from_pretrained("trained")) is None


# docs/faq.md, line 210
with fa2patch.apply(model) as patch:
    model(**batch)
assert fa2patch.status(model) is None and not patch.active


# docs/faq.md, line 256
tokenizer.model_input_names = ["input_ids", "attention_mask"]
assert list(tokenizer("One example.")) == ["input_ids", "attention_mask"]
