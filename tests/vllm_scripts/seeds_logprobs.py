"""Several samples per prompt, reproducible by seed, with their log-probabilities."""

import os

from llm import LLM, SamplingParams

model = {"model": os.environ["MODEL"]} if "MODEL" in os.environ else {}
llm = LLM(**model, seed=42, max_logprobs=10)
sampling_params = SamplingParams(n=3, temperature=1.0, seed=1234, max_tokens=10, logprobs=2)

first = llm.generate("And God said,", sampling_params)[0]
again = llm.generate("And God said,", sampling_params)[0]
print("repeatable:", [c.token_ids for c in first.outputs] == [c.token_ids for c in again.outputs])
print("different samples:", len({tuple(c.token_ids) for c in first.outputs}))

for completion in sorted(first.outputs, key=lambda c: c.cumulative_logprob, reverse=True):
    chosen = [
        position[token].logprob for position, token in zip(completion.logprobs, completion.token_ids, strict=True)
    ]
    print(f"sample {completion.index}: {completion.text!r}")
    print(f"  cumulative logprob {completion.cumulative_logprob:.4f} = sum {sum(chosen):.4f}")
    for token, logprob in completion.logprobs[0].items():
        print(f"  token {token} {logprob.decoded_token!r} rank {logprob.rank}: {logprob.logprob:.4f}")
