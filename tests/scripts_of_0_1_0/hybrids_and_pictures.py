# docs/hybrids.md, line 19
import fa2patch
from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained("LiquidAI/LFM2-350M")  # short convolutions and attention
patch = fa2patch.apply(model)
print(fa2patch.verify(model))
for layer in patch.layers:
    print(layer.name, layer.seam, layer.kernel)


# docs/hybrids.md, line 32
fa2patch.revert(model)
found = fa2patch.verify(model, strict=False)
print(found.first_leak, found.leak_class)
assert not found.ok


# docs/hybrids.md, line 68
fa2patch.apply(model)
tokenizer = AutoTokenizer.from_pretrained("LiquidAI/LFM2-350M")
collate = fa2patch.DataCollatorWithFlattening(return_flash_attn_kwargs=True, return_seq_idx=True)
batch = collate([tokenizer("Packed."), tokenizer("And another one.")])
print(model(**batch, use_cache=False).loss)


# docs/hybrids.md, line 79
from transformers import AutoModelForMaskedLM

encoder = AutoModelForMaskedLM.from_pretrained("answerdotai/ModernBERT-base")
fa2patch.apply(encoder)
collate = fa2patch.DataCollatorWithFlattening(separator_id=None)
batch = collate([{"input_ids": [5, 6, 7], "labels": [-100, 9, -100]}, {"input_ids": [8, 9], "labels": [4, -100]}])
print(encoder(**batch).loss)
fa2patch.verify(encoder)


# docs/hybrids.md, line 111
import torch
from transformers import AutoModel

encoder = AutoModel.from_pretrained("answerdotai/ModernBERT-base")
fa2patch.apply(encoder)
batch = {"input_ids": torch.arange(3, 10)[None], "position_ids": torch.tensor([[0, 1, 2, 3, 0, 1, 2]])}
hidden = encoder(**batch).last_hidden_state[0]
means = [document.mean(0) for document in hidden.split(fa2patch.boundaries(batch["position_ids"]).lengths)]


# docs/pictures.md, line 28
import fa2patch
import torch
from transformers import AutoModelForImageTextToText
model = AutoModelForImageTextToText.from_pretrained("Qwen/Qwen2-VL-2B-Instruct")
vision = model.config.vision_config
grid, size = torch.tensor([[1, 4, 4]]), 3 * vision.temporal_patch_size * vision.patch_size**2
def processor(words):
    ids = torch.tensor([[*words, 93, *[94] * (16 // vision.spatial_merge_size**2), 7]])
    types = (ids == 94).long()
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "mm_token_type_ids": types,
            "pixel_values": torch.randn(16, size), "image_grid_thw": grid}
examples = [processor([5, 6]), processor([8])]

fa2patch.apply(model)
collate = fa2patch.DataCollatorForMultimodalFlattening(model)
batch = collate(examples)  # each: processor(text=..., images=..., return_tensors="pt")
print(model(**batch, use_cache=False).loss)
print(fa2patch.verify(model, batch=batch))
