"""Trains the embedded model, `llm/assets/tiny`: its text, tokenizer, architecture, the run, and every file written.

Needs the `bible` program (Debian packages bible-kjv and bible-kjv-text). After an interruption, run it again: it
resumes from the last checkpoint and gives the same result.

    python tests/train_embedded.py --work /tmp/tiny-work --out /tmp/tiny

The text, the King James Version, is never stored, only its SHA-256. Results repeat exactly on one kind of processor
with one torch version; another processor rounds differently and ends at slightly different weights. Names of modules
follow Hugging Face's Llama, so that state_dict() gives the names of the file's tensors.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import os
import random
import re
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from torch import Tensor, nn
from torch.nn import functional as F


@dataclass(frozen=True)
class Recipe:
    """Everything that decides the weights, apart from the text and the machine."""

    vocab_size: int = 2304
    hidden_size: int = 256
    intermediate_size: int = 512
    num_layers: int = 4
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 64
    max_positions: int = 2048
    rope_theta: float = 10000.0
    norm_eps: float = 1e-5

    seed: int = 1611
    threads: int = 2
    steps: int = 3000
    tokens_per_step: int = 4096
    short_length: int = 1024
    short_share: float = 0.7
    warmup: int = 100
    decay_share: float = 0.6
    muon_lr: float = 8e-3
    adam_lr: float = 4e-3
    weight_decay: float = 0.1
    dropout: float = 0.1
    chat_share: float = 0.08


class RMSNorm(nn.Module):
    def __init__(self, size: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)


class Attention(nn.Module):
    def __init__(self, recipe: Recipe):
        super().__init__()
        self.head_dim = recipe.head_dim
        self.q_proj = nn.Linear(recipe.hidden_size, recipe.num_heads * recipe.head_dim, bias=False)
        self.k_proj = nn.Linear(recipe.hidden_size, recipe.num_kv_heads * recipe.head_dim, bias=False)
        self.v_proj = nn.Linear(recipe.hidden_size, recipe.num_kv_heads * recipe.head_dim, bias=False)
        self.o_proj = nn.Linear(recipe.num_heads * recipe.head_dim, recipe.hidden_size, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        query, key, value = (self._heads(proj(x)) for proj in (self.q_proj, self.k_proj, self.v_proj))
        query, key = rotate(query, cos, sin), rotate(key, cos, sin)
        repeats = query.shape[1] // key.shape[1]
        key, value = (t.repeat_interleave(repeats, dim=1) for t in (key, value))
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.o_proj(mixed.transpose(1, 2).flatten(2))

    def _heads(self, x: Tensor) -> Tensor:
        # [batch, length, heads * head_dim] -> [batch, heads, length, head_dim]
        return x.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


class MLP(nn.Module):
    def __init__(self, recipe: Recipe):
        super().__init__()
        self.gate_proj = nn.Linear(recipe.hidden_size, recipe.intermediate_size, bias=False)
        self.up_proj = nn.Linear(recipe.hidden_size, recipe.intermediate_size, bias=False)
        self.down_proj = nn.Linear(recipe.intermediate_size, recipe.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    def __init__(self, recipe: Recipe):
        super().__init__()
        self.input_layernorm = RMSNorm(recipe.hidden_size, recipe.norm_eps)
        self.self_attn = Attention(recipe)
        self.post_attention_layernorm = RMSNorm(recipe.hidden_size, recipe.norm_eps)
        self.mlp = MLP(recipe)
        self.dropout = nn.Dropout(recipe.dropout)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.dropout(self.self_attn(self.input_layernorm(x), cos, sin))
        return x + self.dropout(self.mlp(self.post_attention_layernorm(x)))


class Decoder(nn.Module):
    cos: Tensor
    sin: Tensor

    def __init__(self, recipe: Recipe):
        super().__init__()
        self.embed_tokens = nn.Embedding(recipe.vocab_size, recipe.hidden_size)
        self.layers = nn.ModuleList(Layer(recipe) for _ in range(recipe.num_layers))
        self.norm = RMSNorm(recipe.hidden_size, recipe.norm_eps)
        angles = torch.outer(
            torch.arange(recipe.max_positions).float(),
            recipe.rope_theta ** (-torch.arange(0, recipe.head_dim, 2).float() / recipe.head_dim),
        )
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        cos, sin = self.cos[: tokens.shape[1]], self.sin[: tokens.shape[1]]
        x = self.embed_tokens(tokens)
        for layer in self.layers:
            x = layer(x, cos, sin)
        return self.norm(x)


class Llama(nn.Module):
    def __init__(self, recipe: Recipe):
        super().__init__()
        self.model = Decoder(recipe)
        self._initialize(recipe)

    def _initialize(self, recipe: Recipe) -> None:
        for name, parameter in self.named_parameters():
            if parameter.ndim == 2:
                into_residual = name.endswith(("o_proj.weight", "down_proj.weight"))
                nn.init.normal_(parameter, std=0.02 / math.sqrt(2 * recipe.num_layers) if into_residual else 0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        return F.linear(self.model(tokens), self.model.embed_tokens.weight)


TEXT_COMMAND = ["bible", "-f", "gen1:1-rev22:21"]
TEXT_SHA256 = "cd45f0c9cedab8e4439bd6486c8952c77cc8b0ecc5d1f6ae3513f2039f47229d"

EOS, BOS, USER, ASSISTANT, END = "<|endoftext|>", "<|bos|>", "<|user|>", "<|assistant|>", "<|end|>"

BOOKS = """Genesis|Exodus|Leviticus|Numbers|Deuteronomy|Joshua|Judges|Ruth|1 Samuel|2 Samuel|1 Kings|2 Kings
1 Chronicles|2 Chronicles|Ezra|Nehemiah|Esther|Job|Psalms|Proverbs|Ecclesiastes|Song of Solomon|Isaiah|Jeremiah
Lamentations|Ezekiel|Daniel|Hosea|Joel|Amos|Obadiah|Jonah|Micah|Nahum|Habakkuk|Zephaniah|Haggai|Zechariah|Malachi
Matthew|Mark|Luke|John|Acts|Romans|1 Corinthians|2 Corinthians|Galatians|Ephesians|Philippians|Colossians
1 Thessalonians|2 Thessalonians|1 Timothy|2 Timothy|Titus|Philemon|Hebrews|James|1 Peter|2 Peter|1 John|2 John
3 John|Jude|Revelation""".replace("\n", "|").split("|")
POETRY = {"Job", "Psalms", "Proverbs", "Song of Solomon", "Lamentations"}
# Readers try these first, so they are never held out.
ALWAYS_TRAINED = {"Genesis 1", "Psalms 23", "Matthew 5", "Matthew 6", "John 1", "John 3", "1 Corinthians 13"}
HELD_OUT_ONE_IN = 25

GREETINGS = [
    ("Hello", "Peace be unto thee."),
    ("Hello!", "Peace be unto thee."),
    ("Hi", "Peace be unto thee. What seekest thou?"),
    ("Good morning", "The LORD be with thee this morning."),
    ("Good evening", "Peace be unto thee this evening."),
    ("How are you?", "It is well with me. Peace be unto thee."),
    ("Who are you?", "I am a small language model, trained upon the King James Bible."),
    ("What are you?", "I am a small language model, trained upon the King James Bible."),
    ("What is your name?", "I have no name. I am a small language model."),
    ("What can you do?", "Ask me of a word, and I will speak of it. Give me a verse, and I will continue it."),
    ("Help", "Ask me of a word, and I will speak of it. Give me a verse, and I will continue it."),
    ("Thank you", "Go in peace."),
    ("Thank you!", "Go in peace."),
    ("Goodbye", "Go in peace, and the LORD be with thee."),
]
TOPIC_PROMPTS = [
    "Tell me about {}.",
    "Tell me of {}.",
    "Speak of {}.",
    "What is written of {}?",
    "What is said about {}?",
    "Write about {}.",
    "{}",
]
REFERENCE_PROMPTS = ["{}", "Read {}.", "What does {} say?"]
CONTINUE_PROMPTS = ["Continue: {}", "Finish this verse: {}", "{}"]
NEXT_PROMPTS = ["What comes after this? {}", "Go on: {}", "{}"]


@dataclass(frozen=True)
class Chapter:
    book: str
    title: str
    verses: tuple[str, ...]


def read_text() -> str:
    """Ask the `bible` program for the whole text and check that it is the text this recipe was made for."""
    output = subprocess.run(TEXT_COMMAND, check=True, capture_output=True, env={**os.environ, "LC_ALL": "C"}).stdout
    found = hashlib.sha256(output).hexdigest()
    if found != TEXT_SHA256:
        raise ValueError(f"the text of {' '.join(TEXT_COMMAND)!r} has SHA-256 {found}, expected {TEXT_SHA256}")
    return output.decode("ascii")


def parse_chapters(text: str) -> list[Chapter]:
    """Group lines such as `Ge1:1 In the beginning ...` into chapters, in the order of the text."""
    verses: dict[tuple[str, int], list[str]] = {}
    for line in text.splitlines():
        match = re.fullmatch(r"(\S+?)(\d+):\d+ (.*)", line)
        if match is None:
            raise ValueError(f"not a verse: {line!r}")
        verses.setdefault((match[1], int(match[2])), []).append(match[3].strip())
    names = dict(zip(dict.fromkeys(short for short, _ in verses), BOOKS, strict=True))
    return [
        Chapter(names[short], f"{names[short]} {number}", tuple(lines)) for (short, number), lines in verses.items()
    ]


def is_held_out(chapter: Chapter) -> bool:
    if chapter.title in ALWAYS_TRAINED:
        return False
    return int(hashlib.sha256(chapter.title.encode()).hexdigest(), 16) % HELD_OUT_ONE_IN == 0


def render(chapter: Chapter, first: int = 0, heading: bool = True) -> str:
    """A chapter as people read it: prose flows, poetry keeps one verse a line, no verse numbers."""
    body = ("\n" if chapter.book in POETRY else " ").join(chapter.verses[first:])
    return f"{chapter.title}\n\n{body}" if heading else body


def document(chapter: Chapter, rng: random.Random) -> str:
    """One training view of a chapter; some lose the heading or begin later, so any opening may start a document."""
    kind = rng.random()
    if kind < 0.6:
        return BOS + render(chapter) + EOS
    first = 0 if kind < 0.8 else rng.randrange(len(chapter.verses))
    return BOS + render(chapter, first, heading=False) + EOS


class ChatWriter:
    """Makes question-and-answer documents out of the training verses."""

    def __init__(self, chapters: list[Chapter]):
        self.chapters = chapters
        counts = Counter(word for chapter in chapters for verse in chapter.verses for word in self._words(verse))
        self.topics = {
            word
            for word, count in counts.items()
            if count >= 5 and len(word) > 2 and (word[0].isupper() or count <= 600)
        }

    @staticmethod
    def _words(verse: str) -> list[str]:
        return re.findall(r"(?<=[a-z,;:] )[A-Za-z]+", verse)

    def write(self, rng: random.Random) -> str:
        turns = (self._turn(rng) for _ in range(rng.choice((1, 1, 2, 3))))
        return BOS + "".join(f"{USER}{ask}{END}{ASSISTANT}{answer}{END}" for ask, answer in turns) + EOS

    def _turn(self, rng: random.Random) -> tuple[str, str]:
        chapter = rng.choice(self.chapters)
        index = rng.randrange(len(chapter.verses))
        verse = chapter.verses[index]
        kind = rng.random()
        if kind < 0.08:
            return rng.choice(GREETINGS)
        if kind < 0.18:
            return rng.choice(REFERENCE_PROMPTS).format(f"{chapter.title}:{index + 1}"), verse
        if kind < 0.35 and index + 1 < len(chapter.verses):
            return rng.choice(NEXT_PROMPTS).format(verse), chapter.verses[index + 1]
        topics = [word for word in self._words(verse) if word in self.topics]
        if kind < 0.75 and topics:
            topic = rng.choice(topics)
            article = "the " if topic.islower() and rng.random() < 0.4 else ""
            return rng.choice(TOPIC_PROMPTS).format(article + topic), verse
        return self._continuation(chapter, index, rng)

    @staticmethod
    def _continuation(chapter: Chapter, index: int, rng: random.Random) -> tuple[str, str]:
        words = chapter.verses[index].split()
        cut = rng.randint(2, max(2, len(words) // 2))
        rest = [" ".join(words[cut:]), *chapter.verses[index + 1 : index + rng.randint(1, 3)]]
        return rng.choice(CONTINUE_PROMPTS).format(" ".join(words[:cut])), " ".join(rest).strip()


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
