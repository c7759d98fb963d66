"""Prompts as token ids, in each form that generate takes."""

import os

from llm import LLM, SamplingParams, TokensPrompt
from llm.inputs import TextPrompt


def main():
    model = {"model": os.environ["MODEL"]} if "MODEL" in os.environ else {}
    llm = LLM(**model)
    tokenizer = llm.get_tokenizer()
    text = "In the beginning God created"
    token_ids = tokenizer.encode(text)

    sampling_params = SamplingParams(temperature=0.0, max_tokens=12)
    outputs = llm.generate(
        [text, TextPrompt(prompt=text), {"prompt_token_ids": token_ids}, TokensPrompt(prompt_token_ids=token_ids)],
        sampling_params,
    )
    outputs += llm.generate(token_ids, sampling_params)  # a list of ids is one prompt
    for output in outputs:
        print(f"{output.prompt!r} {output.prompt_token_ids} -> {output.outputs[0].token_ids}")
    print("all the same:", len({tuple(output.outputs[0].token_ids) for output in outputs}) == 1)

    no_text = SamplingParams(temperature=0.0, max_tokens=12, detokenize=False)
    completion = llm.generate({"prompt_token_ids": token_ids}, no_text)[0].outputs[0]
    print(f"text: {completion.text!r}, decoded: {tokenizer.decode(completion.token_ids)!r}")


if __name__ == "__main__":
    main()
