"""Images and videos at the endpoint: as parts of conversations, of models that generate and of those that pool."""

from __future__ import annotations

import base64
import io
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

sys.path.insert(0, str(Path(__file__).parents[1] / "models"))
import images

from llm import LLM, AsyncLLM, SamplingParams
from llm.tools.serve.app import Endpoint

pytest.importorskip("PIL")
FRAMES = images.VIDEOS[0][0]


def encoded(image: Any) -> str:
    file = io.BytesIO()
    image.save(file, "PNG")
    return base64.b64encode(file.getvalue()).decode()


def image_part(image: Any) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{encoded(image)}"}}


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    folder = tmp_path_factory.mktemp("vlm")
    images.write("smolvlm", folder)
    with LLM(folder, use_tqdm_on_load=False) as own:
        yield own


@pytest.fixture(scope="module")
def client(llm: LLM) -> Iterator[TestClient]:
    app = Endpoint(AsyncLLM(llm), names=("tiny",)).app()
    with TestClient(app, base_url="http://localhost", raise_server_exceptions=False) as found:
        yield found


def ask(client: TestClient, *parts: Any, **more: Any) -> Any:
    messages = [{"role": "user", "content": [*parts, {"type": "text", "text": "what is it"}]}]
    body = {"messages": messages, "temperature": 0, "max_tokens": 6, **more}
    return client.post("/v1/chat/completions", json=body)


def test_a_conversation_has_images_and_videos(client: TestClient, llm: LLM) -> None:
    url = f"data:video/jpeg;base64,{','.join(map(encoded, FRAMES))}"
    picture = images.PICTURES[0]
    frames = [f"data:image/png;base64,{encoded(frame)}" for frame in FRAMES]
    ways = (
        {"type": "video_url", "video_url": {"url": url}},
        {"type": "video", "video": frames, "metadata": {"fps": 2.0}},
    )
    parts = [{"type": "video", "video": FRAMES, "metadata": {"fps": 2.0}}, {"type": "image_pil", "image_pil": picture}]
    params = SamplingParams(temperature=0, max_tokens=6)
    messages: Any = [{"role": "user", "content": [*parts, {"type": "text", "text": "what is it"}]}]
    (expected,) = llm.chat(messages, params, use_tqdm=False)
    for way in ways:
        response = ask(client, way, image_part(picture))
        assert response.status_code == 200, response.text
        found = response.json()
        assert found["choices"][0]["message"]["content"] == expected.outputs[0].content
        assert found["usage"]["prompt_tokens"] == len(expected.prompt_token_ids)


def test_arguments_of_the_processor(client: TestClient, llm: LLM) -> None:
    small = {"size": {"longest_edge": 32}}
    counts = [
        ask(client, image_part(images.PICTURES[0]), **more).json()["usage"]["prompt_tokens"]
        for more in ({}, {"mm_processor_kwargs": small})
    ]
    assert counts[1] < counts[0]
    messages: Any = [{"role": "user", "content": [{"type": "image_pil", "image_pil": images.PICTURES[0]}]}]
    (output,) = llm.chat(messages, SamplingParams(max_tokens=1), mm_processor_kwargs=small, use_tqdm=False)
    assert counts[1] - len(output.prompt_token_ids) == len("what is it")
    refused = ask(client, image_part(images.PICTURES[0]), mm_processor_kwargs={"sise": 1})
    assert refused.status_code == 400 and "no key 'sise'" in refused.json()["error"]["message"]


@pytest.mark.parametrize(
    ("part", "said"),
    [
        ({"type": "video_url", "video_url": {"url": "https://a.b/clip.mp4"}}, "files of videos are not read: pass"),
        ({"type": "video_url", "video_url": {"url": "data:video/mp4;base64,AAAA"}}, "data:video/jpeg;base64,FRAME"),
        ({"type": "video_url", "video_url": {"url": "data:video/jpeg;base64,AAAA"}}, "frame 0: the image cannot be"),
        ({"type": "video_url", "video_url": {"url": "data:video/jpeg;base64,A,!"}}, "frame 0: the base64 of an image"),
        ({"type": "video_url"}, "must have the video under 'video_url'"),
        ({"type": "video", "video": ["0.png"]}, "frame 0: the image '0.png' is a local file"),
        ({"type": "video", "video": []}, "a video must have frames, got none"),
        ({"type": "video", "video": [5]}, "frame 0: an image must be"),
        ({"type": "input_audio", "input_audio": {}}, "'input_audio' is not read: images and videos are"),
    ],
)
def test_a_mistake_is_one_sentence(client: TestClient, part: Any, said: str) -> None:
    response = ask(client, part)
    assert response.status_code == 400
    message = response.json()["error"]["message"]
    assert said in message and "\n" not in message
