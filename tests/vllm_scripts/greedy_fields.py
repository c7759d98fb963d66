"""Greedy decoding, forwards and backwards, and every field of what comes back."""

import os

from llm import LLM, SamplingParams
from llm.outputs import CompletionOutput, RequestOutput
from llm.sampling_params import RequestOutputKind

REQUEST_FIELDS = ["request_id", "prompt", "prompt_token_ids", "prompt_logprobs", "finished", "metrics"]
COMPLETION_FIELDS = ["index", "text", "token_ids", "cumulative_logprob", "logprobs", "finish_reason", "stop_reason"]


def show(output: RequestOutput) -> None:
    for name in [*REQUEST_FIELDS, "num_cached_tokens"]:
        print(f"{name}: {getattr(output, name)!r}")
    completion: CompletionOutput
    for completion in output.outputs:
        for name in COMPLETION_FIELDS:
            print(f"  {name}: {getattr(completion, name)!r}")
        print(f"  finished(): {completion.finished()}")


def main() -> None:
    model = {"model": os.environ["MODEL"]} if "MODEL" in os.environ else {}
    llm = LLM(**model)
    prompts = ["In the beginning", "And Jesus answered", "The son of David, king in Jerusalem, said unto"]
    params = SamplingParams(temperature=0.0, max_tokens=10, output_kind=RequestOutputKind.FINAL_ONLY)
    forwards = llm.generate(prompts, params, use_tqdm=False)
    backwards = llm.generate(prompts[::-1], params, use_tqdm=False)
    for output in forwards:
        show(output)
    pairs = list(zip(forwards, reversed(backwards), strict=True))
    print("deterministic:", all(a.outputs[0].token_ids == b.outputs[0].token_ids for a, b in pairs))


if __name__ == "__main__":
    main()
