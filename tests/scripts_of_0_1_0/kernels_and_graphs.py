# docs/kernels.md, line 10
import fa2patch
import torch
from transformers import AutoModelForCausalLM

model = AutoModelForCausalLM.from_pretrained("Qwen/Qwen2.5-0.5B")
collate = fa2patch.DataCollatorWithFlattening(return_flash_attn_kwargs=True)
batch = collate([{"input_ids": [5, 6, 7, 8]}, {"input_ids": [9, 10]}])


# docs/kernels.md, line 62
patch = fa2patch.apply(model)
model(**batch)
for layer in patch.layers:
    print(layer.name, layer.kernel, "|", layer.why)


# docs/kernels.md, line 103
fa2patch.apply(model, kernel="reference")
print(model(**batch).loss)


# docs/kernels.md, line 157
fa2patch.apply(model)
compiled = torch.compile(model, fullgraph=True)
compiled(**batch, use_cache=False).loss.backward()
other = collate([{"input_ids": [5, 6, 7]}, {"input_ids": [9, 10, 11, 12, 13]}, {"input_ids": [4, 5]}])
compiled(**other, use_cache=False).loss.backward()
