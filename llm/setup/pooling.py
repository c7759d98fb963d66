"""Whether a model generates or pools, and what it makes of hidden states.

`runner`, `convert` and `pooler_config` follow from what the arguments and the files of the model folder say together.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from llm.base.checks import refuse
from llm.config.engine import LLMArgs
from llm.engine.boundary import QWEN3_RERANKER, QWEN3_VL_RERANKER, PoolingPlan
from llm.errors import CheckpointError, UnsupportedModelError
from llm.loading.resolve import is_hub_name
from llm.loading.sentence_transformers import (
    ACTIVATIONS,
    MODULES,
    SentenceModules,
    read_sentence_modules,
)
from llm.loading.source import FolderSource, ModelSource
from llm.models.config_reader import ConfigReader
from llm.models.decoder import DecoderConfig
from llm.models.registry import is_encoder, is_known
from llm.pooling_params import PoolerConfig
from llm.text.tokenizer import Tokenizer

# How the names of architectures end that are built on a family's layers, and what they are for.
_OF_TOKENS = "ForTokenClassification"
_CLASSIFIERS = ("ForSequenceClassification", _OF_TOKENS, "RewardModel", "ForRewardModel")
_PROBLEMS = {
    "regression": "identity",
    "single_label_classification": "softmax",
    "multi_label_classification": "sigmoid",
}
_MOST_CLASSES = 1 << 20


@dataclass(frozen=True)
class Purpose:
    """What a model is for.

    Attributes:
        convert: "none" where it generates, else "embed" or "classify".
        why: the reason.
        by_token: it classifies every token.
    """

    convert: str
    why: str
    by_token: bool = False

    @property
    def runner(self) -> str:
        return "generate" if self.convert == "none" else "pooling"


def choose_purpose(args: LLMArgs, reader: ConfigReader, source: ModelSource) -> Purpose:
    """From the arguments, or else from the checkpoint; raises `ValidationError` where they contradict each other."""
    if args.runner == "generate":
        if args.convert in ("embed", "classify"):
            refuse("convert", args.convert, "'none' or 'auto' with runner='generate'")
        return Purpose("none", "asked for")
    ahead = [name for name in reader.names("architectures") or [] if _sees_ahead(name)]
    if ahead and (args.runner == "pooling" or args.convert != "auto") and not is_encoder(reader.family):
        raise UnsupportedModelError(
            f"{ahead[0]} attends to tokens in both directions, and the layers of {reader.family} to those before only; "
            "use sentence-transformers."
        )
    by_token = any(name.endswith(_OF_TOKENS) for name in reader.names("architectures") or [])
    convert, task = args.convert, PoolerConfig.of(args.pooler_config).task
    if task is not None:
        needed = "embed" if task.endswith("embed") else "classify"
        if convert not in ("auto", needed):
            refuse("pooler_config", task, f"without a task, or of another than {task!r}, with convert={convert!r}")
        convert = needed
    if convert in ("embed", "classify"):
        return Purpose(convert, "asked for", convert == "classify" and by_token)
    found = _of_checkpoint(reader, source)
    if args.runner == "auto" or found.runner == "pooling":
        return found
    return Purpose("embed", "runner='pooling'; the last token's hidden state, normalised")


def _of_checkpoint(reader: ConfigReader, source: ModelSource) -> Purpose:
    architectures = reader.names("architectures") or []
    if any(is_known(name) for name in architectures) and not is_encoder(reader.family):
        if isinstance(source, FolderSource) and (source.folder / MODULES).exists():
            return Purpose("embed", "the folder is of sentence-transformers")
        return Purpose("none", "config.json")
    if any(name.endswith(_CLASSIFIERS) for name in architectures):
        by_token = any(name.endswith(_OF_TOKENS) for name in architectures)
        return Purpose("classify", f"config.json says {architectures[0]}", by_token)
    if is_encoder(reader.family) or any(name.endswith("Model") and not _sees_ahead(name) for name in architectures):
        return Purpose("embed", f"config.json says {architectures[0] if architectures else reader.family}")
    return Purpose("none", "config.json")


def _sees_ahead(architecture: str) -> bool:
    return "bidirectional" in architecture.lower()


def plan_pooling(
    args: LLMArgs, purpose: Purpose, reader: ConfigReader, source: ModelSource, architecture: object
) -> PoolingPlan | None:
    """What becomes of hidden states; None: the model generates.

    Raises:
        UnsupportedModelError, CheckpointError: a file of the folder says what is not computed here.
    """
    given = PoolerConfig.of(args.pooler_config)
    if purpose.runner == "generate":
        if given != PoolerConfig():
            refuse("pooler_config", args.pooler_config, "None for a model that generates; or pass runner='pooling'")
        return None
    if purpose.by_token and given.task in ("classify", "score"):
        refuse("pooler_config", given.task, "of the task 'token_classify': the checkpoint classifies every token")
    is_causal = getattr(architecture, "is_causal", True)
    modules = _modules(args, source) if purpose.convert == "embed" else None
    if modules is None:
        kind = getattr(architecture, "pooling_type", "LAST" if is_causal else "CLS")
        modules = SentenceModules(pooling_type=kind, normalizes=True)
    if given.kind is not None:
        modules = replace(modules, pooling_type=given.kind)
    if given.params.activates is not None:
        modules = replace(modules, normalizes=given.params.activates)
    asks = bool(reader.raw.get("classifier_from_token"))
    names = ("yes",) if asks else labels(reader)
    recipe = QWEN3_VL_RERANKER if isinstance(reader.raw.get("vision_config"), dict) else QWEN3_RERANKER
    activation = _activation(reader, len(names)) if given.params.activates is not False else "identity"
    return PoolingPlan(
        purpose.convert,
        is_causal,
        modules,
        activation if purpose.convert == "classify" else "identity",
        names if purpose.convert == "classify" else (),
        tuple(reader.integers("matryoshka_dimensions") or ()),
        given.dimensions,
        getattr(architecture, "hidden_size", 0),
        recipe if asks and reader.raw.get("is_original_qwen3_reranker") else "",
        purpose.by_token,
        "classify" if given.task == "score" else given.task or "",
    )


def with_head(architecture: object, purpose: Purpose, reader: ConfigReader, source: ModelSource) -> object:
    """The model's config with what `purpose` needs after the layers.

    Raises:
        UnsupportedModelError: the model computes nothing but text here.
    """
    if purpose.runner == "generate":
        if not getattr(architecture, "is_causal", True):
            raise UnsupportedModelError(
                "this model cannot generate: its tokens see those after them; pass runner='pooling' for its vectors."
            )
        return architecture
    classes = len(labels(reader)) if purpose.convert == "classify" else 0
    if isinstance(architecture, DecoderConfig):
        tokens = _score_tokens(reader, source) if purpose.convert == "classify" else None
        return replace(
            architecture,
            classes=classes if tokens is None else 1,
            classes_by_token=purpose.by_token,
            score_tokens=tokens,
            tie_word_embeddings=False,
            lm_head_bias=False,
        )
    pooled = getattr(architecture, "with_classes", None)
    if pooled is None:
        raise UnsupportedModelError(
            f"models of model_type {reader.family} only generate here; pass runner='generate', or use a library such "
            "as sentence-transformers for embeddings and scores."
        )
    return pooled(classes)


def labels(reader: ConfigReader) -> tuple[str, ...]:
    """The names of a classifier's classes, by number."""
    names = reader.nested("id2label")
    count = reader.positive("num_labels", reader.positive("_num_labels", len(names) or 2))
    if count > _MOST_CLASSES:
        raise CheckpointError(f"config.json: num_labels is {count}, must be at most {_MOST_CLASSES}.")
    return tuple(str(names.get(str(index), f"LABEL_{index}")) for index in range(count))


