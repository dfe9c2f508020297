# docs/shared.md, line 11
import fa2patch
import torch
from transformers import AutoModelForCausalLM

model = AutoModelForCausalLM.from_pretrained("Qwen/Qwen2.5-0.5B")
fa2patch.apply(model)


# docs/shared.md, line 24
prompt = list(range(3, 43))  # 40 tokens
completions = [[50, 51, 52], [60], [70, 71, 72, 73]]
row = fa2patch.packing.share([prompt + each for each in completions], prompts=[len(prompt)] * 3)
print(row)  # <Shared: 3 sequences of 128 tokens in 50 tokens, 4 segments>

logits = model(**row.batch).logits
logps = row.logps(logits)  # for each sequence one number for each token but the first
of_completions = [each[len(prompt) - 1 :].sum() for each in logps]
torch.stack(of_completions).mean().neg().backward()


# docs/shared.md, line 47
system = list(range(3, 33))
prompts = [system + list(range(100, 120)), system + list(range(200, 230))]
sequences = [prompt + [completion, 7] for prompt in prompts for completion in (40, 41, 42, 43)]
row = fa2patch.packing.share(sequences, prompts=[len(prompt) for prompt in prompts for _ in range(4)])
print(row.batch["segment_parents"].tolist())  # [-1, 0, 1, 1, 1, 1, 0, 6, 6, 6, 6]


# docs/shared.md, line 80
ids = torch.tensor([[11, 12, 13, 14, 21, 22, 23, 14, 31, 32]])  # A B C, D x y z, D u v
cu = torch.tensor([0, 3, 7, 10], dtype=torch.int32)
lengths = {"cu_seq_lens_q": cu, "cu_seq_lens_k": cu, "max_length_q": 4, "max_length_k": 4}
parents = torch.tensor([-1, 0, 0], dtype=torch.int32)
positions = torch.tensor([[0, 1, 2, 3, 4, 5, 6, 3, 4, 5]])
found = model(input_ids=ids, position_ids=positions, **lengths, segment_parents=parents).logits
alone = model(input_ids=torch.tensor([[11, 12, 13, 14, 31, 32]])).logits
assert torch.allclose(found[0, 7:], alone[0, 3:], atol=1e-5)  # D u v, as after A B C


# docs/shared.md, line 95
from fa2patch.preference import DataCollatorForPreferenceFlattening, per_document_logps

pair = {"prompt_input_ids": [5, 6, 7], "chosen_input_ids": [8, 9], "rejected_input_ids": [10]}
batch = DataCollatorForPreferenceFlattening(share_prompts=True)([pair, pair])
labels = batch.pop("labels")
where = fa2patch.Boundaries(batch["cu_seq_lens_q"], batch["max_length_q"], parents=batch["segment_parents"])
sums, counts = per_document_logps(model(**batch).logits, labels, where)
chosen, rejected = sums.chunk(2)
assert counts.tolist() == [2, 2, 1, 1]
