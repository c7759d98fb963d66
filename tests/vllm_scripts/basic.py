"""Offline inference on a few prompts."""

import os

from llm import LLM, SamplingParams

prompts = [
    "In the beginning",
    "The LORD is my shepherd;",
    "And it came to pass",
    "Blessed are",
]
sampling_params = SamplingParams(temperature=0.8, top_p=0.95, max_tokens=16)


def main():
    model = {"model": os.environ["MODEL"]} if "MODEL" in os.environ else {}
    llm = LLM(**model)
    outputs = llm.generate(prompts, sampling_params)
    print("\nGenerated outputs:\n" + "-" * 60)
    for output in outputs:
        prompt = output.prompt
        generated_text = output.outputs[0].text
        print(f"Prompt:    {prompt!r}")
        print(f"Output:    {generated_text!r}")
        print("-" * 60)


if __name__ == "__main__":
    main()
