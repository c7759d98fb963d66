"""The chat template applied by hand, compared with what LLM.chat does."""

import os

from llm import LLM, SamplingParams, TokensPrompt

model = {"model": os.environ["MODEL"]} if "MODEL" in os.environ else {}
llm = LLM(**model)
tokenizer = llm.get_tokenizer()

questions = ["Who was Abraham?", "What did the prophet see?"]
conversations = [[{"role": "user", "content": question}] for question in questions]
texts = [
    tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True) for messages in conversations
]
# The template writes the special tokens itself, so the tokenizer must not add them again.
prompts = [TokensPrompt(prompt_token_ids=tokenizer.encode(text, add_special_tokens=False)) for text in texts]

sampling_params = SamplingParams(temperature=0.0, max_tokens=16)
by_hand = llm.generate(prompts, sampling_params)
by_chat = llm.chat(conversations, sampling_params)
for text, one, other in zip(texts, by_hand, by_chat, strict=True):
    print(f"Prompt: {text!r}, Generated text: {one.outputs[0].text!r}")
    print("same prompt as LLM.chat:", one.prompt_token_ids == other.prompt_token_ids)
    print("same answer as LLM.chat:", one.outputs[0].token_ids == other.outputs[0].token_ids)
