"""Classes, scores and vectors of prompts with pictures: transformers' numbers, and the bits of each prompt alone."""

from __future__ import annotations

import inspect
import json
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import images
import numpy as np
import pytest
import torch
from same_answers import same_values
from starlette.testclient import TestClient

from llm import LLM, AsyncLLM
from llm.errors import ValidationError
from llm.tools.serve.app import Endpoint

pytest.importorskip("PIL")
sys.path.insert(0, str(Path(__file__).parents[1] / "serve"))
from test_serve_images import image_part

PICTURE, OTHER = images.PICTURES[:2]
VIDEO, TIMING = images.VIDEOS[0]
RERANKER = {
    "architectures": ["Qwen3VLForSequenceClassification"],
    "classifier_from_token": ["n", "y"],
    "is_original_qwen3_reranker": True,
}
SYSTEM = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct "
    'provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n'
)
INSTRUCTION = "Given a search query, retrieve relevant candidates that answer the query."


def theirs(llm: LLM, model: Any, prompt: Mapping[str, Any], output: Any) -> torch.Tensor:
    """transformers' logits of a prompt."""
    inputs = images.theirs(llm, prompt, SimpleNamespace(prompt_token_ids=output.prompt_token_ids, outputs=None))
    taken = inspect.signature(model.forward).parameters
    with torch.inference_mode():
        logits: torch.Tensor = model(**{key: value for key, value in inputs.items() if key in taken}).logits[0]
    return logits


@pytest.mark.parametrize(
    ("name", "architecture"),
    [("gemma3", "Gemma3ForSequenceClassification"), ("qwen3_5", "Qwen3_5ForSequenceClassification")],
)
def test_classes_are_those_of_transformers(name: str, architecture: str, tmp_path: Path) -> None:
    model = images.write_classifier(name, tmp_path, architecture, 3)
    prompts = images.asked(name)
    with LLM(tmp_path, use_tqdm_on_load=False, max_num_batched_tokens=64) as llm:
        outputs = llm.classify(prompts, use_tqdm=False)
        for prompt, output in zip(prompts, outputs, strict=True):
            expected = theirs(llm, model, prompt, output).softmax(-1).numpy()
            assert np.abs(np.array(output.outputs.probs) - expected).max() < 1e-5
            assert same_values(llm.classify(prompt, use_tqdm=False)[0].outputs.probs, output.outputs.probs)
        assert outputs[1].outputs.probs != outputs[0].outputs.probs


@pytest.fixture(scope="module")
def reranker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[LLM, Any]]:
    folder = tmp_path_factory.mktemp("reranker")
    model = images.write("qwen3_vl", folder)
    with LLM(folder, use_tqdm_on_load=False, hf_overrides=RERANKER, max_num_batched_tokens=64) as llm:
        yield llm, model


def content(*parts: Any) -> dict[str, Any]:
    listed = [{"type": "text", "text": part} if isinstance(part, str) else part for part in parts]
    return {"content": listed}


def pil(image: Any) -> dict[str, Any]:
    return {"type": "image_pil", "image_pil": image}


DOCUMENTS = [
    "a text",
    content(pil(PICTURE)),
    content("below", pil(PICTURE), pil(OTHER), "last"),
    content({"type": "video", "video": VIDEO, "metadata": TIMING}),
]


