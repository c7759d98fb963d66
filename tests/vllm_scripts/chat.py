"""Chat: one conversation, then several in one batch."""

import os

from llm import LLM, SamplingParams

model = {"model": os.environ["MODEL"]} if "MODEL" in os.environ else {}
llm = LLM(**model)
sampling_params = SamplingParams(temperature=0.5, seed=0, max_tokens=16)


def print_outputs(outputs):
    for output in outputs:
        print(f"Generated text: {output.outputs[0].text!r}")
    print("=" * 60)


conversation = [
    {"role": "system", "content": "You are a helpful assistant"},
    {"role": "user", "content": "Hello"},
    {"role": "assistant", "content": "Hello! How can I assist you today?"},
    {"role": "user", "content": "Tell me of the creation of the world."},
]
outputs = llm.chat(conversation, sampling_params, use_tqdm=False)
print_outputs(outputs)

questions = ["Who was Moses?", "Who built the ark?", "Where was David born?"]
system = {"role": "system", "content": "Answer in one sentence."}
conversations = [[system, {"role": "user", "content": question}] for question in questions]
outputs = llm.chat(messages=conversations, sampling_params=sampling_params, use_tqdm=True)
print_outputs(outputs)
