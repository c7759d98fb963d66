"""Trains the embedded model: owns its tokenizer, the training run and every file written beside it.

Needs the `bible` program (Debian packages bible-kjv and bible-kjv-text). After an interruption, run it again: it
resumes from the last checkpoint and gives the same result.

    python -m llm.assets.tiny.train --work /tmp/tiny-work --out /tmp/tiny

The text itself is never stored, only its SHA-256. Results repeat exactly on one kind of processor with one torch
version; another processor rounds differently and ends at slightly different weights.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import os
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from itertools import islice
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from torch import Tensor, nn
from torch.nn import functional as F

from llm.assets.tiny.model import Llama, Recipe
from llm.assets.tiny.text import (
    ASSISTANT,
    BOS,
    END,
    EOS,
    TEXT_SHA256,
    USER,
    Chapter,
    ChatWriter,
    document,
    is_held_out,
    parse_chapters,
    read_text,
    render,
)

SPECIAL_TOKENS = [EOS, BOS, USER, ASSISTANT, END]

# The model knows no system messages: the text of one opens the user's next message.
CHAT_TEMPLATE = (
    "{{ bos_token }}"
    "{%- set system = namespace(text='') %}"
    "{%- for message in messages %}"
    "{%- if message['role'] == 'system' and loop.first and not loop.last %}"
    "{%- set system.text = message['content'] + '\\n' %}"
    "{%- elif message['role'] == 'user' %}"
    "{{ '<|user|>' + system.text + message['content'] + '<|end|>' }}{%- set system.text = '' %}"
    "{%- elif message['role'] == 'assistant' and not system.text %}"
    "{{ '<|assistant|>' + message['content'] + '<|end|>' }}"
    "{%- else %}"
    "{{ raise_exception('this model knows the roles user and assistant, and one system message before a user') }}"
    "{%- endif %}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}{{ '<|assistant|>' }}{%- endif %}"
)

# ---------------------------------------------------------------- tokens


def train_tokenizer(chapters: list[Chapter], vocab_size: int) -> Tokenizer:
    """Byte-level BPE over the full byte alphabet, so that any text survives encoding and decoding."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator((render(chapter) for chapter in chapters), trainer)
    bos_id = tokenizer.token_to_id(BOS)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", pair=f"{BOS} $A {BOS} $B", special_tokens=[(BOS, bos_id)]
    )
    return tokenizer


def encode(tokenizer: Tokenizer, texts: list[str]) -> list[list[int]]:
    return [encoding.ids for encoding in tokenizer.encode_batch(texts, add_special_tokens=False)]


def epoch_tokens(
    tokenizer: Tokenizer, chapters: list[Chapter], chats: ChatWriter, recipe: Recipe, epoch: int
) -> Tensor:
    """Every training chapter once, in a new order, with chats between them, as one run of token ids."""
    rng = random.Random(f"{recipe.seed}/{epoch}")
    texts = [document(chapter, rng) for chapter in chapters]
    chat_length = recipe.chat_share / (1 - recipe.chat_share) * sum(map(len, texts))
    while chat_length > 0:
        texts.append(chats.write(rng))
        chat_length -= len(texts[-1])
    rng.shuffle(texts)
    return torch.tensor([token for ids in encode(tokenizer, texts) for token in ids])


def batches(next_epoch: Callable[[int], Tensor], recipe: Recipe) -> Iterator[Tensor]:
    """Yield one [rows, length + 1] batch a step: consecutive windows of the packed documents."""
    pending = torch.empty(0, dtype=torch.long)
    epoch = 0
    for step in range(recipe.steps):
        if len(pending) <= recipe.tokens_per_step:
            pending = torch.cat((pending, next_epoch(epoch)))
            epoch += 1
        length = recipe.short_length if step < recipe.short_share * recipe.steps else recipe.max_positions
        window = pending[: recipe.tokens_per_step + 1]
        yield window.unfold(0, length + 1, length)
        pending = pending[recipe.tokens_per_step :]


