"""A second opinion: TransformerLens' hooks have, of a model that it knows, what their sites here have.

It brings much with it, so it is no dependency of the tests: `pip install transformer-lens` in an environment beside.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from sites import TOLERANCE
from tiny_models import TINY_MODELS, make_prompts, one_thread, reference_model, tiny_checkpoint

from llm import LLM, Capture, SamplingParams
from llm.inside.names import canonical

bridge = pytest.importorskip("transformer_lens.model_bridge", reason="TransformerLens is not installed")

HOOKS = """
    hook_resid_pre hook_resid_post hook_attn_out hook_mlp_out attn.hook_v attn.hook_z attn.hook_pattern mlp.hook_post
""".split()
# Queries and keys, which TransformerLens has before the rotary embedding too, under names that are not understood.
QUERIES = {
    "gpt2": {"attn.hook_q": "attention.query", "attn.hook_k": "attention.key"},
    "llama": {"attn.hook_rot_q": "attention.query", "attn.hook_rot_k": "attention.key"},
}


def tokenizer(folder: Path) -> object:
    """It is not used, but TransformerLens reads it again from where it came."""
    from tokenizers import Tokenizer, models
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({f"t{index}": index for index in range(257)}, unk_token="t0"))
    made = PreTrainedTokenizerFast(tokenizer_object=words, bos_token="t1", eos_token="t2", pad_token="t0")
    made.save_pretrained(folder)
    return AutoTokenizer.from_pretrained(folder)


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_hooks_are_their_sites(name: str, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    row, folder = TINY_MODELS[name], tiny_checkpoint(name, tmp_path_factory)
    prompt = make_prompts(row)[3]
    theirs = bridge.TransformerBridge.boot_transformers(
        str(folder), hf_model=reference_model.__wrapped__(folder), tokenizer=tokenizer(tmp_path), device="cpu"
    )
    with torch.no_grad():
        logits, cache = theirs.run_with_cache(torch.tensor([prompt]))
    one = SamplingParams(temperature=0, max_tokens=1)
    with one_thread(), LLM(folder, skip_tokenizer_init=True, kv_cache_dtype="float32", **row.engine) as llm:
        capture = Capture(["layers.*.*", "layers.*.attention.*", "layers.*.mlp.*", "logits"], "prompt")
        (output,) = llm.generate([prompt], one, capture=capture, use_tqdm=False)
    for layer in range(len(theirs.blocks)):
        names = {hook: canonical(f"blocks.{layer}.{hook}") for hook in HOOKS}
        names |= {hook: f"layers.{layer}.{site}" for hook, site in QUERIES[name].items()}
        for hook, site in names.items():
            found, ours = f"blocks.{layer}.{hook}", output.activations[site]
            expected = cache[found][0].float().numpy()
            if hook == "attn.hook_pattern":  # heads first
                expected = expected.transpose(1, 0, 2)
            assert np.abs(ours - expected.reshape(ours.shape)).max() < TOLERANCE, found
    assert np.abs(output.activations["logits"] - logits[0].numpy()).max() < TOLERANCE
