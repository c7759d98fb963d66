"""Adapters written and computed by PEFT, and by an `LLM`: logprobs within 1e-4 and the same greedy tokens.

`pip install peft accelerate`, then `python tests/loading/peft_adapters.py [folder]`. Not part of the suite: PEFT takes
seconds to import. Prints one line for each adapter: the largest difference of a logprob.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from tiny_models import TINY_MODELS, TinyModel, make_prompts, reference_model, write_checkpoint
from transformers import AutoModelForCausalLM

from llm import LLM, SamplingParams
from llm.inputs import LoRARequest

LINEAR = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
MODELS = {
    "llama": TinyModel("LlamaConfig", {"num_hidden_layers": 2}),
    "qwen2-tied": TinyModel("Qwen2Config", {"num_hidden_layers": 2, "tie_word_embeddings": True, "head_dim": None}),
    "gemma": TinyModel("GemmaConfig", {"num_hidden_layers": 2, "tie_word_embeddings": True}),
    "phi3": TinyModel("Phi3Config", {"num_hidden_layers": 2, "head_dim": None}),
    "gpt2": TinyModel(
        "GPT2Config",
        {
            **dict.fromkeys(("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")),
            **dict.fromkeys(("num_key_value_heads", "head_dim", "max_position_embeddings", "rms_norm_eps")),
            **{"n_embd": 48, "n_layer": 2, "n_head": 4, "n_positions": 128, "tie_word_embeddings": True},
        },
    ),
    **{name: TINY_MODELS[name] for name in ("mixtral", "olmoe", "gpt-oss", "qwen3-next")},
}
STACKED = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
# (name, model, arguments of LoraConfig, how it is used)
ADAPTERS: list[tuple[str, str, dict[str, Any], str]] = [
    ("all-linear", "llama", {"r": 8, "lora_alpha": 16, "target_modules": "all-linear"}, "row merge"),
    ("regex", "llama", {"r": 4, "target_modules": r".*layers\.1\..*_proj"}, "row merge"),
    ("rslora", "llama", {"r": 16, "lora_alpha": 8, "target_modules": LINEAR, "use_rslora": True}, "row merge"),
    (
        "patterns",
        "llama",
        {
            "r": 4,
            "target_modules": LINEAR,
            "rank_pattern": {"q_proj": 7, r"layers\.0\.mlp\.up_proj": 2},
            "alpha_pattern": {"down_proj": 3, "^model.layers.1.self_attn.k_proj": 40},
        },
        "row merge",
    ),
    ("embedding and head", "llama", {"r": 4, "target_modules": ["embed_tokens", "lm_head", "v_proj"]}, "row merge"),
    ("lora_bias", "llama", {"r": 4, "target_modules": ["q_proj", "o_proj"], "lora_bias": True}, "row"),
    ("dora", "llama", {"r": 4, "target_modules": LINEAR, "use_dora": True}, "merge"),
    ("modules_to_save", "llama", {"r": 4, "target_modules": ["q_proj"], "modules_to_save": ["lm_head"]}, "merge"),
    ("bias of layers", "qwen2-tied", {"r": 4, "target_modules": ["q_proj", "v_proj"], "bias": "lora_only"}, "merge"),
    ("tied embedding", "qwen2-tied", {"r": 4, "target_modules": ["embed_tokens", "k_proj"]}, "row"),
    ("scaled embedding", "gemma", {"r": 4, "target_modules": ["embed_tokens", "up_proj"]}, "row"),
    ("fused", "phi3", {"r": 4, "target_modules": ["qkv_proj", "gate_up_proj", "o_proj", "down_proj"]}, "row merge"),
    ("conv1d", "gpt2", {"r": 4, "target_modules": ["c_attn", "c_proj", "c_fc"], "fan_in_fan_out": True}, "row merge"),
    ("experts", "mixtral", {"r": 3, "target_modules": ["q_proj"], "target_parameters": STACKED}, "row merge"),
    ("experts by module", "mixtral", {"r": 3, "target_modules": ["w1", "w2", "w3", "o_proj"]}, "row merge"),
    ("experts' down", "olmoe", {"r": 2, "target_modules": [], "target_parameters": STACKED[1:]}, "row merge"),
    ("experts, turned", "gpt-oss", {"r": 3, "target_modules": [], "target_parameters": STACKED}, "row merge"),
    ("experts, hybrid", "qwen3-next", {"r": 3, "target_modules": [], "target_parameters": STACKED}, "row merge"),
    ("parameter", "llama", {"r": 3, "target_modules": [], "target_parameters": ["o_proj.weight"]}, "row merge"),
    ("gaussian start", "llama", {"r": 4, "target_modules": ["q_proj"], "init_lora_weights": "gaussian"}, "row merge"),
]
PARAMS = SamplingParams(temperature=0.0, max_tokens=8, logprobs=0, ignore_eos=True)


@torch.no_grad()
def write(folder: Path, base: Path, arguments: dict[str, Any]) -> None:
    """PEFT's own file, with matrices that are all drawn: of its start one is 0."""
    model = get_peft_model(
        AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32), LoraConfig(task_type="CAUSAL_LM", **arguments)
    )
    generator = torch.Generator().manual_seed(len(str(arguments)))
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            noise = torch.randn(parameter.shape, generator=generator)
            if "magnitude" in name:
                parameter *= 1 + 0.2 * noise
            elif parameter.dim() == 1:
                parameter += 0.1 * noise
            else:
                parameter.copy_(noise / parameter.shape[1] ** 0.5)
    model.save_pretrained(folder)


