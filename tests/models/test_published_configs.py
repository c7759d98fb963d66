"""The config.json and generation_config.json of published models are read as they are, down to their oldest keys.

`fixtures/published_configs.json` holds them as their authors wrote them (LongRoPE's factors apart, which are made up).
The models are built at a small size through `hf_overrides`, with dummy weights.
"""

from __future__ import annotations

import copy
import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import TINY_MODELS, config_of

from llm import LLM
from llm.errors import UnsupportedModelError
from llm.layers.rotary import RopeParameters, frequencies
from llm.models.config_reader import ConfigReader
from llm.models.decoder import AttentionConfig
from llm.models.registry import resolve_model_cls

PUBLISHED: dict[str, dict[str, Any]] = json.loads(
    (Path(__file__).parents[1] / "fixtures" / "published_configs.json").read_text()
)
_LAYERS = 2

# What a few of them mean, where their keys could be misread: (head size, longest sequence, windows).
_FACTS = {
    "llama-3.2-1b": (64, 131072, {None}),
    "mistral-7b": (128, 32768, {4096}),
    "mistral-nemo": (128, 131072, {None}),
    "qwen2.5-0.5b": (64, 32768, {None}),  # a window that is switched off
    "qwen2.5-7b-1m-yarn": (64, 131072, {None}),
    "qwen3-0.6b": (128, 40960, {None}),
    "gemma-2-2b": (256, 8192, {4096, None}),
    "gemma-3-1b": (256, 32768, {512, None}),
    "phi-3-mini-4k": (96, 4096, {2047}),
    "phi-3-mini-128k": (96, 131072, {262144}),
    "phi-4-mini": (128, 131072, {262144}),
    "phi-2": (80, 2048, {None}),
    "falcon-7b": (64, 2048, {None}),
    "starcoder2-3b": (128, 16384, {4096}),
    "gpt-j-6b": (256, 2048, {None}),
}


def _head_size(read: Any) -> int:
    (size,) = {layer.attention.heads.size for layer in read.layers}
    return size


def _read(config: dict[str, Any]) -> Any:
    return resolve_model_cls(config["architectures"], config["model_type"]).read_config(ConfigReader(config))


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_config_is_accepted_and_every_key_accounted_for(name: str) -> None:
    config = PUBLISHED[name]["config"]
    read = _read(config)
    assert read.vocab_size == config["vocab_size"]
    assert len(read.layers) == config.get("num_hidden_layers", config.get("n_layer"))
    if name in _FACTS:
        windows = {layer.attention.sliding_window for layer in read.layers}
        assert (_head_size(read), read.max_position_embeddings, windows) == _FACTS[name]


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_windows_of_a_published_config_are_those_of_transformers(name: str) -> None:
    """Layer by layer, where transformers says which layers have one."""
    transformers = pytest.importorskip("transformers")
    config = PUBLISHED[name]["config"]
    theirs = transformers.AutoConfig.for_model(**config)
    kinds = getattr(theirs, "layer_types", None)
    if kinds is None:
        pytest.skip("transformers gives all layers of this family one kind")
    windows = [theirs.sliding_window if kind == "sliding_attention" else None for kind in kinds]
    assert [layer.attention.sliding_window for layer in _read(config).layers] == windows


@pytest.mark.parametrize("model_type", ["qwen2", "smollm3", "seed_oss", "ernie4_5", "internlm3"])
def test_heads_that_are_null_are_those_of_transformers(model_type: str) -> None:
    """A missing key is the family's default; null is one KV head per head, and the width shared among the heads."""
    transformers = pytest.importorskip("transformers")
    given = {"model_type": model_type, "hidden_size": 96, "num_attention_heads": 12, "num_hidden_layers": 1}
    given |= {"intermediate_size": 64, "vocab_size": 50, "head_dim": None, "num_key_value_heads": None}
    theirs = transformers.CONFIG_MAPPING[model_type].from_dict(given)
    heads = _read({"architectures": [], **given}).layers[0].attention.heads
    size = getattr(theirs, "head_dim", None) or 96 // 12
    assert (heads.key_value, heads.size) == (theirs.num_key_value_heads, size) == (12, 8)