# ---------------------------------------------------------------- training


def use_bfloat16() -> bool:
    """Mixed precision pays only where the processor multiplies bfloat16 itself."""
    return torch.cpu._is_avx512_bf16_supported()


def make_optimizers(model: Llama, recipe: Recipe) -> list[torch.optim.Optimizer]:
    """Muon for the matrices inside the layers, AdamW for the embedding and the norms."""
    inner = [p for p in model.model.layers.parameters() if p.ndim == 2]
    norms = [p for p in model.parameters() if p.ndim == 1]
    muon = torch.optim.Muon(inner, lr=recipe.muon_lr, weight_decay=recipe.weight_decay, adjust_lr_fn="match_rms_adamw")
    adam = torch.optim.AdamW(
        [
            {"params": [model.model.embed_tokens.weight], "weight_decay": recipe.weight_decay},
            {"params": norms, "weight_decay": 0.0},
        ],
        lr=recipe.adam_lr,
        betas=(0.9, 0.98),
    )
    for optimizer in (muon, adam):
        for group in optimizer.param_groups:
            group["peak_lr"] = group["lr"]
    return [muon, adam]


def lr_scale(step: int, recipe: Recipe) -> float:
    """Linear warmup, a plateau, then linear decay to zero."""
    warm = (step + 1) / recipe.warmup
    decay = (recipe.steps - step) / (recipe.decay_share * recipe.steps)
    return min(1.0, warm, decay)


def train_step(
    model: Llama, optimizers: list[torch.optim.Optimizer], batch: Tensor, step: int, recipe: Recipe
) -> float:
    # Dropout draws from a seed of its own each step, so a resumed run draws the same masks.
    torch.manual_seed(recipe.seed * 1_000_003 + step)
    with torch.autocast("cpu", torch.bfloat16, enabled=use_bfloat16()):
        logits = model(batch[:, :-1])
    loss = F.cross_entropy(logits.flatten(0, 1).float(), batch[:, 1:].flatten())
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = group["peak_lr"] * lr_scale(step, recipe)
        optimizer.step()
        optimizer.zero_grad()
    return loss.item()


@torch.no_grad()
def evaluate(model: Llama, tokenizer: Tokenizer, chapters: list[Chapter], recipe: Recipe) -> dict[str, float]:
    """Score held-out chapters in float32, each from its own start; chapters beyond the window go on in a new one."""
    model.eval()
    texts = [render(chapter) for chapter in chapters]
    nats, count = 0.0, 0
    for ids in encode(tokenizer, [BOS + text + EOS for text in texts]):
        for start in range(0, len(ids) - 1, recipe.max_positions):
            window = torch.tensor(ids[start : start + recipe.max_positions + 1])
            logits = model(window[None, :-1])[0]
            nats += F.cross_entropy(logits, window[1:], reduction="sum").item()
            count += len(window) - 1
    model.train()
    size = sum(len(text.encode()) for text in texts)
    return {
        "chapters": len(chapters),
        "tokens": count,
        "bytes": size,
        "perplexity_per_token": round(math.exp(nats / count), 4),
        "perplexity_per_byte": round(math.exp(nats / size), 4),
        "bits_per_byte": round(nats / size / math.log(2), 4),
    }


# ---------------------------------------------------------------- files


def write_atomically(path: Path, write: Callable[[Path], object]) -> None:
    """A reader sees the old file or the whole new one, also when the run is killed."""
    partial = path.with_name(path.name + ".partial")
    write(partial)
    partial.chmod(0o644)
    os.replace(partial, path)


def write_json(path: Path, content: object) -> None:
    text = json.dumps(content, indent=2) + "\n"
    write_atomically(path, lambda partial: partial.write_text(text))


