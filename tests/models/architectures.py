"""Tries every causal architecture of the installed transformers, on a tiny random checkpoint each.

    python tests/models/architectures.py [MODEL_TYPE ...] [--write]

Each is loaded with `model_impl="auto"`, and the logprobs of greedy tokens are held against transformers' float32: a
ragged batch in chunks, of which one request is generated again alone. `--write` writes the table ARCHITECTURES.md
beside this file; lines of architectures that were not asked for stay. All take about five minutes, so this is not part
of the test suite.
"""

from __future__ import annotations

import argparse
import logging
import math
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from llm import LLM, SamplingParams
from llm.errors import LLMError

TOLERANCE = 1e-4
TABLE = Path(__file__).parent / "ARCHITECTURES.md"
GREEDY = SamplingParams(temperature=0, max_tokens=8, logprobs=5, ignore_eos=True)
LENGTHS = (1, 5, 16, 23, 40)
# For every config that has the key; a nested config gets the same.
SMALL: Mapping[str, Any] = {
    "vocab_size": 257,
    "hidden_size": 64,
    "d_model": 64,
    "n_embd": 64,
    "intermediate_size": 64,
    "ffn_dim": 64,
    "decoder_ffn_dim": 64,
    "encoder_ffn_dim": 64,
    "num_hidden_layers": 2,
    "num_layers": 2,
    "n_layer": 2,
    "n_layers": 2,
    "decoder_layers": 2,
    "encoder_layers": 2,
    "num_attention_heads": 4,
    "n_head": 4,
    "n_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "n_positions": 256,
    "max_seq_len": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "moe_num_experts": 4,
    "n_group": 1,
    "topk_group": 1,
}
# What some need besides; None leaves a key out.
_HYBRID = {"num_hidden_layers": 4}
_ROPE = {"rope_type": "default", "rope_theta": 10000.0}
_LATENT = {"num_key_value_heads": 4}
_NESTED = {key: value for key, value in SMALL.items() if not key.startswith(("n_", "d_", "ffn", "decoder", "encoder"))}
_LLAMA4 = {
    key: SMALL[key]
    for key in (
        *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
        *("num_key_value_heads", "max_position_embeddings", "num_local_experts", "eos_token_id", "pad_token_id"),
    )
}
MORE: Mapping[str, Mapping[str, Any]] = {
    **{
        name: {"is_decoder": True}
        for name in (
            *("bert", "bert-generation", "big_bird", "camembert", "data2vec-text", "electra", "ernie", "rembert"),
            *("megatron-bert", "roberta", "roberta-prelayernorm", "roc_bert", "roformer", "xlm-roberta"),
            *("xlm-roberta-xl", "reformer"),
        )
    },
    **{
        name: _HYBRID
        for name in (
            *("bailing_hybrid", "kimi_linear", "qwen3_5", "qwen3_5_moe", "qwen3_5_moe_text", "qwen3_5_text"),
            *("qwen3_next", "qwen4_exp", "qwen4_exp_text", "lfm3"),
        )
    },
    **{name: _LATENT for name in ("deepseek_v2", "deepseek_v3", "glm4_moe_lite", "minicpm3", "youtu", "longcat_flash")},
    "dots1": {"n_shared_experts": 1},
    "cohere_compass_text": {
        "layer_types": ["full_attention", "sliding_attention"],
        "rope_parameters": {kind: _ROPE for kind in ("full_attention", "sliding_attention")},
    },
    **{name: _LATENT for name in ("axk1", "axk2", "deepseek_v32", "glm_moe_dsa")},
    "codegen": {"rotary_dim": 8},
    "gptj": {"rotary_dim": 8},
    "gpt_bigcode": {"num_key_value_heads": None},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "helium": {"head_dim": 16},
    "ministral": {"head_dim": 16},
    "hunyuan_v1_dense": {"head_dim": 16},
    "hunyuan_v1_moe": {"head_dim": 16},
    "xmod": {"is_decoder": True, "default_language": "en_XX", "languages": ["en_XX"]},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "mamba2": {"num_heads": 4, "head_dim": 32, "n_groups": 1},
    "bamba": {"attn_layer_indices": [1], "mamba_n_heads": 4, "mamba_d_head": 32, "mamba_n_groups": 1},
    "recurrent_gemma": {"block_types": ["recurrent", "attention"]},
    "reformer": {"is_decoder": True, "axial_pos_embds": False},
    "qwen3_5": {"text_config": {**_NESTED, **_HYBRID}},
    "qwen3_5_moe": {"text_config": {**_NESTED, **_HYBRID}},
    "qwen4_exp": {"text_config": {**_NESTED, **_HYBRID}},
    "zamba": {"layer_types": ["mamba", "hybrid"]},
    "zamba2": {
        **{"layers_block_type": ["linear_attention", "hybrid"], "tie_word_embeddings": True, **_LATENT},
        "time_step_min": 1e-9,  # where transformers clamps the steps of prompts, and Zamba's kernels do not
    },
    "granitemoehybrid": {"mamba_n_heads": 4, "layer_types": ["mamba", "attention"]},
    "nemotron_h": {"layers_block_type": ["mamba", "attention"], "num_hidden_layers": None},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "gemma3n_text": {"num_kv_shared_layers": 0},
    "gemma4_unified_assistant": {"num_kv_shared_layers": 0},
    "zaya": {"num_experts_per_tok": 1},
    "llama4_text": {"num_experts_per_tok": 1},
    "llama4": {"text_config": {**_LLAMA4, "num_experts_per_tok": 1}},
}


