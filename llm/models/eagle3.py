"""EAGLE-3: a head with one layer of Llama's, in a folder of its own, that drafts tokens for another model.

It reads the target's hidden states at three places between its layers. Its LM head may have a smaller vocabulary. The
layout is that of vLLM and SGLang; `llm.runner.speculation.head` runs it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import nn

from llm.base.watch import Patchable
from llm.forward import ForwardBatch, StateSpec
from llm.layers.embedding import LogitsLayer, ParallelLMHead, VocabParallelEmbedding
from llm.layers.linear import ReplicatedLinear
from llm.layers.parallel import SINGLE, TensorParallel
from llm.models import decoder as d
from llm.quantization.unquantized import new_parameter

NUM_TAPS = 3


@dataclass(frozen=True)
class Eagle3Norms(d.Norms):
    """Of the embedding, of the hidden state, and before the feed-forward.

    Attributes:
        before_residual: the normed hidden state is what the attention's output is added to.
    """

    norm: d.NormConfig
    before_residual: bool


@dataclass(frozen=True)
class Eagle3Config:
    """Attributes:
    vocab_size: of the target; draft_vocab_size: of the head.
    target_size: the target's hidden size.
    taps: the layers of the target whose input is read; None: the third, one in the middle and the third from the end.
    has_embedding: it has one of its own; False: the target's.
    """

    vocab_size: int
    draft_vocab_size: int
    hidden_size: int
    target_size: int
    max_position_embeddings: int
    layer: d.LayerConfig
    norms: Eagle3Norms
    taps: tuple[int, ...] | None
    has_embedding: bool = True

    def tapped(self, layers: int) -> tuple[int, ...]:
        """The layers of a target with so many, from the first to the last."""
        return tuple(sorted({2, layers // 2, layers - 3} if self.taps is None else self.taps))


class Eagle3Layer(d.DecoderLayer):
    """Attention reads the embedding of a token beside the hidden state before it."""

    def __init__(self, config: Eagle3Config, context: d.BuildContext, prefix: str) -> None:
        super().__init__(config.layer, context, prefix)
        norm, size = config.norms.norm, context.hidden_size
        self.input_layernorm = norm.build(size, context)
        self.hidden_norm = norm.build(size, context)
        self.post_attention_layernorm = norm.build(size, context)
        self.before_residual = config.norms.before_residual

    def drafted(
        self, embedded: torch.Tensor, hidden: torch.Tensor, batch: ForwardBatch
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Float [N, H] twice -> the feed-forward's output, and the stream that it is added to."""
        normed = self.hidden_norm(hidden)
        both = torch.cat((self.input_layernorm(embedded), normed), dim=-1)
        hidden, residual = self.post_attention_layernorm(
            self.self_attn(both, batch), normed if self.before_residual else hidden
        )
        return self.mlp(hidden, batch), residual


