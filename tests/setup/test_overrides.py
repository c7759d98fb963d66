"""What replaces a model's own words: `hf_overrides` as a callable, another generation config, single defaults of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from embedded import GREEDY, PROMPTS, copy_model, open_llm, run, tokens

from llm import LLM, ValidationError
from llm.loading.source import resolve_overrides


def shorter(config: Any) -> Any:
    config.max_position_embeddings = 48
    config.update({"rms_norm_eps": 0.5})
    return config


def test_a_callable_changes_what_it_says_and_nothing_else() -> None:
    with (
        open_llm(hf_overrides=shorter) as called,
        open_llm(hf_overrides={"max_position_embeddings": 48, "rms_norm_eps": 0.5}) as told,
        open_llm(max_model_len=48) as plain,
    ):
        assert called.config.model_config == told.config.model_config
        assert called.config.model_config.max_model_len == 48
        assert tokens(run(called, PROMPTS)) == tokens(run(told, PROMPTS)) != tokens(run(plain, PROMPTS))


def test_a_callable_that_changes_nothing_replaces_nothing() -> None:
    raw: dict[str, Any] = {"model_type": "llama", "rope_theta": 7.0, "of_nobody": [1], "hidden_size": 32}
    assert resolve_overrides(lambda config: config, raw) == {}
    assert resolve_overrides(lambda config: config, raw | {"model_type": "of_nobody"}) == {}
    assert resolve_overrides(None, raw) == {} and resolve_overrides({"a": None}, raw) == {"a": None}


def test_of_a_nested_object_one_key_is_changed() -> None:
    raw: dict[str, Any] = {"model_type": "of_nobody", "inner": {"a": 1, "b": 2}}

    def change(config: Any) -> Any:
        config.inner["a"] = 3
        return config

    assert resolve_overrides(change, raw) == {"inner": {"a": 3, "b": 2}}


@pytest.mark.parametrize(("value", "said"), [(lambda config: None, "NoneType"), ("x", "'x'"), ([], r"\[\]")])
def test_bad_overrides(value: Any, said: str) -> None:
    with pytest.raises(ValidationError, match=f"^hf_overrides must be .*{said}"):
        LLM(hf_overrides=value)


def test_single_defaults_are_replaced_and_say_so(tmp_path: Path) -> None:
    folder = copy_model(tmp_path / "model", generation_config={"temperature": 0.0, "top_k": 7})
    with open_llm(folder, max_model_len=64, override_generation_config={"top_k": 3, "max_new_tokens": 5}) as llm:
        params = llm.get_default_sampling_params()
        assert (params.temperature, params.top_k, params.max_tokens) == (0.0, 3, 5)
        origins = {name: params.origins[name] for name in ("temperature", "top_k", "max_tokens", "min_p")}
        assert origins == {
            "temperature": "generation_config.json",
            "top_k": "override_generation_config",
            "max_tokens": "override_generation_config",
            "min_p": "default",
        }
        assert len(tokens(llm.generate(PROMPTS, use_tqdm=False))[0]) == 5


def test_replaced_defaults_need_no_file() -> None:
    with open_llm(max_model_len=64, generation_config="vllm", override_generation_config={"temperature": 0}) as llm:
        assert llm.get_default_sampling_params().greedy
        assert tokens(run(llm, PROMPTS)) == tokens(run(llm, PROMPTS, GREEDY))


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ({"temprature": 1}, "no key 'temprature'. Did you mean 'temperature'"),
        ({"temperature": 5}, "override_generation_config: temperature must be"),
        ([1], "override_generation_config must be a dict"),
    ],
)
def test_bad_replaced_defaults(value: Any, said: str) -> None:
    with pytest.raises(ValidationError, match=said) as caught:
        LLM(override_generation_config=value)
    assert caught.value.parameter == "override_generation_config"


def test_a_folder_as_generation_config_gives_defaults_and_endings(tmp_path: Path) -> None:
    with open_llm(max_model_len=64) as plain:
        first = tokens(run(plain, PROMPTS))[0]
    (tmp_path / "generation_config.json").write_text(json.dumps({"temperature": 0.0, "eos_token_id": [first[4]]}))
    for name in (tmp_path, str(tmp_path)):
        with open_llm(max_model_len=64, generation_config=name) as llm:
            assert llm.get_default_sampling_params().greedy
            output = run(llm, PROMPTS)[0].outputs[0]
            assert output.finish_reason == "stop" and output.token_ids == first[: first.index(first[4]) + 1]


def test_folders_without_one(tmp_path: Path) -> None:
    for folder in (tmp_path, "/no/such"):
        with pytest.raises(ValidationError, match="generation_config must be 'auto', 'vllm' or a folder that holds"):
            LLM(generation_config=folder)
    with pytest.raises(ValidationError, match="generation_config must be 'auto', 'vllm' or a folder"):
        LLM(generation_config=None)  # type: ignore[arg-type]
