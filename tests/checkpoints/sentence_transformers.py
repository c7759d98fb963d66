"""Tiny random models whose hidden states are pooled, and the files that sentence-transformers writes beside them.

And transformers' side of every comparison. The files are written by hand, as versions 2 to 6 of that
package document them; `python tests/models/sentence_oracle.py` holds the package itself against ours. No tests.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tiny_models import VOCAB, randomise
from tokenizers import Tokenizer, models, pre_tokenizers, processors

# Lengths that cross the kernel's steps of 64 keys and a step's tokens.
LENGTHS = (5, 1, 70, 17, 33)
BERT: Mapping[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "intermediate_size": 91,
    "max_position_embeddings": 80,
    "layer_norm_eps": 1e-3,
    "pad_token_id": 0,
}
WINDOWED = {**BERT, "num_hidden_layers": 4, "local_attention": 22, "classifier_pooling": "mean", "norm_eps": 1e-3}
DISTIL = {"dim": 48, "n_heads": 6, "n_layers": 2, "hidden_dim": 91, "max_position_embeddings": 80, "vocab_size": VOCAB}
# Family -> (prefix of transformers' classes, config).
ENCODERS: dict[str, tuple[str, Mapping[str, Any]]] = {
    "bert": ("Bert", BERT),
    "roberta": ("Roberta", {**BERT, "pad_token_id": 1, "max_position_embeddings": 82}),
    "xlm-roberta": ("XLMRoberta", {**BERT, "pad_token_id": 4, "max_position_embeddings": 85, "type_vocab_size": 1}),
    "distilbert": ("DistilBert", DISTIL),
    "modernbert": ("ModernBert", {name: value for name, value in WINDOWED.items() if name != "layer_norm_eps"}),
    "nomic_bert": ("NomicBert", BERT),
}

WORDS = [f"w{index}" for index in range(VOCAB - 5)]


def prompts(lengths: Sequence[int] = LENGTHS) -> list[list[int]]:
    generator = torch.Generator().manual_seed(5)
    return [torch.randint(5, VOCAB, (length,), generator=generator).tolist() for length in lengths]


def save_model(folder: Path, name: str, seed: int = 3, **config: Any) -> torch.nn.Module:
    """A model of transformers by its class's name, saved with random weights; `config`: of its config class."""
    import transformers

    cls: Any = getattr(transformers, name)
    model = cls(cls.config_class(**config)).eval()
    with torch.no_grad():
        randomise(model, seed)
    model.save_pretrained(folder)
    return model


def save_tokenizer(folder: Path, *, ends: bool = False) -> None:
    """Words w0, w1, ...; [CLS] text [SEP] and pairs as BERT has them, or `ends`: [SEP] alone after a text."""
    vocab = {word: index for index, word in enumerate(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS])}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    special = [("[CLS]", 2), ("[SEP]", 3)]
    single, pair = ("$A [SEP]", "$A $B [SEP]") if ends else ("[CLS] $A [SEP]", "[CLS] $A [SEP] $B:1 [SEP]:1")
    tokenizer.post_processor = processors.TemplateProcessing(single=single, pair=pair, special_tokens=special)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"pad_token": "[PAD]", "cls_token": "[CLS]"}))


def save_modules(
    folder: Path,
    pooling: str,
    *,
    normalizes: bool = True,
    dense: tuple[int, int] | None = None,
    new: bool = True,
    include_prompt: bool = True,
    prompts: Mapping[str, str] | None = None,
) -> dict[str, torch.Tensor]:
    """modules.json and what it names, in the layout of version 6 or, not `new`, of version 2; the dense weights."""
    kinds = ["Transformer", "Pooling", *(["Dense"] if dense else []), *(["Normalize"] if normalizes else [])]
    packages = "sentence_transformers.base.modules.any." if new else "sentence_transformers.models."
    entries = [
        {"idx": index, "name": str(index), "path": "" if index == 0 else f"{index}_{kind}", "type": packages + kind}
        for index, kind in enumerate(kinds)
    ]
    (folder / "modules.json").write_text(json.dumps(entries))
    names = {"mean": "mean_tokens", "cls": "cls_token", "lasttoken": "lasttoken"}
    old = {f"pooling_mode_{name}": key == pooling for key, name in names.items()}
    config = {"pooling_mode": pooling} if new else {**old, "pooling_mode_max_tokens": False}
    _write(folder / "1_Pooling/config.json", {**config, "include_prompt": include_prompt})
    _write(
        folder / "config_sentence_transformers.json",
        {"prompts": dict(prompts or {}), "default_prompt_name": None, "similarity_fn_name": "cosine"},
    )
    if dense is None:
        return {}
    inputs, outputs = dense
    activation = "torch.nn.modules.activation.Tanh"
    sizes = {"in_features": inputs, "out_features": outputs, "bias": True, "activation_function": activation}
    _write(folder / "2_Dense/config.json", sizes)
    generator = torch.Generator().manual_seed(9)
    tensors = {
        "linear.weight": torch.randn(outputs, inputs, generator=generator) / 4,
        "linear.bias": torch.randn(outputs, generator=generator),
    }
    save_file(tensors, folder / "2_Dense/model.safetensors")
    return tensors


def _write(path: Path, content: Mapping[str, object]) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(content))


def hidden_states(model: Any, token_ids: list[int], **more: Any) -> torch.Tensor:
    """transformers' hidden states after the last layer and norm, [tokens, H]."""
    with torch.no_grad():
        return getattr(model, model.base_model_prefix, model)(torch.tensor([token_ids]), **more).last_hidden_state[0]
