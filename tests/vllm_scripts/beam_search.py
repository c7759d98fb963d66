"""Beam search: several likely continuations of each prompt, the best first."""

import os

from llm import LLM
from llm.sampling_params import BeamSearchParams

model = {"model": os.environ["MODEL"]} if "MODEL" in os.environ else {}
llm = LLM(**model)

prompts = [{"prompt": "And Moses said unto"}, {"prompt": "In the beginning God"}]
params = BeamSearchParams(beam_width=3, max_tokens=8)

for output in llm.beam_search(prompts, params):
    for sequence in output.sequences:
        print(f"{sequence.cum_logprob:.3f} {len(sequence.tokens)} tokens: {sequence.text!r}")
