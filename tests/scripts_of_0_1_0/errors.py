# docs/errors.md, line 21
import torch
import fa2patch
from transformers import AutoModelForCausalLM

model = AutoModelForCausalLM.from_pretrained("Qwen/Qwen2.5-0.5B")
ids = torch.arange(3, 13)[None]  # one row of ten tokens
position_ids = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4, 5]])  # two documents


# docs/errors.md, line 77
found = fa2patch.boundaries(position_ids)
token_losses = torch.rand(10)  # your own, one for each token
for start, end in zip(found.cu_seqlens, found.cu_seqlens[1:]):
    print(token_losses[start:end].mean())


# docs/errors.md, line 103
model = AutoModelForCausalLM.from_pretrained("Qwen/Qwen2.5-0.5B")
try:
    fa2patch.apply(model)
except fa2patch.Fa2PatchError as error:
    print("training padded:", error.message)


# docs/errors.md, line 127
try:
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(d_model=32, d_kv=8, d_ff=64, num_layers=1, num_heads=4, vocab_size=400)
    fa2patch.apply(T5ForConditionalGeneration(config))  # an encoder-decoder
except fa2patch.errors.UnsupportedModel:
    pass
else:
    raise AssertionError("expected UnsupportedModel")


# docs/errors.md, line 146
model = AutoModelForCausalLM.from_pretrained("Qwen/Qwen2.5-0.5B")
try:
    import functools

    base = model.model
    base.forward = functools.partial(type(base).forward, base)  # somebody keeps the unpatched forward
    fa2patch.apply(model)
except fa2patch.errors.LayerNotPatchable:
    pass
else:
    raise AssertionError("expected LayerNotPatchable")


# docs/errors.md, line 164
model = AutoModelForCausalLM.from_pretrained("Qwen/Qwen2.5-0.5B")
try:
    fa2patch.apply("Qwen/Qwen2.5-0.5B")  # a name, not a model
except fa2patch.errors.NotAModel:
    pass
else:
    raise AssertionError("expected NotAModel")


# docs/errors.md, line 183
model = AutoModelForCausalLM.from_pretrained("Qwen/Qwen2.5-0.5B")
try:
    fa2patch.apply(model, architecture="my_llama")
except fa2patch.errors.UnknownArchitecture:
    pass
else:
    raise AssertionError("expected UnknownArchitecture")


# docs/errors.md, line 193
try:
    fa2patch.register("my_llama")  # expected: fa2patch.Architecture("my_llama")
except fa2patch.errors.BadArchitecture:
    pass
else:
    raise AssertionError("expected BadArchitecture")


# docs/errors.md, line 208
model = AutoModelForCausalLM.from_pretrained("Qwen/Qwen2.5-0.5B")
try:
    fa2patch.apply(model, prove="always")
except fa2patch.errors.BadArgument:
    pass
else:
    raise AssertionError("expected BadArgument")


# docs/errors.md, line 218
model = AutoModelForCausalLM.from_pretrained("Qwen/Qwen2.5-0.5B")
try:
    fa2patch.apply(model, kernel="flash_attention_2")  # the kernel's name is "flash_attn"
except fa2patch.errors.UnknownKernel:
    pass
else:
    raise AssertionError("expected UnknownKernel")


# docs/errors.md, line 233
model = AutoModelForCausalLM.from_pretrained("Qwen/Qwen2.5-0.5B")
try:
    fa2patch.apply(model, kernel="flash_attn_3")  # not installed here
except fa2patch.errors.KernelUnavailable:
    pass
else:
    raise AssertionError("expected KernelUnavailable")


# docs/errors.md, line 245
model = AutoModelForCausalLM.from_pretrained("Qwen/Qwen2.5-0.5B")
try:
    class Wrong(type(fa2patch.kernels.named("reference"))):
        name = "wrong"

        def attend(self, q, k, v, *rest):
            return torch.zeros_like(q)  # a broken build


    fa2patch.apply(model, kernel=Wrong())
    model(input_ids=ids, position_ids=position_ids)
except fa2patch.errors.KernelWrong:
    pass
else:
    raise AssertionError("expected KernelWrong")


# docs/errors.md, line 263
model = AutoModelForCausalLM.from_pretrained("Qwen/Qwen2.5-0.5B")
try:
    fa2patch.verify(model)  # not patched, and Transformers alone leaks with its default cache
except fa2patch.errors.PackingNotIsolated:
    pass
else:
    raise AssertionError("expected PackingNotIsolated")


# docs/errors.md, line 361
model = AutoModelForCausalLM.from_pretrained("Qwen/Qwen2.5-0.5B")
try:
    fa2patch.apply(model)
    one = torch.tensor([0, 10], dtype=torch.int32)  # the lengths say one document, the ids say two
    model(input_ids=ids, position_ids=position_ids, cu_seq_lens_q=one, cu_seq_lens_k=one, max_length_q=10, max_length_k=10)
