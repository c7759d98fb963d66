"""Automatic prefix caching: prompts that share a long prefix, in two passes."""

import os

from llm import LLM, SamplingParams

prefix = (
    "The LORD is my shepherd; I shall not want. He maketh me to lie down in green pastures: he leadeth me beside the "
    "still waters. He restoreth my soul: he leadeth me in the paths of righteousness for his name's sake. Yea, though "
    "I walk through the valley of the shadow of death, I will fear no evil: for thou art with me; thy rod and thy "
    "staff they comfort me. Thou preparest a table before me in the presence of mine enemies: thou anointest my head "
    "with oil; my cup runneth over. Surely goodness and mercy shall follow me all the days of my life: and I will "
    "dwell in the house of the LORD for ever. "
)
prompts = [prefix + ending for ending in ["And the king said,", "Hear, O Israel:", "In those days", "My son,"]]
sampling_params = SamplingParams(temperature=0.0, max_tokens=12)


def main():
    model = {"model": os.environ["MODEL"]} if "MODEL" in os.environ else {}
    llm = LLM(**model, enable_prefix_caching=True, gpu_memory_utilization=0.4)
    regular = llm.generate(prompts, sampling_params)
    cached = llm.generate(prompts, sampling_params)

    for output in cached:
        print(f"{output.num_cached_tokens} of {len(output.prompt_token_ids)} prompt tokens were cached")
        print(f"Prompt: {output.prompt[len(prefix) :]!r}, Generated text: {output.outputs[0].text!r}")
    same = all(a.outputs[0].text == b.outputs[0].text for a, b in zip(regular, cached, strict=True))
    print(f"Generated answers are the same: {same}")


if __name__ == "__main__":
    main()
