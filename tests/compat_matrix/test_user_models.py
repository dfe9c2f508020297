"""A user's config.json becomes a tiny model of the same structure, in the spelling of the installed Transformers."""

import copy
import json
from pathlib import Path

import pytest
import torch
import transformers

from compat_matrix import tiny_models
from compat_matrix.user_models import layers, models, rope, sizes

if not hasattr(transformers, "Gemma3Config"):
    pytest.skip("this Transformers is older than the configs' models", allow_module_level=True)

CONFIGS = Path(__file__).parents[1] / "own_configs"
NAMES = sorted(file.stem for file in CONFIGS.glob("*.json"))


def file_of(name):
    return CONFIGS / f"{name}.json"


def config_of(name, **changes):
    # The tiny config may be of several parts; the language model's one is returned.
    file = file_of(name)
    cls = tiny_models.config_class(models.kind(str(file)))
    config = models.config_of(file, cls, **changes)
    return getattr(config, "text_config", config)


def rope_of(config, kind="full_attention"):
    parameters = getattr(config, "rope_parameters", None) or config.rope_scaling
    return parameters.get(kind, parameters)


@pytest.mark.parametrize("name", NAMES)
def test_a_real_config_becomes_a_tiny_model_that_runs(name):
    kind = models.kind(str(file_of(name)))
    cls = tiny_models.model_class(kind)
    model = cls(models.config_of(file_of(name), cls.config_class)).eval()
    tiny_models.scale_up(model)
    assert sum(parameter.numel() for parameter in model.parameters()) < 100_000
    with torch.no_grad():
        assert model(input_ids=torch.arange(3, 12)[None]).logits.isfinite().all()


def test_llama_keeps_its_rope_scaling_and_its_grouped_heads():
    config = config_of("llama_3_1")
    rope = rope_of(config)
    assert (rope["rope_type"], rope["factor"], rope["low_freq_factor"]) == ("llama3", 8.0, 1.0)
    assert rope["original_max_position_embeddings"] == sizes.LIMIT < config.max_position_embeddings
    assert (config.num_attention_heads, config.num_key_value_heads, config.num_hidden_layers) == (4, 2, 2)


def test_gemma_keeps_five_windows_to_one_full_layer_and_both_rotary_bases():
    config = config_of("gemma_3")
    assert config.layer_types == ["sliding_attention"] * 5 + ["full_attention"]
    assert (config.sliding_window, config.query_pre_attn_scalar) == (1024, 168)
    if hasattr(config, "rope_parameters"):
        assert rope_of(config)["rope_type"] == "linear"
        assert rope_of(config, "sliding_attention")["rope_theta"] == 10_000


def test_mixtures_keep_how_their_experts_are_chosen():
    qwen = config_of("qwen3_moe")
    assert (qwen.num_experts, qwen.num_experts_per_tok, qwen.norm_topk_prob) == (4, 2, True)
    deepseek = config_of("deepseek_v3")
    assert (deepseek.first_k_dense_replace, deepseek.num_hidden_layers) == (3, 4)
    assert (deepseek.n_group, deepseek.topk_group, deepseek.n_shared_experts) == (2, 1, 1)
    assert deepseek.num_key_value_heads == deepseek.num_attention_heads


def test_another_number_of_layers_repeats_the_kinds():
    config = config_of("gemma_3", num_hidden_layers=12)
    assert config.layer_types == (["sliding_attention"] * 5 + ["full_attention"]) * 2


def test_what_is_left_out_is_said():
    file = file_of("deepseek_v3")
    cls = tiny_models.config_class("deepseek_v3")
    (note,) = models.notes(file, cls)
    assert "quantization_config" in note and "auto_map" in note
    assert "torch_dtype" not in note and "rope_scaling" not in note
    assert not models.notes(file_of("llama_3_1"), tiny_models.config_class("llama"))


class Older:
    """A config class with arguments as in Transformers 4."""

    def __init__(self, rope_theta=1e4, rope_scaling=None, sliding_window_pattern=6, num_hidden_layers=4, **kwargs):
        pass