except fa2patch.errors.BoundaryConflict:
    pass
else:
    raise AssertionError("expected BoundaryConflict")


# docs/errors.md, line 380
model = AutoModelForCausalLM.from_pretrained("Qwen/Qwen2.5-0.5B")
try:
    fa2patch.apply(model)
    model(input_ids=ids, position_ids=position_ids[:, :-1])  # one id too few
except fa2patch.errors.BadPositionIds:
    pass
else:
    raise AssertionError("expected BadPositionIds")


# docs/errors.md, line 397
model = AutoModelForCausalLM.from_pretrained("Qwen/Qwen2.5-0.5B")
try:
    fa2patch.apply(model)
    cu = torch.tensor([0, 4, 9], dtype=torch.int32)  # the row has 10 tokens
    model(input_ids=ids, cu_seq_lens_q=cu, cu_seq_lens_k=cu, max_length_q=5, max_length_k=5)
except fa2patch.errors.BadCuSeqlens:
    pass
else:
    raise AssertionError("expected BadCuSeqlens")


# docs/errors.md, line 418
model = AutoModelForCausalLM.from_pretrained("Qwen/Qwen2.5-0.5B")
try:
    fa2patch.apply(model)
    cu, parents = torch.tensor([0, 4, 10], dtype=torch.int32), torch.tensor([1, -1])  # the parent comes later
    lengths = {"cu_seq_lens_q": cu, "cu_seq_lens_k": cu, "max_length_q": 6, "max_length_k": 6}
    model(input_ids=ids, position_ids=position_ids, **lengths, segment_parents=parents)
except fa2patch.errors.BadParents:
    pass
else:
    raise AssertionError("expected BadParents")


# docs/errors.md, line 434
model = AutoModelForCausalLM.from_pretrained("Qwen/Qwen2.5-0.5B")
try:
    fa2patch.apply(model)
    cu, mask = torch.tensor([0, 4, 10], dtype=torch.int32), torch.ones(1, 1, 10, 10)
    model(input_ids=ids, attention_mask=mask, cu_seq_lens_q=cu, cu_seq_lens_k=cu, max_length_q=6, max_length_k=6)
except fa2patch.errors.PackedWithDenseMask:
    pass
else:
    raise AssertionError("expected PackedWithDenseMask")


# docs/errors.md, line 449
model = AutoModelForCausalLM.from_pretrained("Qwen/Qwen2.5-0.5B")
try:
    from transformers import DynamicCache

    fa2patch.apply(model)
    model(input_ids=ids, position_ids=position_ids, past_key_values=DynamicCache())
except fa2patch.errors.PackedWithCache:
    pass
else:
    raise AssertionError("expected PackedWithCache")


# docs/errors.md, line 479
model = AutoModelForCausalLM.from_pretrained("Qwen/Qwen2.5-0.5B")
try:
    fa2patch.verify(model, batch={"input_ids": ids, "labels": ids})  # position_ids were lost
except fa2patch.errors.BadBatch:
    pass
else:
    raise AssertionError("expected BadBatch")


# docs/errors.md, line 507
try:
    collate = fa2patch.DataCollatorWithFlattening()
    collate([{"input_ids": [5, 6, 7], "labels": 1}, {"input_ids": [8, 9], "labels": 0}])  # set document_labels=True
except fa2patch.errors.CollatorError:
    pass
else:
    raise AssertionError("expected CollatorError")


# docs/errors.md, line 532
try:
    fa2patch.packing.plan([100, 5000, 300], max_tokens=4096)
except fa2patch.errors.PackingError:
    pass
else:
    raise AssertionError("expected PackingError")


# docs/errors.md, line 554
model = AutoModelForCausalLM.from_pretrained("Qwen/Qwen2.5-0.5B")
try:
    import warnings

    warnings.simplefilter("error", fa2patch.errors.NothingPacked)
    fa2patch.apply(model)
    for step in range(16):
        model.train()(input_ids=ids, labels=ids)
except fa2patch.errors.NothingPacked:
    pass
else:
    raise AssertionError("expected NothingPacked")


# docs/errors.md, line 589
model = AutoModelForCausalLM.from_pretrained("Qwen/Qwen2.5-0.5B")
try:
    import warnings

    warnings.simplefilter("error", fa2patch.errors.StaysPadded)
    fa2patch.apply(model, padded_batches=True)
    model(input_ids=ids, attention_mask=torch.tensor([[1, 1, 0, 1, 1, 1, 1, 1, 1, 1]]))
except fa2patch.errors.StaysPadded:
    pass
else:
    raise AssertionError("expected StaysPadded")