def _score_tokens(reader: ConfigReader, source: ModelSource) -> tuple[int, int] | None:
    """The ids of `classifier_from_token`, a key of `hf_overrides` in vLLM: of a language model asked for yes or no."""
    texts = reader.names("classifier_from_token")
    if texts is None:
        return None
    ids = Tokenizer(source.tokenizer()).encode_rendered(texts)
    if len(texts) != 2 or any(len(own) != 1 for own in ids):
        raise reader.error("classifier_from_token", texts, "the texts of two tokens, such as ['no', 'yes']")
    return ids[0][0], ids[1][0]


def _activation(reader: ConfigReader, classes: int) -> str:
    """Of class logits: what a cross-encoder of sentence-transformers says, else by the kind of problem."""
    own = reader.nested("sentence_transformers").get("activation_fn")
    name = own or reader.string("sbert_ce_default_activation_function", "")
    if name:
        kind = str(name).rpartition(".")[2]
        if kind not in ACTIVATIONS:
            raise UnsupportedModelError(f"config.json: activation_fn is {kind!r}, must be one of {list(ACTIVATIONS)}.")
        return ACTIVATIONS[kind]
    problem = reader.string("problem_type", "")
    return _PROBLEMS.get(problem) or ("sigmoid" if classes == 1 else "softmax")


def _modules(args: LLMArgs, source: ModelSource) -> SentenceModules | None:
    if not isinstance(source, FolderSource):
        return None
    hub_name = str(args.model) if is_hub_name(args.model) else ""
    return read_sentence_modules(source.folder, hub_name, args.revision)
