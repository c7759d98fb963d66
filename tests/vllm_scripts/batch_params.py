"""One batch in which every prompt has its own sampling parameters."""

import os

from llm import LLM, SamplingParams

model = {"model": os.environ["MODEL"]} if "MODEL" in os.environ else {}
llm = LLM(**model, max_num_seqs=4)

requests = [
    ("In the beginning", SamplingParams(temperature=0.0, max_tokens=8)),
    ("And God said,", SamplingParams(temperature=0.7, top_p=0.9, seed=1, max_tokens=12)),
    ("The words of", SamplingParams(temperature=1.0, top_k=20, seed=2, max_tokens=16)),
    ("My son,", SamplingParams(temperature=1.2, min_p=0.1, seed=3, max_tokens=20)),
    ("Praise ye", SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)),
]
prompts = [prompt for prompt, _ in requests]
params = [sampling_params for _, sampling_params in requests]

outputs = llm.generate(prompts, params, use_tqdm=False)
for output, sampling_params in zip(outputs, params, strict=True):
    completion = output.outputs[0]
    print(
        f"{len(completion.token_ids)} of {sampling_params.max_tokens} tokens: {output.prompt!r} -> {completion.text!r}"
    )