# A row of each of transformers' config classes.
_OF_CLASSES = {row.config_class: name for name, row in reversed(TINY_MODELS.items())}
# Absent keys that are read otherwise on purpose -> why.
_READ_OTHERWISE = {
    "num_nextn_predict_layers": "weights of layers for drafting that no key speaks of are refused, not passed over",
    "rope_parameters.full_attention": "the rope of one kind of layers alone is refused",
    "rope_parameters of olmo_hybrid": "published models say by its absence that there is no rotary embedding",
}


@pytest.mark.parametrize("name", _OF_CLASSES.values(), ids=_OF_CLASSES)
def test_an_absent_key_means_what_it_means_to_transformers(name: str) -> None:
    """Each key in turn, those of the rope too. The tiny models' files name every key; published ones do not."""
    theirs = config_of(TINY_MODELS[name])
    whole = _as_json(theirs)
    held, differing = [], []
    for place, without in _without_each_key(whole):
        top = place.partition(".")[0]
        if place in _READ_OTHERWISE or f"{top} of {whole['model_type']}" in _READ_OTHERWISE:
            continue
        ours = _meaning_of(without)
        if "has no " in str(ours) or (filled := _filled(type(theirs), without)) is None or top not in filled:
            continue  # a key that must be there
        named = _meaning_of({**without, top: filled[top]})
        if isinstance(named, str):
            continue  # a default that does not go with the tiny sizes
        held.append(place)
        if place == "max_position_embeddings":  # which some ropes read beside it
            ours, named = (_read({**without, **more}).max_position_embeddings for more in ({}, {top: filled[top]}))
        if ours != named:
            differing.append(f"{place}, which is {filled[top]}")
    assert differing == []
    assert len(held) > 5


# Keys of which a negative number means something.
_NEGATIVE = {"moe_layer_end_index"}  # the last layer, counted from the end


@pytest.mark.parametrize("name", _OF_CLASSES.values(), ids=_OF_CLASSES)
def test_a_negative_number_is_refused(name: str) -> None:
    """Each integer of a config in turn: read by nobody, or refused in a sentence that shows it."""
    whole = _as_json(config_of(TINY_MODELS[name]))
    meaning = _meaning_of(whole)
    integers = [key for key, value in whole.items() if type(value) is int and key not in _NEGATIVE]
    found = {key: _meaning_of({**whole, key: -1}) for key in integers}
    wrong = {key: own for key, own in found.items() if own != meaning and not (isinstance(own, str) and "-1" in own)}
    assert wrong == {} and any(isinstance(own, str) for own in found.values())


@pytest.mark.parametrize("name", _OF_CLASSES.values(), ids=_OF_CLASSES)
def test_every_family_refuses_a_key_that_nobody_knows(name: str) -> None:
    whole = _as_json(config_of(TINY_MODELS[name]))
    refused = _meaning_of({**whole, "of_nobody": 1})
    assert isinstance(refused, str) and "keys that are not understood: 'of_nobody'" in refused


def _meaning_of(config: dict[str, Any]) -> Any:
    """What is computed, or why it is refused."""
    try:
        return _meaning(_read(config))
    except UnsupportedModelError as error:
        return str(error)


def _as_json(config: Any) -> dict[str, Any]:
    return json.loads(json.dumps({**config.to_dict(), "architectures": []}, default=str))


def _filled(kind: Any, given: dict[str, Any]) -> dict[str, Any] | None:
    """What transformers reads, with its defaults; None: it refuses the file, with errors of many types."""
    try:
        return _as_json(kind.from_dict(copy.deepcopy(given)))
    except Exception:
        return None


