"""What real processors, made without a download, return goes through the collator."""

import numpy as np
import pytest
import tokenizers
import torch
import transformers

import fa2patch
from compat_matrix import media_families, tiny_media, tiny_models
from compat_matrix.check.points import media
from fa2patch import DataCollatorForMultimodalFlattening
from fa2patch.errors import CollatorError

WORDS = ("<pad>", "what", "is", "it", "a", "cat")


def tokenizer(named=None, **special):
    # ``special`` tokens get the given ids, and ``named`` ones are attributes of the tokenizer.
    words = {word: number for number, word in enumerate(WORDS)}
    names = {number: word for word, number in special.items()}
    vocabulary = {**words, **{names.get(n, f"w{n}"): n for n in range(len(words), 97)}}
    inner = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="<pad>"))
    inner.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    inner.add_special_tokens([tokenizers.AddedToken(name, special=True) for name in special])
    more = {"extra_special_tokens": named} if named else {}
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=inner, pad_token="<pad>", bos_token="w6", eos_token="w7", **more
    )


def picture_processor(name, **options):
    # Pictures have 28 x 28 pixels. The ``Pil`` class needs no torchvision.
    cls = getattr(transformers, f"{name}Pil", None) or getattr(transformers, name)
    return cls(size={"height": 28, "width": 28}, **options)


def looking(processor):
    # The returned function calls the processor with a text and random pictures.
    generator = np.random.default_rng(0)

    def seen(text, pictures=1, **more):
        images = [generator.integers(0, 255, (40, 30, 3), dtype=np.uint8) for _ in range(pictures)]
        return processor(text=text, images=images, return_tensors="pt", **more)

    return seen


def _in_double(value):
    return value.double() if isinstance(value, torch.Tensor) and value.is_floating_point() else value


def assert_each_is_computed_as_alone(family, examples):
    model = tiny_models.build(family, "sdpa").double()  # in float32, rounding differs from one processor to another
    unused = {"token_type_ids"} - tiny_media.arguments(family)
    examples = [{name: _in_double(value) for name, value in each.items()} for each in examples]
    taken = [{name: value for name, value in each.items() if name not in unused} for each in examples]
    expected = torch.cat([media.alone(model, each) for each in taken])
    row = DataCollatorForMultimodalFlattening(model)(taken)
    given = media.packed(model, taken)[0]
    with fa2patch.apply(model):
        found = model(**given, use_cache=False).logits[0]
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
        assert fa2patch.verify(model, batch=row).ok
    of_tokens = [name for name, value in taken[1].items() if value.shape == taken[1]["input_ids"].shape]
    short = {**taken[1], **{name: taken[1][name][:, :3] for name in of_tokens}}
    with pytest.raises(CollatorError, match="example 1"):
        DataCollatorForMultimodalFlattening(model)([taken[0], short])


def test_sound_of_the_processor_of_qwen2_audio():
    family = "qwen2_audio:sound"
    if not (tiny_models.is_present(family) and tiny_media.is_expanded(family)):
        pytest.skip("this Transformers has no Qwen2-Audio whose processor writes all placeholders")
    words = tokenizer(**{"<|AUDIO|>": media_families.SOUND, "<|audio_bos|>": 93, "<|audio_eos|>": 92})
    hears = transformers.WhisperFeatureExtractor(
        feature_size=8, sampling_rate=160, hop_length=10, chunk_length=1, n_fft=20
    )
    processor = transformers.Qwen2AudioProcessor(feature_extractor=hears, tokenizer=words)
    generator = np.random.default_rng(0)

    def heard(text, samples):
        sound = generator.normal(size=samples).astype(np.float32)
        named = "audio" if "audio" in processor.__call__.__code__.co_varnames else "audios"
        return processor(text=text, **{named: [sound]}, sampling_rate=160, return_tensors="pt")

    prompt = "what is <|audio_bos|> <|AUDIO|> <|audio_eos|> it"
    examples = [heard(prompt, 160), heard(prompt, 120)]
    assert examples[0]["input_features"].shape == (1, 8, 16)
    assert_each_is_computed_as_alone(family, examples)


def test_pictures_of_the_processor_of_llava():
    family = "llava:picture"
    if not tiny_media.is_expanded(family):
        pytest.skip("this version's processor of Llava writes one placeholder for each picture")
    words = tokenizer(**{"<image>": tiny_media.PICTURE})
    images = picture_processor("CLIPImageProcessor", crop_size={"height": 28, "width": 28})
    processor = transformers.LlavaProcessor(
        image_processor=images, tokenizer=words, patch_size=14, vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
    )  # fmt: skip
    seen = looking(processor)
    examples = [seen("what is <image> it"), seen("<image> a cat is it")]
    assert examples[0]["pixel_values"].shape == (1, 3, 28, 28)
    assert_each_is_computed_as_alone(family, examples)


def test_pictures_of_the_processor_of_gemma3_see_themselves_in_both_directions():
    family = "gemma3:picture"
    if not (tiny_models.is_present(family) and tiny_media.holds_several(family)):
        pytest.skip("this Transformers has no Gemma 3 with several pictures in a document")
    named = {"image_token": "<soft>", "boi_token": "<boi>", "eoi_token": "<eoi>"}
    words = tokenizer(named, **{"<soft>": tiny_media.PICTURE, "<boi>": 93, "<eoi>": 92})
    images = picture_processor("Gemma3ImageProcessor")
    seen = looking(transformers.Gemma3Processor(image_processor=images, tokenizer=words, image_seq_length=4))
    examples = [seen("what is <boi> it"), seen("<boi> a <boi> cat is it", pictures=2)]
    assert examples[1]["token_type_ids"].sum() == 8 and examples[1]["pixel_values"].shape == (2, 3, 28, 28)
    assert_each_is_computed_as_alone(family, examples)


def test_prefix_and_suffix_of_the_processor_of_paligemma():
    family = "paligemma:picture"
    if not (tiny_models.is_present(family) and tiny_media.is_expanded(family)):
        pytest.skip("this Transformers has no PaliGemma whose rows can be packed")
    words = tokenizer({"image_token": "<image>"}, **{"<image>": tiny_media.PICTURE})
    images = picture_processor("SiglipImageProcessor")
    images.image_seq_length = 4
    seen = looking(transformers.PaliGemmaProcessor(image_processor=images, tokenizer=words))
    examples = [seen("<image> what is it", suffix="a cat"), seen("<image> is it", suffix="a a cat")]
    assert examples[0]["labels"][0, :-3].unique().tolist() == [-100]
    assert examples[0]["token_type_ids"][0].tolist() == (examples[0]["labels"][0] != -100).long().tolist()
    assert_each_is_computed_as_alone(family, examples)