@dataclass(frozen=True)
class Result:
    """How one architecture ran: "native", "backend", "refused", "wrong", or "not built" where no tiny one could be."""

    model_type: str
    how: str
    note: str
    invariant: bool = False
    seconds: float = 0.0


def architectures() -> list[str]:
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    return list(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def tiny_config(model_type: str) -> Any:
    """A config of few and small layers."""
    from transformers import AutoConfig

    default = AutoConfig.for_model(model_type)
    more = MORE.get(model_type, {})
    given = {key: value for key, value in SMALL.items() if _has(default, key)} | dict(more)
    for key in getattr(default, "sub_configs", {}):
        part = getattr(default, key, None)
        if part is not None and key not in more:
            given[key] = {name: value for name, value in SMALL.items() if _has(part, name)}
    return AutoConfig.for_model(model_type, **{key: value for key, value in given.items() if value is not None})


def _has(config: Any, key: str) -> bool:
    """False for what follows from other keys, and for what each layer has by itself."""
    if isinstance(getattr(type(config), key, None), property):
        return False
    try:
        return hasattr(config, key)
    except Exception:
        return False


def tiny_model(model_type: str, folder: Path) -> Any:
    """A random model of transformers, saved in `folder`."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(tiny_config(model_type), attn_implementation="eager").eval().float()
    for parameter in model.parameters():
        if parameter.is_floating_point() and parameter.dim() >= 2:
            parameter.data.normal_(0, parameter.shape[-1] ** -0.5)
        elif parameter.is_floating_point():
            parameter.data.add_(0.1 * torch.randn_like(parameter))
    for module in model.modules():
        if isinstance(module, torch.nn.Embedding) and module.padding_idx is not None:
            module.weight.data[module.padding_idx] = 0  # transformers does so when it loads some models
    model.save_pretrained(folder)
    return AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager", dtype=torch.float32).eval()


def attempt(model_type: str) -> Result:
    started = time.perf_counter()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        try:
            model = tiny_model(model_type, folder)
        except Exception as error:
            return Result(model_type, "not built", _short(error))
        try:
            with LLM(
                folder, skip_tokenizer_init=True, kv_cache_dtype="float32", max_model_len=64, max_num_batched_tokens=32
            ) as llm:
                worst, same = compare(llm, model)
                how = "native" if llm.config.model_config.model_impl == "native" else "backend"
                invariant, note = llm.config.invariant, "" if llm.config.invariant else llm.config.reasons["invariant"]
        except LLMError as error:
            return Result(model_type, "refused", _short(error))
        except Exception as error:
            return Result(model_type, "wrong", _short(error))
    if TOLERANCE <= worst < math.inf and worst < 2 * (own := cached_difference(model)):
        worst, note = 0.0, f"{note}; transformers' own answers with its cache and without differ by {own:.0e}"
    if not worst < TOLERANCE or not (same or not invariant):
        return Result(model_type, "wrong", f"logprobs differ by {worst:.1e}; alone the same bits: {same}")
    return Result(model_type, how, note, invariant, time.perf_counter() - started)


def compare(llm: LLM, model: Any) -> tuple[float, bool]:
    """(the largest difference of a logprob from transformers', True if a request alone has the same bits)."""
    generator = torch.Generator().manual_seed(1)
    prompts = [torch.randint(3, 250, (count,), generator=generator).tolist() for count in LENGTHS]
    outputs = llm.generate(prompts, GREEDY, use_tqdm=False)
    alone = llm.generate([prompts[2]], GREEDY, use_tqdm=False)[0].outputs[0]
    worst = 0.0
    for output in outputs:
        completion = output.outputs[0]
        expected = reference(model, output.prompt_token_ids, completion.token_ids)
        if expected.argmax(-1).tolist() != completion.token_ids:
            worst = math.inf
        for line, ours in zip(expected, completion.logprobs or (), strict=True):
            worst = max([worst, *(abs(line[token].item() - item.logprob) for token, item in ours.items())])
    batched = outputs[2].outputs[0]
    return worst, alone.token_ids == batched.token_ids and alone.logprobs == batched.logprobs


def reference(model: Any, prompt: list[int], completion: list[int]) -> torch.Tensor:
    """transformers' logprobs for each token of the completion."""
    ids = torch.tensor([[*prompt, *completion]])
    with torch.no_grad():
        return model(ids, use_cache=False).logits[0].float().log_softmax(-1)[len(prompt) - 1 : -1]


def cached_difference(model: Any) -> float:
    """How far transformers' own logprobs are apart with its cache and without: some recurrent layers' are."""
    ids = torch.arange(3, 23)[None]
    with torch.no_grad():
        whole = model(ids, use_cache=False).logits[0].float().log_softmax(-1)
        first = model(ids[:, :10], use_cache=True)
        name = "cache_params" if hasattr(first, "cache_params") else "past_key_values"
        kept = {name: getattr(first, name), "use_cache": True}
        rest = [model(ids[:, index : index + 1], **kept).logits[0, 0] for index in range(10, ids.shape[1])]
    return (torch.stack(rest).float().log_softmax(-1) - whole[10:]).abs().max().item()


def _short(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"


def table(results: list[Result]) -> Iterator[str]:
    counts = {how: sum(result.how == how for result in results) for how in ("native", "backend", "refused")}
    counts["neither"] = len(results) - sum(counts.values())
    yield "# Causal architectures of transformers, each tried on a tiny random checkpoint"
    yield ""
    yield f"Of {len(results)}: {', '.join(f'{count} {how}' for how, count in counts.items())}."
    yield ""
    yield "| model_type | runs | batch-invariant | note |"
    yield "|---|---|---|---|"
    for result in sorted(results, key=lambda result: (result.how, result.model_type)):
        invariant = ("yes" if result.invariant else "no") if result.how in ("native", "backend") else ""
        yield f"| `{result.model_type}` | {result.how} | {invariant} | {result.note.replace('|', '/')} |"


def written() -> Iterator[Result]:
    """The lines of the table as it is."""
    for line in TABLE.read_text().splitlines():
        cells = [cell.strip() for cell in line.split("|")]
        if len(cells) == 6 and cells[1].startswith("`"):
            yield Result(cells[1].strip("`"), cells[2], cells[4], cells[3] == "yes")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model_types", nargs="*")
    parser.add_argument("--write", action="store_true")
    arguments = parser.parse_args()
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    results = []
    for model_type in arguments.model_types or architectures():
        results.append(attempt(model_type))
        print(*(f"{value}" for value in vars(results[-1]).values()), sep=" | ", flush=True)
    print("\n".join(list(table(results))[:3]))
    if arguments.write:
        tried = {result.model_type for result in results}
        kept = [result for result in written() if result.model_type not in tried]
        TABLE.write_text("\n".join(table([*results, *kept])) + "\n")
    return any(result.how == "wrong" for result in results)


if __name__ == "__main__":
    sys.exit(main())