def _without_each_key(whole: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    for key, value in whole.items():
        if key not in ("model_type", "architectures"):
            yield key, {name: own for name, own in whole.items() if name != key}
        for inner in value if key == "rope_parameters" and isinstance(value, dict) else ():
            outer = {name: own for name, own in whole.items() if name != inner}  # some files have it there
            yield f"{key}.{inner}", {**outer, key: {name: own for name, own in value.items() if name != inner}}


def _meaning(value: Any) -> Any:
    """What a configuration computes, as data: None and the number that it stands for are one."""
    if isinstance(value, list | tuple):
        return [_meaning(item) for item in value]
    if not dataclasses.is_dataclass(value):
        return value
    fields = {field.name: _meaning(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, RopeParameters) and value.rope_type in ("default", "linear"):
        del fields["max_position_embeddings"], fields["original_max_position_embeddings"]  # nothing depends on them
    if isinstance(value, AttentionConfig) and value.scale is None:
        fields["scale"] = value.heads.size**-0.5
    return type(value), fields


YARN: dict[str, Any] = {"rope_type": "yarn", "rope_theta": 10000.0}


@pytest.mark.parametrize("longest", [64, 96, 512])
@pytest.mark.parametrize("rope", [{"factor": 4.0}, {"factor": 3.0, "original_max_position_embeddings": 64}], ids=str)
def test_yarn_is_transformers_whatever_the_longest_position_is(longest: int, rope: dict[str, Any]) -> None:
    """Its ramp is over the original length, which is `max_position_embeddings` only where nothing else is said."""
    pytest.importorskip("transformers")
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    given = {"hidden_size": 128, "num_attention_heads": 4, "max_position_embeddings": longest}
    theirs = LlamaConfig(rope_parameters={**YARN, **rope}, **given)
    expected, factor = ROPE_INIT_FUNCTIONS["yarn"](theirs, torch.device("cpu"))
    ours = ConfigReader({"model_type": "llama", "rope_parameters": {**YARN, **rope}, **given}).rope()
    found, found_factor = frequencies(ours, 32, longest)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=0)
    assert found_factor == pytest.approx(factor)


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "linear"},
        {"rope_type": "dynamic"},
        {"rope_type": "proportional"},
        {"rope_type": "proportional", "partial_rotary_factor": 0.25},
        {"rope_type": "yarn", "original_max_position_embeddings": 64},
        {"rope_type": "yarn", "original_max_position_embeddings": 64, "attention_factor": 0.7, "beta_fast": 20.0},
        {"rope_type": "yarn", "original_max_position_embeddings": 64, "mscale": 0.7, "mscale_all_dim": 0.9},
        {
            **{"rope_type": "llama3", "original_max_position_embeddings": 64},
            **{"low_freq_factor": 1.0, "high_freq_factor": 4.0},
        },
    ],
    ids=str,
)
@pytest.mark.parametrize("factor", [1.0, 3.0])
@pytest.mark.parametrize("theta", [10000.0, 500000.0])
def test_angles_are_those_of_transformers(rope: dict[str, Any], factor: float, theta: float) -> None:
    """Whatever scales them: each recipe with and without a factor, of two thetas."""
    pytest.importorskip("transformers")
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    parameters = {**rope, "factor": factor, "rope_theta": theta}
    given = {"hidden_size": 128, "num_attention_heads": 4, "head_dim": 32, "max_position_embeddings": 192}
    theirs = LlamaConfig(rope_parameters=dict(parameters), **given)
    expected, scale = ROPE_INIT_FUNCTIONS[rope["rope_type"]](theirs, torch.device("cpu"), seq_len=192)
    ours = ConfigReader({"model_type": "llama", "rope_parameters": parameters, **given}).rope()
    found, found_scale = frequencies(ours, ours.rotary_dim(32), 192)
    torch.testing.assert_close(found[: len(expected)], expected, rtol=1e-5, atol=0)
    assert not found[len(expected) :].any() and found_scale == pytest.approx(scale)


def test_yarn_without_a_factor_stretches_from_the_original_to_the_longest_position() -> None:
    parameters = {**YARN, "original_max_position_embeddings": 64}
    given = {"model_type": "llama", "max_position_embeddings": 320, "rope_parameters": parameters}
    assert ConfigReader(given).rope().factor == 5.0


