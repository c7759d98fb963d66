"""`kv_cache_dtype`: its names, its reason, the memory it takes, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from embedded import EMBEDDED_MODEL, open_llm

from llm import SamplingParams, ValidationError
from llm.forward import KVCacheSpec, LatentCacheSpec
from llm.layers.attention import AttentionBackend
from llm.platforms import current_platform
from llm.setup.plan import check_cache

INT8, FLOAT8 = torch.int8, torch.float8_e4m3fn
NAMES = {"int8": INT8, "fp8": FLOAT8, "fp8_e4m3": FLOAT8, "int8_per_token_head": INT8, "fp8_per_token_head": FLOAT8}
SHORT: dict[str, Any] = {"max_model_len": 64, "skip_tokenizer_init": True, "load_format": "dummy"}


@pytest.mark.parametrize("name", NAMES)
def test_the_config_says_what_a_token_takes(name: str) -> None:
    with open_llm(kv_cache_dtype=name, **SHORT) as llm:
        cache = llm.config.cache_config
        assert cache.kv_cache_dtype == NAMES[name]
        assert cache.kv_cache_memory_bytes == cache.num_blocks * cache.block_size * 1056
        line = next(line for line in repr(llm.config).splitlines() if line.startswith("kv_cache_dtype"))
        assert "(asked for; a scale per token and KV head; 1,056 bytes per token in all layers" in line
        assert ("saves memory, not time" in line) == (NAMES[name] == FLOAT8)


def test_nearly_twice_the_tokens_fit() -> None:
    """All blocks, of a budget that floats would exceed."""
    tokens = {}
    for dtype in ("bfloat16", "int8"):
        with open_llm(kv_cache_dtype=dtype, kv_cache_memory_bytes=1 << 20, skip_tokenizer_init=True) as llm:
            tokens[dtype] = llm.config.model_config.max_model_len
    assert tokens["int8"] / tokens["bfloat16"] >= 1.9


def test_the_spec_counts_codes_and_scales() -> None:
    assert KVCacheSpec(3, 64, INT8).bytes_per_token() == 2 * 3 * (64 + 2)
    assert KVCacheSpec(3, 10, FLOAT8).bytes_per_token() == 2 * 3 * (12 + 2)
    assert KVCacheSpec(3, 10, torch.bfloat16).bytes_per_token() == 2 * 3 * 10 * 2


def test_one_vector_per_token_without_a_quantized_form_is_refused() -> None:
    match = r"must be a float type, such as 'bfloat16': .* no keys and values of"
    with pytest.raises(ValidationError, match=match):
        check_cache("int8", INT8, [LatentCacheSpec(8, INT8)], current_platform)
    reason = check_cache("int8", INT8, [LatentCacheSpec(16, INT8, scales=2)] * 2, current_platform)
    assert reason.startswith("; a scale per token of each part of the latent vector; 40 bytes per token in all layers;")
    assert reason.endswith("it saves memory, not time")


def test_a_plugin_that_reads_floats_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    class Theirs(AttentionBackend):
        """As a plugin of an earlier release."""

    monkeypatch.setattr("llm.setup.plan.attention_backend", lambda platform, size: Theirs)
    platform = current_platform
    with pytest.raises(ValidationError, match="such as 'bfloat16': Theirs reads nothing else"):
        check_cache("int8", INT8, [KVCacheSpec(2, 8, INT8)], platform)
    assert check_cache("auto", torch.float32, [LatentCacheSpec(8, torch.float32)], platform) == ""


def test_answers_stay_close() -> None:
    """The greedy answer of the embedded model, and its distance: below what half of the codes would give."""
    params = SamplingParams(max_tokens=8, temperature=0, logprobs=1)
    prompt = "And the LORD spake unto Moses, saying, Speak unto the children of"
    found = {}
    for dtype in ("float32", "int8", "fp8"):
        with open_llm(EMBEDDED_MODEL, kv_cache_dtype=dtype, max_model_len=64) as llm:
            found[dtype] = llm.generate(prompt, params, use_tqdm=False)[0].outputs[0]
    for dtype, most in (("int8", 0.02), ("fp8", 0.1)):
        assert found[dtype].token_ids == found["float32"].token_ids
        away = abs(found[dtype].cumulative_logprob - found["float32"].cumulative_logprob)
        assert 0 < away < most * len(found[dtype].token_ids)