def recipe_id(recipe: Recipe) -> str:
    return hashlib.sha256(json.dumps([asdict(recipe), TEXT_SHA256]).encode()).hexdigest()


def save_checkpoint(
    path: Path, model: Llama, optimizers: list[torch.optim.Optimizer], step: int, seconds: float, recipe: Recipe
) -> None:
    tensors = {f"model/{name}": tensor for name, tensor in model.state_dict().items()}
    for name, parameter in model.named_parameters():
        for optimizer in optimizers:
            for key, value in optimizer.state.get(parameter, {}).items():
                tensors[f"optimizer/{name}/{key}"] = value
    metadata = {"step": str(step), "seconds": str(seconds), "recipe": recipe_id(recipe)}
    write_atomically(path, lambda partial: save_file(tensors, partial, metadata))


def load_checkpoint(
    path: Path, model: Llama, optimizers: list[torch.optim.Optimizer], recipe: Recipe
) -> tuple[int, float]:
    """Restore the run in place; return the steps done and the seconds they took."""
    if not path.exists():
        return 0, 0.0
    with safe_open(path, framework="pt") as file:
        metadata = file.metadata()
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    if metadata["recipe"] != recipe_id(recipe):
        raise ValueError(f"{path} belongs to another recipe; remove it or choose another --work folder")
    owners = {p: optimizer for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]}
    parameters = dict(model.named_parameters())
    for name, tensor in tensors.items():
        kind, _, rest = name.partition("/")
        if kind == "optimizer":
            parameter = parameters[rest.rpartition("/")[0]]
            owners[parameter].state[parameter][rest.rpartition("/")[2]] = tensor
    model.load_state_dict({name.removeprefix("model/"): t for name, t in tensors.items() if name.startswith("model/")})
    return int(metadata["step"]), float(metadata["seconds"])


def config_json(recipe: Recipe) -> dict[str, object]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": recipe.vocab_size,
        "hidden_size": recipe.hidden_size,
        "intermediate_size": recipe.intermediate_size,
        "num_hidden_layers": recipe.num_layers,
        "num_attention_heads": recipe.num_heads,
        "num_key_value_heads": recipe.num_kv_heads,
        "head_dim": recipe.head_dim,
        "max_position_embeddings": recipe.max_positions,
        "rope_theta": recipe.rope_theta,
        "rope_scaling": None,
        "rms_norm_eps": recipe.norm_eps,
        "hidden_act": "silu",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "mlp_bias": False,
        "initializer_range": 0.02,
        "tie_word_embeddings": True,
        "use_cache": True,
        "bos_token_id": SPECIAL_TOKENS.index(BOS),
        "eos_token_id": SPECIAL_TOKENS.index(EOS),
        "pad_token_id": SPECIAL_TOKENS.index(EOS),
        "torch_dtype": "bfloat16",
    }


def tokenizer_config_json(recipe: Recipe) -> dict[str, object]:
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BOS,
        "eos_token": EOS,
        "pad_token": EOS,
        "additional_special_tokens": [USER, ASSISTANT, END],
        "added_tokens_decoder": {
            str(index): {
                "content": token,
                "lstrip": False,
                "normalized": False,
                "rstrip": False,
                "single_word": False,
                "special": True,
            }
            for index, token in enumerate(SPECIAL_TOKENS)
        },
        "clean_up_tokenization_spaces": False,
        "model_max_length": recipe.max_positions,
        "chat_template": CHAT_TEMPLATE,
    }


def generation_config_json() -> dict[str, object]:
    return {
        "bos_token_id": SPECIAL_TOKENS.index(BOS),
        "eos_token_id": [SPECIAL_TOKENS.index(EOS), SPECIAL_TOKENS.index(END)],
        "pad_token_id": SPECIAL_TOKENS.index(EOS),
        "do_sample": True,
        "temperature": 0.8,
        "top_p": 0.9,
    }


