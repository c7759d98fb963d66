"""LangChain's and LiteLLM's OpenAI classes against the endpoint. `python tests/serve/clients.py`

Needs `pip install langchain-openai litellm`. What they get is compared with the library's answers.
"""

from __future__ import annotations

import asyncio
import functools
import operator
import os
import sys
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).parents[1])]

from embedded import open_llm, run  # noqa: E402
from pydantic import BaseModel, Field  # noqa: E402

import llm as package  # noqa: E402
from llm import LLM, SamplingParams  # noqa: E402

PROMPT, ASK = "In the beginning", [{"role": "user", "content": "Who was the king?"}]
SENT: dict[str, Any] = {"temperature": 0, "max_tokens": 24}


class King(BaseModel):
    """A king."""

    name: str = Field(max_length=8)
    years: int


def langchain(llm: LLM, url: str) -> None:
    from langchain_openai import ChatOpenAI, OpenAI, OpenAIEmbeddings

    given: Any = {"base_url": f"{url}/v1", "api_key": "none", "model": "tiny", **SENT}
    chat, plain = ChatOpenAI(**given), OpenAI(**given)
    text = llm.chat(ASK, SamplingParams(**SENT), use_tqdm=False)[0].outputs[0].text
    assert chat.invoke(ASK[0]["content"]).content == text
    assert "".join(str(part.content) for part in chat.stream(ASK[0]["content"])) == text
    assert asyncio.run(chat.ainvoke(ASK[0]["content"])).content == text
    completed = run(llm, PROMPT, SamplingParams(**SENT))[0].outputs[0].text
    assert plain.invoke(PROMPT) == completed == "".join(plain.stream(PROMPT))
    assert [own.content for own in chat.batch([ASK[0]["content"]] * 3)] == [text] * 3
    longer = ChatOpenAI(**{**given, "max_tokens": 100})
    for method in ("json_schema", "function_calling"):
        assert isinstance(longer.with_structured_output(King, method=method).invoke("Who?"), King)
    bound = longer.bind_tools([King], tool_choice="any")
    (call,) = bound.invoke("Who?").tool_calls
    assert call["name"] == "King" and King(**call["args"])
    pieces = list(bound.stream("Who?"))
    (streamed,) = functools.reduce(operator.add, pieces).tool_calls
    assert streamed["args"] == call["args"] and len(pieces) > 3
    with open_llm(runner="pooling", convert="embed", max_model_len=64) as own, package.serve(own, port=0) as at:
        embedder = OpenAIEmbeddings(base_url=f"{at}/v1", api_key="none", model="tiny", check_embedding_ctx_length=False)
        texts = ["And", "the king"]
        assert embedder.embed_documents(texts) == own.embed(texts, use_tqdm=False).to_numpy().tolist()


def litellm(llm: LLM, url: str) -> None:
    os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # it would ask a server
    import litellm as package

    text = llm.chat(ASK, SamplingParams(**SENT), use_tqdm=False)[0].outputs[0].text
    for provider in ("openai", "hosted_vllm"):
        given: Any = {"model": f"{provider}/tiny", "api_base": f"{url}/v1", "api_key": "none", "messages": ASK, **SENT}
        assert package.completion(**given).choices[0].message.content == text
        parts = package.completion(**given, stream=True)
        assert "".join(part.choices[0].delta.content or "" for part in parts) == text
        assert asyncio.run(package.acompletion(**given)).choices[0].message.content == text
        longer = {**given, "max_tokens": 100}
        assert King.model_validate_json(package.completion(**longer, response_format=King).choices[0].message.content)
        tool = {"type": "function", "function": {"name": "King", "parameters": King.model_json_schema()}}
        (call,) = package.completion(**longer, tools=[tool], tool_choice="required").choices[0].message.tool_calls
        assert King.model_validate_json(call.function.arguments)
    given = {"model": "text-completion-openai/tiny", "api_base": f"{url}/v1", "api_key": "none", **SENT}
    completed = run(llm, PROMPT, SamplingParams(**SENT))[0].outputs[0].text
    assert package.text_completion(prompt=PROMPT, **given).choices[0].text == completed


if __name__ == "__main__":
    with open_llm(max_model_len=512) as llm, package.serve(llm, port=0) as url:
        for client in (langchain, litellm):
            client(llm, url)
            print(f"{client.__name__}: equal")
