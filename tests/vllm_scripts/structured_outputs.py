"""Structured output: a choice, a regular expression and a JSON schema."""

import os

from llm import LLM, SamplingParams
from llm.sampling_params import StructuredOutputsParams

model = {"model": os.environ["MODEL"]} if "MODEL" in os.environ else {}
llm = LLM(**model)

schema = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
kinds = {
    "choice": StructuredOutputsParams(choice=["good", "evil"]),
    "regex": StructuredOutputsParams(regex="[a-z]+@[a-z]+[.]com"),
    "json": StructuredOutputsParams(json=schema),
}
for name, kind in kinds.items():
    params = SamplingParams(structured_outputs=kind, max_tokens=60, temperature=0.7, seed=3)
    print(f"{name}: {llm.generate('And he said', params)[0].outputs[0].text}")
