"""RoBERTa and XLM-RoBERTa: BERT whose positions start behind the padding token's id."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from llm.models.bert import AROUND, LAYER, BertModel, read_bert
from llm.models.config_reader import ConfigReader
from llm.models.decoder import LearnedPositions
from llm.models.encoder import EncoderConfig, layer_renames


class RobertaModel(BertModel):
    renames: ClassVar[tuple[tuple[str, str], ...]] = layer_renames(("roberta.", ""), "encoder.layer", LAYER, AROUND)
    heads: ClassVar[Mapping[str, str]] = {"classifier.dense": "head.dense", "classifier.out_proj": "head.out"}
    other_heads: ClassVar[tuple[str, ...]] = ("lm_head", "pooler", "roberta.pooler")

    @classmethod
    def read_config(cls, reader: ConfigReader) -> EncoderConfig:
        rows, first = reader.positive("max_position_embeddings", 514), reader.integer("pad_token_id", 1) + 1
        if not 0 < first < rows:
            raise reader.error("pad_token_id", first - 1, "a row of the table of positions")
        return read_bert(reader, LearnedPositions(rows, first))
