"""The decoder: embedding, layers, final norm, LM head. The base class of every family."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from functools import partial
from typing import ClassVar

import torch
from torch import nn

from llm.base.watch import Patchable
from llm.forward import ForwardBatch, StateSpec
from llm.layers.embedding import LogitsLayer, ParallelLMHead, VocabParallelEmbedding
from llm.layers.linear import ReplicatedLinear
from llm.layers.parallel import SINGLE, TensorParallel
from llm.models.config_reader import ConfigReader
from llm.models.decoder.config import DecoderConfig
from llm.models.decoder.layer import add_norm
from llm.models.decoder.mlp import down, gate_and_up, up
from llm.models.decoder.multi_token import MultiTokenHead
from llm.models.decoder.part import BuildContext
from llm.models.interface import BuildOptions, Cut, Renames

# `packed_modules_mapping` where the feed-forward has no gate, and where the checkpoint has the matrices together.
QKV_PACKED = {"qkv_proj": ["q_proj", "k_proj", "v_proj"]}
NOTHING_PACKED: dict[str, list[str]] = {}


class DecoderStack(Patchable):
    """The modules under "model."; `DecoderForCausalLM.forward` runs them, so hook that or a layer, not this module."""

    def __init__(self, config: DecoderConfig, context: BuildContext, prefix: str) -> None:
        super().__init__()
        width = config.embedding_size or config.hidden_size
        self.embed_tokens = VocabParallelEmbedding(
            config.vocab_size,
            width,
            prefix=f"{prefix}.embed_tokens",
            tied=config.tie_word_embeddings,
            **context.table,
        )
        self.embed_positions: VocabParallelEmbedding | None = None
        if config.learned_positions is not None:
            self.embed_positions = VocabParallelEmbedding(
                config.learned_positions.rows,
                config.hidden_size,
                prefix=f"{prefix}.embed_positions",
                **context.table,
            )
        self.embed_norm: nn.Module | None = None
        if config.embedding_norm is not None:
            self.embed_norm = config.embedding_norm.build(config.hidden_size, context)
        self.layers = nn.ModuleList(
            layer.build(context, f"{prefix}.layers.{index}") for index, layer in enumerate(config.layers)
        )
        self.norm: nn.Module | None = None
        if config.final_norm is not None:
            self.norm = config.final_norm.build(config.hidden_size, context)
        self.project_in, self.project_out = (
            None
            if config.embedding_size is None
            else ReplicatedLinear(*sizes, bias=False, prefix=f"{prefix}.{name}", **context.linear)
            for name, sizes in (
                ("project_in", (width, config.hidden_size)),
                ("project_out", (config.hidden_size, width)),
            )
        )


class DecoderForCausalLM(Patchable):
    """Implements `llm.models.interface.CausalLM`; a family overrides `read_config` and, if needed, the data below."""

    packed_modules_mapping: ClassVar[dict[str, list[str]]] = {
        **QKV_PACKED,
        "gate_up_proj": ["gate_proj", "up_proj"],
    }
    # As transformers 5 has them in memory.
    stacked_weights: ClassVar[Mapping[str, Cut]] = {
        "experts.gate_up_proj": gate_and_up,
        "experts.up_proj": up,
        "experts.down_proj": down,
    }
    renames: ClassVar[Renames] = ()
    # Older checkpoints store the rotary frequencies; we compute them from config.json.
    ignored_weights: ClassVar[tuple[str, ...]] = ("rotary_emb.inv_freq",)

    @classmethod
    def read_config(cls, reader: ConfigReader) -> DecoderConfig:
        raise NotImplementedError

    @classmethod
    def kv_cache_specs(cls, config: DecoderConfig, dtype: torch.dtype, tp: TensorParallel = SINGLE) -> list[StateSpec]:
        return config.states(dtype, tp)

    def __init__(self, config: DecoderConfig, options: BuildOptions) -> None:
        super().__init__()
        self.config = config
        context = BuildContext(options, config.hidden_size)
        self.model = DecoderStack(config, context, "model")
        # Drafts tokens; `forward` does not run it.
        self.mtp = None if config.draft_head is None else MultiTokenHead(config.draft_head, context)
        self._leave_out_further_layers(config)
        # The layers whose input `forward` appends to `ForwardBatch.taps`.
        self.tapped: tuple[int, ...] = ()
        declared = len(config.states(options.params_dtype, options.tp))
        if context.num_states != declared:
            raise RuntimeError(f"the layers' configs declare {declared} states and built {context.num_states}")
        if config.classes is not None:
            self._build_score(config.classes, context)
        else:
            self._build_lm_head(config, context)
        self.logits_processor = LogitsLayer(
            config.vocab_size, scale=1.0 / config.logits_divisor, soft_cap=config.logits_soft_cap
        )

    def _leave_out_further_layers(self, config: DecoderConfig) -> None:
        """Leave out the layers for multi-token prediction that are not built."""
        first, last = len(config.layers), len(config.layers) + config.layers_left_out
        left_out: tuple[str, ...] = ()
        if config.draft_head is not None:
            left_out, first = config.draft_head.left_out, first + 1
            self.further_renames = config.draft_head.renames
        left_out += tuple(f"model.layers.{index}" for index in range(first, last))
        if left_out:
            self.left_out = (*getattr(self, "left_out", ()), *left_out)

    def _build_lm_head(self, config: DecoderConfig, context: BuildContext) -> None:
        self.lm_head = self.model.embed_tokens
        if not config.tie_word_embeddings:
            self.lm_head = ParallelLMHead(
                config.vocab_size,
                config.embedding_size or config.hidden_size,
                config.lm_head_bias,
                prefix="lm_head",
                **context.table,
            )

    def _build_score(self, classes: int, context: BuildContext) -> None:
        """The classifier in place of the LM head. Base models, without a head, are stored without "model."."""
        self.score: ReplicatedLinear | None = None
        if classes:
            dtype, bias = context.options.params_dtype, self.config.classes_by_token
            self.score = ReplicatedLinear(
                context.hidden_size, classes, bias=bias, params_dtype=dtype, prefix="score", return_bias=False
            )
        if self.config.score_tokens is not None:
            self.merge_weights = partial(_with_score, self.config.score_tokens)
        heads = ("lm_head", *(name for name, target in getattr(self, "renames", ()) if target == "lm_head"))
        self.left_out = (*getattr(self, "left_out", ()), *heads, *(() if classes else ("score",)))
        self.further_renames = tuple((name, f"model.{name}") for name, _ in self.model.named_children())
        if self.config.classes_by_token:
            self.further_renames += (("classifier", "score"),)

    def classify(self, hidden: torch.Tensor) -> torch.Tensor:
        """Pooled hidden states float32 [R, H] -> class logits float32 [R, classes]."""
        if self.score is None:
            raise RuntimeError("the model was built without a classifier")
        return self.score(hidden)

    def embed(self, input_ids: torch.Tensor) -> torch.Tensor:
        """ids int64 [N] -> float32 [N, H], scaled by `embedding_multiplier`."""
        hidden = self.model.embed_tokens(input_ids)
        if self.model.project_in is not None:
            hidden = self.model.project_in(hidden)
        multiplier = self.config.embedding_multiplier
        return hidden if multiplier == 1.0 else hidden * multiplier

    def embed_batch(self, batch: ForwardBatch) -> torch.Tensor:
        """What enters the first layer, float32 [N, H]."""
        model, positions = self.model, self.config.learned_positions
        hidden = self.embed(batch.input_ids) if batch.inputs_embeds is None else batch.inputs_embeds
        if batch.images is not None:
            hidden = hidden.index_copy(0, batch.images.indices, batch.images.rows.to(hidden.dtype))
        if model.embed_positions is not None and positions is not None:
            hidden = hidden + model.embed_positions(batch.positions + positions.offset)
        return hidden if model.embed_norm is None else model.embed_norm(hidden)

    def forward(self, batch: ForwardBatch) -> torch.Tensor:
        model, residual = self.model, None
        hidden = self.embed_batch(batch)
        for index, layer in enumerate(model.layers):
            if index in self.tapped:
                batch.taps.append(hidden if residual is None else hidden + residual)
            hidden, residual = layer(hidden, residual, batch)
            if batch.images is not None and index < len(batch.images.deep):
                hidden = hidden.index_add(0, batch.images.indices, batch.images.deep[index].to(hidden.dtype))
        if model.norm is not None:
            hidden, _ = add_norm(model.norm, hidden, residual)
        elif residual is not None:
            hidden = hidden + residual
        return hidden if model.project_out is None else model.project_out(hidden)

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.logits_processor(self.lm_head, hidden)


def _with_score(
    tokens: tuple[int, int], tensors: Iterator[tuple[str, torch.Tensor]], names: Collection[str]
) -> Iterator[tuple[str, torch.Tensor]]:
    """The checkpoint's tensors and `score.weight`, from the rows of the LM head, or of the embedding it is tied to."""
    head = next((name for name in names if name.endswith("lm_head.weight")), None)
    for name, tensor in tensors:
        yield name, tensor
        if name == head or (head is None and name.endswith("embed_tokens.weight")):
            no, yes = (tensor[token].float() for token in tokens)
            yield "score.weight", (yes - no)[None]