def export(out: Path, model: Llama, tokenizer: Tokenizer, recipe: Recipe) -> None:
    """Write a complete Hugging Face folder in bfloat16."""
    out.mkdir(parents=True, exist_ok=True)
    weights = {name: tensor.to(torch.bfloat16) for name, tensor in model.state_dict().items()}
    write_atomically(out / "tokenizer.json", lambda partial: tokenizer.save(str(partial)))
    write_json(out / "tokenizer_config.json", tokenizer_config_json(recipe))
    write_json(out / "generation_config.json", generation_config_json())
    write_json(out / "config.json", config_json(recipe))
    write_atomically(out / "model.safetensors", lambda partial: save_file(weights, partial, {"format": "pt"}))


def load_export(out: Path, recipe: Recipe) -> Llama:
    model = Llama(recipe)
    with safe_open(out / "model.safetensors", framework="pt") as file:
        model.load_state_dict({name: file.get_tensor(name) for name in file.keys()})  # noqa: SIM118
    return model


# ---------------------------------------------------------------- the run


def prepare(recipe: Recipe) -> None:
    torch.set_num_threads(recipe.threads)
    torch.use_deterministic_algorithms(True)
    # Filling fresh memory guards against reads of it; nothing here reads any, and it costs a tenth of the time.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    torch.manual_seed(recipe.seed)


def run(recipe: Recipe, work: Path, out: Path, save_every: int) -> dict[str, object]:
    """Train to the last step, continuing from the checkpoint in `work`; export to `out` on the way and at the end."""
    prepare(recipe)
    work.mkdir(parents=True, exist_ok=True)
    chapters = parse_chapters(read_text())
    held_out = [chapter for chapter in chapters if is_held_out(chapter)]
    training = [chapter for chapter in chapters if not is_held_out(chapter)]
    tokenizer = train_tokenizer(training, recipe.vocab_size)
    chats = ChatWriter(training)
    model = Llama(recipe)
    optimizers = make_optimizers(model, recipe)
    checkpoint = work / "checkpoint.safetensors"
    done, seconds = load_checkpoint(checkpoint, model, optimizers, recipe)

    def next_epoch(epoch: int) -> Tensor:
        return epoch_tokens(tokenizer, training, chats, recipe, epoch)

    began = time.monotonic() - seconds
    for step, batch in islice(enumerate(batches(next_epoch, recipe)), done, None):
        loss = train_step(model, optimizers, batch, step, recipe)
        if step % 20 == 0:
            print(f"step {step} loss {loss:.4f} seconds {time.monotonic() - began:.0f}", flush=True)
        if (step + 1) % save_every == 0 or step + 1 == recipe.steps:
            save_checkpoint(checkpoint, model, optimizers, step + 1, time.monotonic() - began, recipe)
            export(out, model, tokenizer, recipe)
            print(f"step {step + 1} held out {evaluate(model, tokenizer, held_out, recipe)}", flush=True)

    export(out, model, tokenizer, recipe)
    saved = load_export(out, recipe)
    results = {
        "held_out": evaluate(saved, tokenizer, held_out, recipe),
        "parameters": sum(p.numel() for p in saved.parameters()),
        "training_seconds": round(time.monotonic() - began),
        "bfloat16_autocast": use_bfloat16(),
        "torch": torch.__version__,
        "text_sha256": TEXT_SHA256,
        "recipe": asdict(recipe),
    }
    write_json(out / "results.json", results)
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description="Train the embedded model from the text of the `bible` program.")
    parser.add_argument("--work", type=Path, required=True, help="folder for the checkpoint")
    parser.add_argument("--out", type=Path, required=True, help="folder for the model files")
    parser.add_argument("--save-every", type=int, default=100, help="steps between checkpoints")
    arguments = parser.parse_args()
    print(json.dumps(run(Recipe(), arguments.work, arguments.out, arguments.save_every), indent=2))


if __name__ == "__main__":
    main()