@pytest.mark.parametrize(
    ("name", "key", "value"),
    [
        ("qwen2.5-0.5b-base", "use_mrope", True),
        ("smollm2-135m", "rope_interleaved", True),
        ("phi-4-mini", "full_attn_mod", 2),
        ("phi-4-mini", "lm_head_bias", True),
        ("gemma-2-2b", "sliding_window_size", 1),
        ("gpt2", "add_cross_attention", True),
    ],
)
def test_a_variant_that_is_switched_on_is_refused_by_name(name: str, key: str, value: Any) -> None:
    with pytest.raises(UnsupportedModelError, match=key):
        _read(PUBLISHED[name]["config"] | {key: value})


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_model_runs_at_a_small_size_with_its_own_defaults(name: str, tmp_path: Path) -> None:
    published = PUBLISHED[name]
    (tmp_path / "config.json").write_text(json.dumps(published["config"]))
    (tmp_path / "generation_config.json").write_text(json.dumps(published["generation_config"]))
    with LLM(
        tmp_path,
        load_format="dummy",
        skip_tokenizer_init=True,
        hf_overrides=_small(published["config"]),
        max_model_len=64,
    ) as llm:
        defaults = llm.get_default_sampling_params()
        for key in {"temperature", "top_k", "top_p", "repetition_penalty"} & set(published["generation_config"]):
            assert getattr(defaults, key) == published["generation_config"][key]
        defaults.max_tokens = 4
        output = llm.generate([[1, 2, 3]], defaults, use_tqdm=False)[0].outputs[0]
    assert output.finish_reason in ("length", "stop")


def _small(config: dict[str, Any]) -> dict[str, Any]:
    """`hf_overrides` that shrink what costs memory and keep the size of a head, which the rope's factors depend on."""
    head = _head_size(_read(config))
    heads = {"num_attention_heads": 2, "n_head": 2, "num_key_value_heads": 2}
    widths = dict.fromkeys(("hidden_size", "n_embd", "word_embed_proj_dim"), 2 * head)
    small: dict[str, Any] = {**heads, **widths, "intermediate_size": 32, "ffn_dim": 32, "vocab_size": 64}
    small |= {"num_hidden_layers": _LAYERS, "n_layer": _LAYERS}
    small |= {key: config[key][:_LAYERS] for key in ("layer_types", "no_rope_layers") if key in config}
    return {key: value for key, value in small.items() if key in config}


@pytest.mark.parametrize(
    ("max_model_len", "note"),
    [
        (4096, "short factors, for it is within the original 4096"),
        (4097, "long factors, for it is beyond the original 4096"),
    ],
)
def test_the_choice_of_longropes_factors_is_stated(tmp_path: Path, max_model_len: int, note: str) -> None:
    config = PUBLISHED["phi-3-mini-128k"]["config"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    arguments: dict[str, Any] = {"load_format": "dummy", "skip_tokenizer_init": True, "hf_overrides": _small(config)}
    with LLM(tmp_path, max_model_len=max_model_len, **arguments) as llm:
        assert note in str(llm.config)


def test_keys_are_read_by_other_names_and_blamed_by_their_own() -> None:
    names = {"n_embd": "hidden_size", "d_model": "hidden_size", "n_layer": "num_hidden_layers"}
    reader = ConfigReader({"n_embd": 8, "d_model": 8, "n_layer": -1, "stranger": 1}).renamed(names)
    assert reader.positive("hidden_size") == 8
    with pytest.raises(UnsupportedModelError, match=r"n_layer is -1, must be an integer"):
        reader.positive("num_hidden_layers")
    with pytest.raises(UnsupportedModelError, match="not understood: 'stranger'"):
        reader.finish()
    with pytest.raises(UnsupportedModelError, match="not understood: 'd_model', 'n_layer'"):
        ConfigReader({"d_model": 8, "n_layer": 1}).renamed(names).finish()
    with pytest.raises(UnsupportedModelError, match="has no n_layer"):
        ConfigReader({"n_embd": 8}).renamed(names).positive("num_hidden_layers")
    with pytest.raises(UnsupportedModelError, match="d_model is 9, must be 8, as hidden_size is"):
        ConfigReader({"n_embd": 8, "d_model": 9}).renamed(names)
    seen = ConfigReader({"n_ctx": 1, "n_embd": 8})
    seen.ignore("n_ctx", "n_embd")
    seen.renamed(names).finish()
