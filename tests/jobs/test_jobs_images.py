"""Jobs whose rows have images and videos: in a column, or as parts of bodies. A bad one fails its row alone."""

from __future__ import annotations

import base64
import csv
import json
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "models"))
import images

from llm import LLM, SamplingParams
from llm.errors import JobError, JobInterrupted, ValidationError

pytest.importorskip("PIL")
SHORT = SamplingParams(temperature=0, max_tokens=4)


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    folder = tmp_path_factory.mktemp("vlm")
    images.write("smolvlm", folder)
    with LLM(folder, use_tqdm_on_load=False) as llm:
        yield llm


@pytest.fixture
def pages(tmp_path: Path) -> Path:
    folder = tmp_path / "pages"
    folder.mkdir()
    for index, picture in enumerate(images.PICTURES):
        picture.save(folder / f"{index}.png")
    (folder / "cut.png").write_bytes((folder / "0.png").read_bytes()[:100])
    return folder


def rows_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_column_has_images(llm: LLM, pages: Path, tmp_path: Path) -> None:
    encoded = base64.b64encode((pages / "0.png").read_bytes()).decode()
    cells = ["0.png", encoded, f"data:image/png;base64,{encoded}", '["0.png", "2.png"]', "", "cut.png", "no.png"]
    cells.append(str(tmp_path / "other.png"))
    images.PICTURES[0].save(tmp_path / "other.png")
    with (pages / "in.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerows([["prompt", "page"], *(["what is it", cell] for cell in cells)])
    summary = llm.run(pages / "in.csv", tmp_path / "out.jsonl", SHORT, image_column="page", use_tqdm=False)
    rows = rows_of(tmp_path / "out.jsonl")
    assert summary.num_errors == 3
    assert len({row["generated_text"] for row in rows[:3]}) == 1
    assert rows[3]["num_prompt_tokens"] > rows[0]["num_prompt_tokens"] > rows[4]["num_prompt_tokens"]
    for row, said in zip(rows[5:], ("truncated", "No such file", "is not below"), strict=True):
        assert said in row["error"] and not row["generated_text"]
    expected = llm.generate(
        {"prompt": "<image>what is it", "multi_modal_data": {"image": images.PICTURES[0]}}, SHORT, use_tqdm=False
    )
    assert rows[0]["generated_text"] == expected[0].outputs[0].text


def test_bytes_of_parquet_and_conversations(llm: LLM, pages: Path, tmp_path: Path) -> None:
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    image = {"bytes": (pages / "0.png").read_bytes(), "path": "0.png"}
    messages = json.dumps([{"role": "user", "content": "what is it"}])
    parquet.write_table(arrow.table({"messages": [messages] * 2, "image": [image] * 2}), pages / "in.parquet")
    llm.run(pages / "in.parquet", tmp_path / "out.jsonl", SHORT, image_column="image", use_tqdm=False)
    rows = rows_of(tmp_path / "out.jsonl")
    part = {"type": "image_pil", "image_pil": images.PICTURES[0]}
    asked = [{"role": "user", "content": [part, {"type": "text", "text": "what is it"}]}]
    assert rows[0]["content"] == rows[1]["content"] == llm.chat(asked, SHORT, use_tqdm=False)[0].outputs[0].content
    assert "image" not in rows[0]


def test_parts_of_a_batch(llm: LLM, pages: Path, tmp_path: Path) -> None:
    encoded = base64.b64encode((pages / "0.png").read_bytes()).decode()
    urls = (f"data:image/png;base64,{encoded}", "data:image/png;base64,AAAA", "https://a.b/c.png", "0.png")
    with (pages / "in.jsonl").open("w") as file:
        for index, url in enumerate(urls):
            content = [
                {"type": "text", "text": "hi"},
                {"type": "image_url", "image_url": {"url": url, "detail": "low"}},
            ]
            body = {"model": "m", "max_tokens": 4, "messages": [{"role": "user", "content": content}]}
            row = {"custom_id": str(index), "method": "POST", "url": "/v1/chat/completions", "body": body}
            file.write(json.dumps(row) + "\n")
    summary = llm.run(pages / "in.jsonl", tmp_path / "out.jsonl", use_tqdm=False)
    rows = rows_of(tmp_path / "out.jsonl")
    assert summary.num_errors == 3 and rows[0]["response"]["body"]["usage"]["prompt_tokens"] > 50
    errors = [row["error"]["message"] for row in rows[1:]]
    for error, said in zip(errors, ("cannot be decoded", "on a network", "allowed_local_media_path"), strict=True):
        assert said in error


@pytest.fixture
def clip(tmp_path: Path) -> Path:
    folder = tmp_path / "clip"
    folder.mkdir()
    for index, frame in enumerate(images.VIDEOS[0][0]):
        frame.save(folder / f"{index}.png")
    images.PICTURES[1].save(folder / "other.png")
    (folder / "cut.png").write_bytes((folder / "0.png").read_bytes()[:100])
    return folder


FRAMES = ["0.png", "1.png", "2.png"]


def frames_url(clip: Path) -> str:
    encoded = [base64.b64encode((clip / name).read_bytes()).decode() for name in FRAMES]
    return f"data:video/jpeg;base64,{','.join(encoded)}"


def test_a_column_has_videos(llm: LLM, clip: Path, tmp_path: Path) -> None:
    """Frames as paths, base64 and vLLM's URL; with their times; several videos; and what is none."""
    url = frames_url(clip)
    timed = {"video": FRAMES, "metadata": {"fps": 2.0}}
    bad = [["0.png", "cut.png"], ["0.png", "no.png"], ["0.png", "other.png"], [], ["0.png", ""], "clip.mp4"]
    bad += [{"video": FRAMES, "metadata": {"fsp": 1}}, {"video": FRAMES, "fps": 1}, "data:video/mp4;base64,AAAA", 5]
    cells = [FRAMES, timed, url, {"video": url}, [FRAMES, timed], None, *bad]
    rows = [{"prompt": "what is it", "clip": cell} for cell in cells]
    (clip / "in.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    summary = llm.run(clip / "in.jsonl", tmp_path / "out.jsonl", SHORT, video_column="clip", use_tqdm=False)
    found = rows_of(tmp_path / "out.jsonl")
    assert summary.num_errors == len(bad) and [row["clip"] for row in found] == cells
    said = (
        *("frame 1: the image cannot be decoded", "No such file", "one size, have 53x37 and 20x90", "frames, got none"),
        *("frame 1: it must be one image", "got 'clip.mp4'; files of videos", "no key 'fsp'", "got 'fps'"),
        *("must be data:video/jpeg;base64,FRAME", "got int"),
    )
    for row, part in zip(found[6:], said, strict=True):
        assert part in row["error"] and not row["generated_text"]
    videos = [(images.VIDEOS[0][0], metadata) for metadata in (None, {"fps": 2.0})]
    prompts = [{"prompt": "<video>what is it", "multi_modal_data": {"video": video}} for video in videos]
    prompts.append({"prompt": "<video><video>what is it", "multi_modal_data": {"video": videos}})
    expected = [output.outputs[0].text for output in llm.generate(prompts, SHORT, use_tqdm=False)]
    assert [row["generated_text"] for row in found[:5]] == [expected[place] for place in (0, 1, 1, 1, 2)]
    with (clip / "in.csv").open("w", newline="") as file:
        csv.writer(file).writerows([["prompt", "clip"], *(["what is it", json.dumps(cell)] for cell in cells[:2])])
    llm.run(clip / "in.csv", tmp_path / "csv.jsonl", SHORT, video_column="clip", use_tqdm=False)
    assert [row["generated_text"] for row in rows_of(tmp_path / "csv.jsonl")] == expected[:2]


def test_bytes_of_frames_and_conversations(llm: LLM, clip: Path, tmp_path: Path) -> None:
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    frames = [(clip / name).read_bytes() for name in FRAMES]
    messages = json.dumps([{"role": "user", "content": "what is it"}])
    table = arrow.table({"messages": [messages], "clip": [frames], "page": [frames[0]]})
    parquet.write_table(table, clip / "in.parquet")
    columns = {"image_column": "page", "video_column": "clip"}
    llm.run(clip / "in.parquet", tmp_path / "out.jsonl", SHORT, **columns, use_tqdm=False)
    [row] = rows_of(tmp_path / "out.jsonl")
    parts = [
        {"type": "image_pil", "image_pil": images.VIDEOS[0][0][0]},
        {"type": "video", "video": images.VIDEOS[0][0]},
    ]
    asked: Any = [{"role": "user", "content": [*parts, {"type": "text", "text": "what is it"}]}]
    assert row["content"] == llm.chat(asked, SHORT, use_tqdm=False)[0].outputs[0].content
    assert "clip" not in row and "page" not in row


def test_videos_of_a_batch(llm: LLM, clip: Path, tmp_path: Path) -> None:
    url = frames_url(clip)
    images_of_url = [f"data:image/png;base64,{part}" for part in url.partition(",")[2].split(",")]
    bad = url.replace(",", ",AAAA", 2)
    parts: list[Any] = [
        {"type": "video_url", "video_url": {"url": url}},
        {"type": "video", "video": images_of_url, "metadata": {"fps": 2.0}},
        {"type": "video_url", "video_url": {"url": url}, "metadata": {"fps": 0.5}},
        {"type": "video_url", "video_url": {"url": bad}},
        {"type": "video_url", "video_url": {"url": "https://a.b/clip.mp4"}},
        {"type": "video", "video": images_of_url, "fps": 2},
    ]
    with (clip / "in.jsonl").open("w") as file:
        for index, part in enumerate(parts):
            messages = [{"role": "user", "content": [part, {"type": "text", "text": "what"}]}]
            body = {"max_tokens": 4, "temperature": 0, "messages": messages}
            row = {"custom_id": str(index), "method": "POST", "url": "/v1/chat/completions", "body": body}
            file.write(json.dumps(row) + "\n")
    summary = llm.run(clip / "in.jsonl", tmp_path / "out.jsonl", use_tqdm=False)
    rows = rows_of(tmp_path / "out.jsonl")
    assert summary.num_errors == 3
    answers = [row["response"]["body"] for row in rows[:3]]
    assert answers[0]["choices"] == answers[1]["choices"]
    assert answers[0]["usage"]["prompt_tokens"] == answers[1]["usage"]["prompt_tokens"]
    assert answers[0]["choices"] != answers[2]["choices"] or answers[0]["usage"] != answers[2]["usage"]
    errors = [row["error"]["message"] for row in rows[3:]]
    for error, said in zip(errors, ("frame 0: the image cannot", "FRAME,FRAME", "no key 'fps'"), strict=True):
        assert said in error


def test_frames_are_counted_before_they_are_decoded(llm: LLM, clip: Path, tmp_path: Path) -> None:
    """A URL of more frames than a video may have is refused for their number, not for what the first one is."""
    url = "data:video/jpeg;base64," + ",".join(["A"] * 5000)
    for cell, said in ((url, "5000 frames and at most 4096"), (["no.png"] * 4097, "4097 frames and at most 4096")):
        (clip / "in.jsonl").write_text(json.dumps({"prompt": "a", "clip": cell}) + "\n")
        target = tmp_path / f"{len(cell)}.jsonl"
        llm.run(clip / "in.jsonl", target, SHORT, video_column="clip", use_tqdm=False)
        assert said in rows_of(target)[0]["error"]


def test_a_job_that_was_ended_goes_on_with_the_same_pictures_alone(
    llm: LLM, pages: Path, tmp_path: Path, ctrl_c: None
) -> None:
    (pages / "in.jsonl").write_text("".join(f'{{"prompt": "a", "page": "{index}.png"}}\n' for index in range(3)))
    params = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)

    def run(name: str, **more: Any) -> bytes:
        options = {"image_column": "page", "use_tqdm": False, **more}
        return llm.run(pages / "in.jsonl", tmp_path / name, params, **options).output.read_bytes()

    whole, execute, steps = run("whole.jsonl"), llm._engine.runner.execute, []

    def hooked(plan: Any) -> Any:
        steps.append(plan)
        if len(steps) == 8:
            signal.raise_signal(signal.SIGINT)
        return execute(plan)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(llm._engine.runner, "execute", hooked)
        with pytest.raises(JobInterrupted):
            run("out.jsonl")
    images.picture(53, 37, seed=5).save(pages / "0.png")
    with pytest.raises(JobError, match="is not the one that the journal"):
        run("out.jsonl", resume=True)
    images.PICTURES[0].save(pages / "0.png")
    assert run("out.jsonl", resume=True) == whole


def test_a_checkpoint_of_a_call_knows_rows_by_their_pictures(llm: LLM, tmp_path: Path) -> None:
    params = SamplingParams(temperature=0, max_tokens=8, seed=1, ignore_eos=True)

    def ask(picture: Any, **more: Any) -> list[int]:
        prompt = {"prompt": "<image>what", "multi_modal_data": {"image": picture}}
        return list(llm.generate(prompt, params, use_tqdm=False, **more)[0].outputs[0].token_ids)

    first, second = images.PICTURES[0], images.picture(53, 37, seed=5)
    assert ask(first) != ask(second)
    for picture in (first, second, first):
        assert ask(picture, checkpoint=tmp_path / "calls") == ask(picture)


def test_a_model_without_a_tower_refuses_the_column(pages: Path, tmp_path: Path) -> None:
    (pages / "in.jsonl").write_text('{"prompt": "a", "page": "0.png"}\n')
    with LLM() as plain:
        plain.run(pages / "in.jsonl", tmp_path / "out.jsonl", SHORT, image_column="page", use_tqdm=False)
        assert "reads no images" in rows_of(tmp_path / "out.jsonl")[0]["error"]
        with pytest.raises(ValidationError, match="page"):
            plain.run(
                *(pages / "in.jsonl", tmp_path / "strict.jsonl", SHORT),
                **{"image_column": "pagee", "on_error": "raise", "use_tqdm": False},
            )
