"""Every fence of README and the documentation runs as it stands, with tiny models under the names that it loads."""

from __future__ import annotations

import functools
import importlib.metadata
import json
import os
import re
import shlex
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch
import transformers
from packaging.requirements import Requirement
from snippets import ROOT, Snippet, pages, snippets

import fa2patch
from compat_matrix import tiny_models

SNIPPETS = [snippet for page in pages() for snippet in snippets(page)]
NAMES = sorted(
    {
        name
        for snippet in SNIPPETS
        for name in re.findall(r"from_pretrained\(\s*\"([\w./-]+)\"", snippet.setup + snippet.code)
    }
)
"""The models that the pages load. Each is a tiny one here, with random weights, in a folder of that name."""

KINDS = {"ModernBERT": "modernbert:masked", "LFM2": "lfm2", "Qwen2-VL": "qwen2_vl"}
"""Architectures by a part of the model's name. All other names get a Llama."""

TEXTS = [f"Question: what is {n} and {n}?\nAnswer: {' '.join(['it is', str(2 * n)] * (n % 5 + 1))}." for n in range(64)]


def here(needs: tuple[str, ...]) -> bool:
    """Whether this environment has the packages."""
    for one in map(Requirement, needs):
        try:
            if not one.specifier.contains(importlib.metadata.version(one.name), prereleases=True):
                return False
        except importlib.metadata.PackageNotFoundError:
            return False
    return True


RUN = [snippet for snippet in SNIPPETS if not snippet.not_run and not snippet.file and here(snippet.needs)]


@pytest.fixture(scope="session")
def models(tmp_path_factory) -> Path:
    """A folder with the models that the pages load, and their data."""
    home = tmp_path_factory.mktemp("models")
    tokenizer = tiny_tokenizer()
    for name in NAMES:
        tiny_model(name, len(tokenizer)).save_pretrained(home / name)
        tokenizer.save_pretrained(home / name)
    lines = [{"prompt": text.partition("Answer:")[0], "completion": text.partition("Answer:")[2]} for text in TEXTS]
    (home / "train.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return home


def tiny_tokenizer():
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    made = Tokenizer(models.BPE())
    made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=["<s>", "</s>", "<pad>"], initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    made.train_from_iterator(TEXTS, trainer)
    special = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}
    returned = ["input_ids", "attention_mask"]  # as Qwen's and Llama's; 4.x would add token_type_ids
    return transformers.PreTrainedTokenizerFast(tokenizer_object=made, model_input_names=returned, **special)


def tiny_model(name: str, words: int):
    kind = next((kind for part, kind in KINDS.items() if part in name), None)
    if kind is not None:
        return tiny_models.build(kind, "sdpa", vocab_size=words)
    config = transformers.LlamaConfig(
        vocab_size=words, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=512, bos_token_id=0, eos_token_id=1, pad_token_id=2,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config)


@pytest.mark.parametrize("snippet", RUN, ids=[snippet.name for snippet in RUN])
def test_runs(snippet: Snippet, models: Path, tmp_path, monkeypatch):
    for entry in models.iterdir():
        (tmp_path / entry.name).symlink_to(entry)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager"))  # inductor: minutes
    if snippet.language == "console":
        for name, code in snippet.files:
            (tmp_path / name).write_text(code)
        run_commands(snippet, tmp_path)
    elif snippet.raises:
        with pytest.raises(getattr(fa2patch.errors, snippet.raises)):
            run_python(snippet)
    else:
        run_python(snippet)


def run_python(snippet: Snippet) -> None:
    """Run the code with its page's line numbers, so that a traceback points into the page."""
    names: dict[str, object] = {"__name__": "__main__"}
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        warnings.filterwarnings("default", category=UserWarning, module=r"(?!__main__).*")
        exec(compile(snippet.setup, f"{snippet.page} (setup)", "exec"), names)
        exec(compile("\n" * (snippet.line - 1) + snippet.code, str(ROOT / snippet.page), "exec"), names)


def run_commands(snippet: Snippet, folder: Path) -> None:
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    for command in snippet.commands:
        words = shlex.split(re.sub(r"^fa2patch\b", "python -m fa2patch", command))
        words = [sys.executable if word == "python" else word for word in words]
        done = subprocess.run(
            words, cwd=folder, env={**os.environ, "PATH": path, "COLUMNS": "100"}, capture_output=True, text=True
        )
        assert done.returncode == 0, f"{command}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