def test_a_reranker_reads_pictures_and_videos(reranker: tuple[LLM, Any]) -> None:
    """The published text, with vLLM's order of a document's parts; the probability of yes against no."""
    llm, model = reranker
    outputs = llm.score("what", DOCUMENTS, use_tqdm=False)
    mark, movie = images.wrapped("qwen3_vl"), images.video_mark("qwen3_vl")
    shown = ["a text", mark, f"{mark}\n{mark}\nbelow\nlast", movie]
    data: list[Any] = [{"image": []}, {"image": [PICTURE]}, {"image": [PICTURE, OTHER]}]
    data.append({"image": [], "video": [(VIDEO, TIMING)]})
    no, yes = (llm._preprocessor.images.processor.ids(letter)[0] for letter in "ny")
    for text, own, output in zip(shown, data, outputs, strict=True):
        asked = f"<Instruct>: {INSTRUCTION}<Query>:what\n<Document>:{text}<|im_end|>\n<|im_start|>assistant\n"
        logits = theirs(llm, model, {"prompt": SYSTEM + asked, "multi_modal_data": own}, output)[-1]
        assert output.outputs.score == pytest.approx(float((logits[yes] - logits[no]).sigmoid()), abs=1e-5)
    alone = [llm.score("what", document, use_tqdm=False)[0].outputs.score for document in DOCUMENTS]
    assert same_values(alone, outputs.to_numpy()) and len(set(alone)) == len(alone)
    ranked = llm.rerank("what", DOCUMENTS, top_n=2, use_tqdm=False)
    best = sorted(range(len(alone)), key=lambda place: -alone[place])[:2]
    assert [(one.index, one.document) for one in ranked] == [(place, DOCUMENTS[place]) for place in best]
    pictured = llm.score(content(pil(PICTURE), "what"), DOCUMENTS[:2], instruction="else", use_tqdm=False)
    assert pictured.to_numpy().tolist() != alone[:2]


def test_a_template_asks_in_words(reranker: tuple[LLM, Any]) -> None:
    """vLLM's of this model has the scores of the text that is built in."""
    llm, _ = reranker

    def of(role: str) -> str:
        return f"messages | selectattr('role', 'eq', '{role}') | map(attribute='content') | first"

    said = f"<Instruct>: {{{{ {of('system')} | default('{INSTRUCTION}') }}}}<Query>:{{{{ {of('query')} }}}}"
    template = f"{SYSTEM}{said}\n<Document>:{{{{ {of('document')} }}}}<|im_end|>\n<|im_start|>assistant\n\n"
    for instruction in (None, "else"):
        expected = llm.score("what", DOCUMENTS, instruction=instruction, use_tqdm=False)
        found = llm.score("what", DOCUMENTS, instruction=instruction, chat_template=template, use_tqdm=False)
        assert same_values(found.to_numpy(), expected.to_numpy())
    other = llm.rerank("what", DOCUMENTS, chat_template=template.replace("<Query>", "<Q>"), use_tqdm=False)
    scores = {one.index: one.relevance_score for one in other}
    assert [scores[place] for place in range(len(DOCUMENTS))] != expected.to_numpy().tolist()


@pytest.mark.parametrize(
    ("document", "said"),
    [
        ({"content": []}, "'content' must be a list of parts"),
        ({"content": [{"type": "input_audio"}]}, "'input_audio' is not read"),
        ({"content": [{"type": "tool"}]}, "must be a text, an image or a video, got one of type 'tool'"),
        ({"content": [pil("no")]}, "names no folder for such files"),
        ({"content": ["a"], "metadata": 1}, "without other keys"),
        ({"content": [{"type": "text", "text": "<|image_pad|>"}, pil(PICTURE)]}, "has 2 of the placeholder"),
        (5, "a text or a list of texts"),
    ],
)
def test_a_mistake_is_one_sentence(reranker: tuple[LLM, Any], document: object, said: str) -> None:
    with pytest.raises(ValidationError, match=said) as caught:
        reranker[0].score("what", [document], use_tqdm=False)
    assert "\n" not in str(caught.value)


