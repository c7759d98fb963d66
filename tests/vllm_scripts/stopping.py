"""What ends a completion: stop strings, stop tokens, min_tokens, ignore_eos."""

import os

from llm import LLM, SamplingParams

PROMPT = "In the beginning God created"


def main():
    model = {"model": os.environ["MODEL"]} if "MODEL" in os.environ else {}
    llm = LLM(**model)

    def run(label, **settings):
        sampling_params = SamplingParams(temperature=0.0, max_tokens=24, **settings)
        completion = llm.generate(PROMPT, sampling_params, use_tqdm=False)[0].outputs[0]
        print(
            f"{label}: {len(completion.token_ids)} tokens, finish_reason={completion.finish_reason}, "
            f"stop_reason={completion.stop_reason!r}, text={completion.text!r}"
        )
        return completion

    full = run("ignore_eos", ignore_eos=True)
    word = full.text.split()[2]
    run("stop", stop=[word, "</answer>"])
    run("stop, kept", stop=word, include_stop_str_in_output=True)
    token = full.token_ids[4]
    run("stop_token_ids", stop_token_ids=[token])
    run("min_tokens", stop_token_ids=[token], min_tokens=16, ignore_eos=True, skip_special_tokens=False)


if __name__ == "__main__":
    main()