def test_a_newer_spelling_is_translated_for_an_older_version():
    newer = {"rope_parameters": {"rope_type": "yarn", "rope_theta": 5e5, "factor": 4.0}, "dtype": "bfloat16"}
    assert rope.respelt(Older, newer) == {
        "rope_theta": 5e5,
        "rope_scaling": {"rope_type": "yarn", "factor": 4.0},
        "dtype": "bfloat16",
    }
    plain = rope.respelt(Older, {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}})
    assert plain == {"rope_theta": 5e5, "rope_scaling": None}
    by_kind = {"full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6}}
    by_kind["sliding_attention"] = {"rope_type": "default", "rope_theta": 1e4}
    assert rope.respelt(Older, {"rope_parameters": by_kind})["rope_local_base_freq"] == 1e4
    kinds = {"layer_types": ["sliding_attention"] * 3 + ["full_attention"]}
    assert layers.respelt(Older, kinds) == {"sliding_window_pattern": 4}


def test_an_older_spelling_is_translated_for_a_newer_version():
    cls = tiny_models.config_class("llama")
    if "rope_parameters" not in sizes.defaults(cls):
        pytest.skip("this Transformers is itself one of the older spelling")
    settings = rope.respelt(cls, models.read(file_of("llama_3_1")))
    assert not {"rope_scaling", "rope_theta"} & {*settings}
    assert (settings["rope_parameters"]["rope_type"], settings["rope_parameters"]["rope_theta"]) == ("llama3", 5e5)


def layers_of(sliding_window_pattern=1, **config):
    return layers.cut(Older, {"sliding_window_pattern": sliding_window_pattern, **config})


def test_layers_are_the_shortest_beginning_with_every_kind():
    assert layers_of(num_hidden_layers=32)["num_hidden_layers"] == 2
    assert layers_of(num_hidden_layers=32, sliding_window_pattern=4)["num_hidden_layers"] == 4
    cut = layers_of(num_hidden_layers=6, layers_block_type=["mamba", "mamba", "attention"] * 2)
    assert cut == {"num_hidden_layers": 3, "layers_block_type": ["mamba", "mamba", "attention"]}
    late = layers_of(num_hidden_layers=24, layer_types=["full"] * 20 + ["sliding"] * 4)
    assert late == {"num_hidden_layers": 2, "layer_types": ["full", "sliding"]}
    assert layers_of(num_hidden_layers=8, mlp_only_layers=[3])["mlp_only_layers"] == [3]


@pytest.mark.parametrize(
    "config, chunk",
    [
        ({"chunk_size": 128, "ssm_state_size": 128}, 8),
        ({"chunk_size": 4, "mamba_d_state": 64}, 4),
        ({"block_size": 256, "linear_attn_alpha_factor": 1}, 8),
        ({"chunk_size": 128, "hidden_size": 64}, None),
        ({"block_size": 64}, None),
    ],
)
def test_documents_have_several_chunks_of_a_mixer(config, chunk):
    cut = sizes.cut(Older, config)
    assert [cut.get(name) for name in config if name in sizes.CHUNKS] == [chunk]


def test_counts_that_are_structure_stay_and_names_without_meaning_for_sizes_too():
    kept = {"num_experts_per_tok": 1, "n_shared_experts": None, "tie_word_embeddings": True, "sliding_window": 512}
    cut = sizes.cut(Older, {"num_attention_heads": 8, "num_key_value_heads": 1, "attention_dropout": 0.1, **kept})
    assert cut == {
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
        "attention_dropout": 0.0,
        "num_experts_per_tok": 1,
    }


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (None, "found nothing"),
        ("[1]", "found a list"),
        ("{", "found no JSON"),
        ('{"r": 8, "peft_type": "LORA"}', 'looked for "model_type"'),
    ],
)
def test_what_is_no_config_is_said(tmp_path, text, expected):
    file = tmp_path / "config.json"
    if text is not None:
        file.write_text(text)
    with pytest.raises(models.BadConfig, match=expected) as caught:
        models.read(tmp_path)
    assert str(file) in str(caught.value)


def test_reading_leaves_the_config_as_it_is(tmp_path):
    config = models.read(file_of("gemma_3"))
    before = copy.deepcopy(config)
    models.shrunk(tiny_models.config_class("gemma3"), config)
    assert config == before
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert models.kind(str(tmp_path / "config.json")) == "gemma3" and models.kind("llama") == "llama"