def test_a_classifier_of_pairs_of_texts_says_what_reads_pictures(tmp_path: Path) -> None:
    images.write_classifier("gemma3", tmp_path, "Gemma3ForSequenceClassification", 1)
    with LLM(tmp_path, use_tqdm_on_load=False) as llm:
        with pytest.raises(ValidationError, match="of others with chat_template; or call classify with whole prompts"):
            llm.score("what", content(pil(PICTURE)), use_tqdm=False)
        (joined,) = llm.score("what", content("a", "b"), use_tqdm=False)
        assert same_values([joined.outputs.score], [llm.score("what", "a\nb", use_tqdm=False)[0].outputs.score])
        mark, template = images.wrapped("gemma3"), "{{ messages[0].content }}|{{ messages[1].content }}"
        found = llm.score("what", content(pil(PICTURE)), chat_template=template, use_tqdm=False)
        prompt = {"prompt": f"what|{mark}", "multi_modal_data": {"image": PICTURE}}
        whole = llm.classify(prompt, tokenization_kwargs={"add_special_tokens": False}, use_tqdm=False)
        assert same_values([found[0].outputs.score], [whole[0].outputs.probs[0]])
        assert 0 < llm.classify(images.asked("gemma3")[1], use_tqdm=False)[0].outputs.probs[0] < 1


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_rerankers_over_http_and_in_jobs(reranker: tuple[LLM, Any], tmp_path: Path) -> None:
    """/rerank, /score and rows of a batch give the scores of `LLM.score`."""
    llm, _ = reranker
    pictures = [content(image_part(PICTURE)), "a text", content(image_part(OTHER), "below")]
    expected = llm.score("what", pictures, use_tqdm=False).to_numpy().tolist()
    app = Endpoint(AsyncLLM(llm), names=("tiny",)).app()
    rows = [
        {"custom_id": str(place), "method": "POST", "url": "/score", "body": {"text_1": "what", "text_2": own}}
        for place, own in enumerate([*pictures, content(pil("no"))])
    ]
    (tmp_path / "in.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    summary = llm.run(tmp_path / "in.jsonl", tmp_path / "out.jsonl", use_tqdm=False)
    *answered, failed = lines(tmp_path / "out.jsonl")
    assert same_values([row["response"]["body"]["data"][0]["score"] for row in answered], expected)
    assert summary.num_errors == 1 and "names no folder" in failed["error"]["message"]
    with TestClient(app, base_url="http://localhost", raise_server_exceptions=False) as client:
        found = client.post("/rerank", json={"query": "what", "documents": pictures}).json()["results"]
        best = sorted(range(len(expected)), key=lambda place: -expected[place])
        assert [row["index"] for row in found] == best
        assert same_values([row["relevance_score"] for row in found], [expected[place] for place in best])
        assert {row["index"]: row["document"] for row in found} == {
            0: {"multi_modal": pictures[0]["content"]},
            1: {"text": "a text"},
            2: {"multi_modal": pictures[2]["content"]},
        }
        body = {"data_1": "what", "data_2": pictures}
        scores = [row["score"] for row in client.post("/score", json=body).json()["data"]]
        assert same_values(scores, expected)
        bad = client.post("/rerank", json={"query": "what", "documents": [{"content": [{"type": "tool"}]}]})
        assert bad.status_code == 400 and "got one of type 'tool'" in bad.json()["error"]["message"]
        assert client.post("/rerank", json={"query": 5, "documents": ["a"]}).status_code == 400


@pytest.fixture(scope="module")
def pooled(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[LLM, Any]]:
    folder = tmp_path_factory.mktemp("embedder")
    model = images.write("smolvlm", folder)
    with LLM(folder, use_tqdm_on_load=False, runner="pooling") as llm:
        yield llm, model


@pytest.fixture(scope="module")
def embedder(pooled: tuple[LLM, Any]) -> LLM:
    return pooled[0]


def test_a_family_without_a_class_gives_vectors(pooled: tuple[LLM, Any]) -> None:
    embedder, model = pooled
    prompts = images.asked("smolvlm")
    outputs = embedder.embed(prompts, use_tqdm=False)
    for prompt, output in zip(prompts, outputs, strict=True):
        inputs = images.theirs(embedder, prompt, output)
        with torch.inference_mode():
            hidden = model(**inputs, output_hidden_states=True).hidden_states[-1][0, -1]
        expected = torch.nn.functional.normalize(hidden, dim=-1).numpy()
        assert np.abs(np.array(output.outputs.embedding) - expected).max() < images.TOLERANCE
        assert same_values(embedder.embed(prompt, use_tqdm=False)[0].outputs.embedding, output.outputs.embedding)


def test_a_job_gives_vectors_of_pages_and_videos(embedder: LLM, tmp_path: Path) -> None:
    """In columns, or as conversations in a batch; a bad one fails its row alone."""
    for index, frame in enumerate(VIDEO):
        frame.save(tmp_path / f"{index}.png")
    clip = json.dumps([f"{index}.png" for index in range(len(VIDEO))])
    cells = [("0.png", ""), ("", clip), ("no.png", ""), ("", '["0.png", "no.png"]')]
    text = "".join(f"{json.dumps({'page': page, 'clip': video})}\n" for page, video in cells)
    (tmp_path / "in.jsonl").write_text(text)
    columns = {"template": "what", "image_column": "page", "video_column": "clip"}
    summary = embedder.run(tmp_path / "in.jsonl", tmp_path / "out.jsonl", **columns, use_tqdm=False)
    rows = lines(tmp_path / "out.jsonl")
    data: list[dict[str, Any]] = [{"image": VIDEO[0]}, {"video": VIDEO}]
    prompts = [
        {"prompt": f"{mark}what", "multi_modal_data": own}
        for mark, own in zip(("<image>", "<video>"), data, strict=True)
    ]
    expected = embedder.embed(prompts, use_tqdm=False).to_numpy().tolist()
    assert summary.num_errors == 2 and same_values([row["embedding"] for row in rows[:2]], expected)
    assert "No such file" in rows[2]["error"] and "frame 1" in rows[3]["error"]


def test_vectors_of_conversations(embedder: LLM, tmp_path: Path) -> None:
    messages: Any = [{"role": "user", "content": [image_part(PICTURE), {"type": "text", "text": "what"}]}]
    expected = embedder.embed(embedder.render_chat(messages, add_generation_prompt=False), use_tqdm=False)
    body = {"messages": messages}
    (tmp_path / "in.jsonl").write_text(
        json.dumps({"custom_id": "a", "method": "POST", "url": "/v1/embeddings", "body": body}) + "\n"
    )
    embedder.run(tmp_path / "in.jsonl", tmp_path / "out.jsonl", use_tqdm=False)
    (row,) = lines(tmp_path / "out.jsonl")
    vector = expected[0].outputs.embedding
    assert row["response"]["body"]["data"][0]["embedding"] == vector
    app = Endpoint(AsyncLLM(embedder), names=("tiny",)).app()
    with TestClient(app, base_url="http://localhost", raise_server_exceptions=False) as client:
        found = client.post("/v1/embeddings", json=body).json()
        assert found["data"][0]["embedding"] == vector
        assert found["usage"]["prompt_tokens"] == len(expected[0].prompt_token_ids)
        asked = client.post("/v1/embeddings", json={**body, "add_generation_prompt": True}).json()
        assert asked["data"][0]["embedding"] != vector
        small = {**body, "mm_processor_kwargs": {"size": {"longest_edge": 32}}}
        assert client.post("/v1/embeddings", json=small).json()["usage"] != found["usage"]
        with pytest.raises(ValidationError, match="chat_template must be None for a model of vectors"):
            embedder.score("what", "a", chat_template="{{ messages }}", use_tqdm=False)
        pair = {"text_1": "what", "text_2": content(image_part(PICTURE))}
        (score,) = client.post("/score", json=pair).json()["data"]
        assert score["score"] == embedder.score("what", content(pil(PICTURE)), use_tqdm=False)[0].outputs.score
        for bad, said in (({"messages": []}, "must be one conversation"), ({**body, "input": "a"}, "no field 'input'")):
            response = client.post("/v1/embeddings", json=bad)
            assert response.status_code == 400 and said in response.json()["error"]["message"]