@torch.no_grad()
def worst(model: Any, prompts: list[list[int]], outputs: Any) -> float:
    """The largest difference of a logprob; infinite where a token is not PEFT's greedy one."""
    found = 0.0
    for prompt, output in zip(prompts, outputs, strict=True):
        own = output.outputs[0]
        tokens = torch.tensor(own.token_ids)
        logits = model(torch.tensor([[*prompt, *own.token_ids]])).logits[0, len(prompt) - 1 : -1].float()
        logprobs = logits.log_softmax(-1)
        if not torch.equal(logprobs.argmax(-1), tokens):
            return float("inf")
        told = torch.tensor([item[t].logprob for item, t in zip(own.logprobs, own.token_ids, strict=True)])
        found = max(found, float((logprobs.gather(1, tokens[:, None])[:, 0] - told).abs().max()))
    return found


def main(root: Path) -> int:
    failed = 0
    torch.set_num_threads(1)
    for row, config in MODELS.items():
        write_checkpoint(config, root / row)
    for name, row, arguments, ways in ADAPTERS:
        base, folder = root / row, root / name.replace(" ", "-")
        write(folder, base, arguments)
        prompts = make_prompts(MODELS[row])[1:4]
        oracle = PeftModel.from_pretrained(reference_model.__wrapped__(base), folder).eval()
        plain = reference_model(base)
        for way in ways.split():
            own: dict[str, Any] = {"merge_lora": folder} if way == "merge" else {"enable_lora": True}
            request = None if way == "merge" else LoRARequest(name, 1, str(folder))
            with LLM(base, skip_tokenizer_init=True, **own) as llm:
                outputs = llm.generate(prompts, PARAMS, lora_request=request, use_tqdm=False)
            difference, control = worst(oracle, prompts, outputs), worst(plain, prompts, outputs)
            is_good = difference <= 1e-4 < control
            failed += not is_good
            print(
                f"{name:<20}{row:<12}{way:<7}{difference:.1e}  without the adapter {control:.1e}  {is_good}", flush=True
            )
    return failed


if __name__ == "__main__":
    if len(sys.argv) > 1:
        sys.exit(main(Path(sys.argv[1])))
    with tempfile.TemporaryDirectory() as made:
        sys.exit(main(Path(made)))