class Eagle3ForCausalLM(Patchable):
    """Has the class attributes of `llm.models.interface.CausalLM`, and is a `llm.runner.speculation.head.DraftHead`."""

    packed_modules_mapping: ClassVar[dict[str, list[str]]] = {
        "qkv_proj": ["q_proj", "k_proj", "v_proj"],
        "gate_up_proj": ["gate_proj", "up_proj"],
    }
    renames = (
        ("model.layers.0", "midlayer"),
        ("layers.0", "midlayer"),
        *((f"model.{name}", name) for name in ("midlayer", "embed_tokens", "fc", "norm")),
    )

    @classmethod
    def read_config(cls, reader: d.ConfigReader) -> Eagle3Config:
        size, rope = reader.positive("hidden_size"), reader.rope()
        bias = reader.boolean("attention_bias", False)
        attention = d.AttentionConfig(
            d.read_heads(reader), rope, qkv_bias=bias, out_bias=bias, input_size=2 * size
        )  # the embedding and the hidden state
        mlp = d.read_gated_mlp(reader, bias=reader.boolean("mlp_bias", False))
        norms = Eagle3Norms(d.read_rms_norm(reader), reader.boolean("norm_before_residual", False))
        reader.expect("num_hidden_layers", 1)
        reader.expect("tie_word_embeddings", False)
        vocabulary = reader.positive("vocab_size")
        config = Eagle3Config(
            vocabulary,
            reader.positive("draft_vocab_size", vocabulary),
            size,
            reader.positive("target_hidden_size", size),
            d.longest_sequence(reader, rope),
            d.LayerConfig(attention=attention, mlp=mlp, norms=norms),
            norms,
            _read_taps(reader),
        )
        reader.finish()
        if config.draft_vocab_size > vocabulary:
            raise reader.error("draft_vocab_size", config.draft_vocab_size, f"at most vocab_size, {vocabulary}")
        return config

    @classmethod
    def kv_cache_specs(
        cls, config: Eagle3Config, dtype: torch.dtype, tp: TensorParallel = SINGLE
    ) -> Sequence[StateSpec]:
        return config.layer.states(dtype, tp)

    def __init__(self, config: Eagle3Config, options: d.BuildOptions) -> None:
        super().__init__()
        context = d.BuildContext(options, config.hidden_size)
        size, drafted = config.hidden_size, config.draft_vocab_size
        self.config = config
        self.embed_tokens: VocabParallelEmbedding | None = None
        if config.has_embedding:
            self.embed_tokens = VocabParallelEmbedding(config.vocab_size, size, prefix="embed_tokens", **context.table)
        self.fc = ReplicatedLinear(NUM_TAPS * config.target_size, size, bias=False, prefix="fc", **context.linear)
        self.midlayer = Eagle3Layer(config, context, "midlayer")
        self.norm = config.norms.norm.build(size, context)
        self.lm_head = ParallelLMHead(drafted, size, prefix="lm_head", **context.table)
        self.logits_processor = LogitsLayer(drafted)
        self.ignored_weights: tuple[str, ...] = ("rotary_emb.inv_freq", "t2d", "d2t")
        # What is added to a token of the head's vocabulary to make one of the target's; None: they are the same.
        self.d2t: nn.Parameter | None = None
        if drafted < config.vocab_size:
            self.d2t = new_parameter(torch.zeros(drafted, dtype=torch.int64), self._load_tokens, any_dtype=True)

    def combine(self, hidden: torch.Tensor) -> torch.Tensor:
        """The target's hidden states at its taps, float [N, taps * its H] -> [N, H]."""
        return self.fc(hidden)

    def embed(self, input_ids: torch.Tensor) -> torch.Tensor:
        """int64 [N] -> float32 [N, H]."""
        if self.embed_tokens is None:
            raise RuntimeError("this head has no embedding of its own")
        return self.embed_tokens(input_ids)

    def forward(
        self, embedded: torch.Tensor, hidden: torch.Tensor, batch: ForwardBatch
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Float [N, H] twice -> (what `compute_logits` takes, the hidden states for the next token), [N, H] each."""
        return d.add_norm(self.norm, *self.midlayer.drafted(embedded, hidden, batch))

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """float [L, H] -> float32 [L, vocab]; tokens that the head does not have are at -inf."""
        logits = self.logits_processor(self.lm_head, hidden)
        if self.d2t is None:
            return logits
        tokens = (torch.arange(len(self.d2t), device=logits.device) + self.d2t).clamp(0, self.config.vocab_size - 1)
        whole = logits.new_full((len(logits), self.config.vocab_size), -torch.inf)
        whole[:, tokens] = logits
        return whole

    def _load_tokens(self, param: nn.Parameter, loaded: torch.Tensor, shard_id: object = None) -> int:
        if loaded.shape != param.shape:
            raise ValueError(f"has shape {list(loaded.shape)}, the model needs {list(param.shape)}")
        tokens = torch.arange(len(loaded)) + loaded
        if tokens.min() < 0 or tokens.max() >= self.config.vocab_size:
            raise ValueError(f"has tokens outside of the {self.config.vocab_size} of the vocabulary")
        param.data.copy_(loaded)
        return param.numel()


def _read_taps(reader: d.ConfigReader) -> tuple[int, ...] | None:
    """From the key of vLLM, in `eagle_config` or beside it."""
    key = "eagle_aux_hidden_state_layer_ids"
    inside = reader.nested("eagle_config")
    use = inside.get("use_aux_hidden_state", True)
    if use is not True:
        raise reader.error("use_aux_hidden_state", use, "true: three hidden states are read")
    given = d.ConfigReader(inside, "config.json, eagle_config").integers(key) or reader.integers(key)
    if given is None:
        return None
    if len(given) != NUM_TAPS:
        raise reader.error(key, given, f"{NUM_TAPS} integers")
    return tuple(given)
