"""Videos: the pixels are those of transformers' processors, the answers its model's, and the bits the video's alone."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import images
import numpy as np
import pytest
import torch
import transformers

from llm import LLM, SamplingParams
from llm.errors import UnsupportedModelError, ValidationError
from llm.models.vision import inputs, video
from llm.text.videos import timing_of

pytest.importorskip("PIL")
sys.path.insert(0, str(Path(__file__).parents[1] / "fixtures"))
import make_video_fixtures

CASES = json.loads((Path(make_video_fixtures.__file__).parent / "videos.json").read_text())
# Of three positions and timed by them, with times as text and DeepStack, as images, with a row's own tokens, with
# frames that each are a list of patches, with numbers before them.
FAMILIES = ("qwen2_5_vl", "qwen3_vl", "smolvlm", "llava_onevision", "video_llama_3", "minicpmv4_6")
SHORT = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
FRAMES, TIMING = images.VIDEOS[0]
MARK = images.video_mark("qwen2_5_vl")
LARGE = np.zeros((6000, 8000), dtype=np.uint8)


def processor_of(name: str, settings: dict[str, Any]) -> video.VideoProcessor:
    family = next((family for family, own in video._BY_FAMILY.items() if own == name), "glm46v")
    theirs = SimpleNamespace(
        video_token="<video>",
        replace_video_token=lambda given, index, **more: "<video>",
        image_processor=transformers.MiniCPMV4_6ImageProcessorPil(),
    )
    return video.VideoProcessor(family, theirs, [{}, {}, {"video_processor_type": name, **settings}])


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case['name']}-{len(case['settings'])}")
def test_pixels_are_those_of_transformers(case: dict[str, Any]) -> None:
    from PIL import Image

    if case["name"] == "SmolVLMVideoProcessor" and not inputs._TORCH_HAS_LANCZOS:
        pytest.skip("the fixture has PyTorch's Lanczos filter, whose rounding Pillow's has not; it is compared below")
    given = make_video_fixtures.frames()
    timing = timing_of(None, len(given))
    processor = processor_of(case["name"], case["settings"])
    found = processor.process([Image.fromarray(frame) for frame in given], timing, {}).inputs
    pixels = found.get("pixel_values_videos", found.get("pixel_values"))
    assert pixels is not None
    if len(case["shape"]) == 5:
        pixels = pixels.view(1, *pixels.shape[-4:])
    ours = make_video_fixtures.summary(pixels, found)
    for key in ("shape", *make_video_fixtures.OTHERS):
        assert key not in ours or ours[key] == case[key]
    tolerance = 1e-3 * case["sums"][2] ** 0.5  # other processors round some pixels' bytes otherwise
    assert ours["sums"] == pytest.approx(case["sums"], rel=1e-4, abs=tolerance)
    turned = processor.process([Image.fromarray(frame[::-1]) for frame in given], timing, {}).inputs
    other = make_video_fixtures.summary(next(iter(turned.values())).view(pixels.shape), {})
    assert other["sums"] != pytest.approx(case["sums"], rel=1e-4, abs=tolerance)


@pytest.mark.parametrize("has_lanczos", [False, inputs._TORCH_HAS_LANCZOS])
@pytest.mark.parametrize("size", [(20, 31), (120, 90)])
def test_lanczos_is_pillows(has_lanczos: bool, size: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch has it since 2.12."""
    from PIL import Image

    monkeypatch.setattr(inputs, "_TORCH_HAS_LANCZOS", has_lanczos)
    frames = make_video_fixtures.frames()[:2]
    found = inputs.resized(torch.from_numpy(np.stack(frames)).permute(0, 3, 1, 2), size, 1)
    theirs = [np.asarray(Image.fromarray(frame).resize(size[::-1], Image.Resampling.LANCZOS)) for frame in frames]
    ours = found.permute(0, 2, 3, 1).numpy().astype(np.int16)
    assert np.abs(ours - np.stack(theirs)).max() <= 2
    bicubic = Image.fromarray(frames[0]).resize(size[::-1], Image.Resampling.BICUBIC)
    assert np.abs(ours[0] - np.asarray(bicubic)).max() > 2


@pytest.mark.parametrize("name", FAMILIES)
def test_answers_are_those_of_transformers_and_do_not_depend_on_the_batch(name: str, tmp_path: Path) -> None:
    """Alone, together, in chunks, after a prefix that was cached, with one thread, and after a loss of blocks."""
    model = images.write(name, tmp_path)
    prompts = images.asked_of_videos(name)
    with LLM(tmp_path, use_tqdm_on_load=False) as llm:
        together = llm.generate(prompts, images.GREEDY, use_tqdm=False)
        for prompt, output in zip(prompts, together, strict=True):
            images.check_near(name, llm, model, prompt, output)
        unscored = images.GREEDY.clone()
        unscored.prompt_logprobs = None
        first = llm.generate(prompts, unscored, use_tqdm=False)
        hit = llm.generate(prompts, unscored, use_tqdm=False)
        assert max(output.num_cached_tokens or 0 for output in hit) > 0
        for output, other, again in zip(together, first, hit, strict=True):
            assert images.answer_bits(output) == images.answer_bits(other) == images.answer_bits(again)
    small = {"max_num_batched_tokens": 13, "enable_prefix_caching": False, "max_num_seqs": 2, "num_threads": 1}
    with LLM(tmp_path, use_tqdm_on_load=False, **small) as llm:
        again = llm.generate(prompts, images.GREEDY, use_tqdm=False)
        assert [images.bits(output) for output in again] == [images.bits(output) for output in together]
        (alone,) = llm.generate(prompts[-1], images.GREEDY, use_tqdm=False)
        assert images.bits(alone) == images.bits(together[-1])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("video")
    images.write("qwen2_5_vl", folder)
    return folder


@pytest.fixture(scope="module")
def llm(folder: Path) -> Any:
    limits = {"video": {"count": 2, "num_frames": 6}}
    with LLM(folder, use_tqdm_on_load=False, limit_mm_per_prompt=limits) as llm:
        yield llm


def ask(llm: LLM, given: object, text: str = MARK, **more: Any) -> list[int]:
    prompt = {"prompt": text, "multi_modal_data": {"video": given}, **more}
    return list(llm.generate(prompt, SHORT, use_tqdm=False)[0].outputs[0].token_ids)


def test_a_video_with_blocks_lost_keeps_its_bits(folder: Path) -> None:
    prompts = [prompt for prompt in images.asked_of_videos("qwen2_5_vl") for _ in range(2)]
    images.check_lost_blocks(folder, prompts, max_tokens=40, blocks=18)


def test_every_form_of_a_video_is_the_same_video(llm: LLM) -> None:

    expected = ask(llm, FRAMES)
    array = np.stack([np.asarray(frame) for frame in FRAMES])
    for form in (tuple(FRAMES), array, torch.from_numpy(array), [array], [FRAMES], (FRAMES, None), list(array)):
        assert ask(llm, form) == expected
    assert ask(llm, (FRAMES, {"fps": 24.0})) == expected  # as transformers has it where it is not known
    scored = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)

    def logprobs(given: object) -> list[Any]:
        prompt = {"prompt": f"{MARK} what?", "multi_modal_data": {"video": given}}
        return list(llm.generate(prompt, scored, use_tqdm=False)[0].prompt_logprobs)[-3:]

    assert logprobs((FRAMES, {"fps": 0.5})) != logprobs(FRAMES) != logprobs(FRAMES[::-1])
    ids = llm._preprocessor.images.processor.ids(MARK)
    given = {"prompt_token_ids": ids, "multi_modal_data": {"video": FRAMES}}
    (output,) = llm.generate(given, SHORT, use_tqdm=False)
    assert list(output.outputs[0].token_ids) == expected
    whole = {"prompt_token_ids": output.prompt_token_ids, "multi_modal_data": {"video": FRAMES}}
    assert list(llm.generate(whole, SHORT, use_tqdm=False)[0].outputs[0].token_ids) == expected
    named = {"multi_modal_uuids": {"video": "clip"}}
    assert ask(llm, FRAMES, **named) == expected == ask(llm, None, **named)


def test_a_conversation_has_videos_and_images_in_their_places(llm: LLM) -> None:
    picture = images.PICTURES[0]
    parts: list[dict[str, Any]] = [
        {"type": "text", "text": "first "},
        {"type": "video", "video": FRAMES, "metadata": TIMING},
        {"type": "image_pil", "image_pil": picture},
        {"type": "video", "video": FRAMES[:2]},
    ]
    messages: Any = [{"role": "user", "content": parts}]
    (output,) = llm.chat(messages, SHORT, use_tqdm=False)
    (prompt,) = llm.render_chat(messages)
    again = llm.generate(prompt, SHORT, use_tqdm=False)[0]
    assert again.outputs[0].token_ids == output.outputs[0].token_ids
    assert again.prompt_token_ids == output.prompt_token_ids
    marked = images.wrapped("qwen2_5_vl")
    text = f"user: first {MARK}{marked}{MARK}assistant: "
    data = {"image": picture, "video": [(FRAMES, TIMING), FRAMES[:2]]}
    direct = llm.generate({"prompt": text, "multi_modal_data": data}, SHORT, use_tqdm=False)[0]
    assert direct.prompt_token_ids == output.prompt_token_ids
    assert direct.outputs[0].token_ids == output.outputs[0].token_ids


@pytest.mark.parametrize(
    ("given", "text", "more", "said"),
    [
        (FRAMES, "no place", {}, r"has 0 of the placeholder '<\|video_pad\|>' and 1 video;"),
        ([FRAMES] * 3, MARK * 3, {}, "3 videos and limit_mm_per_prompt allows 2"),
        (FRAMES * 3, MARK, {}, "9 frames and at most 6 are read"),
        ("clip.mp4", MARK, {}, "files of videos are not read"),
        ([*FRAMES, images.PICTURES[1]], MARK, {}, "frame 3: the frames of a video must have one size"),
        ([FRAMES[0], 5], MARK, {}, "frame 1: an image must be a PIL image"),
        ((FRAMES, {"fsp": 1}), MARK, {}, "no key 'fsp'"),
        ((FRAMES, {"fps": -1}), MARK, {}, "fps of a video must be a positive number, got -1"),
        ((FRAMES, {"frames_indices": [1, 2]}), MARK, {}, "must be 3 rising integers"),
        ((FRAMES, {"do_sample_frames": True}), MARK, {}, "all frames that are passed are read"),
        (FRAMES, MARK, {"mm_processor_kwargs": {"sise": 1}}, "no key 'sise' of videos"),
        ([FRAMES] * 2, "<|video_pad|>" * 2, {}, "no token between them"),
        ([LARGE] * 6, MARK, {}, "frame 0: 6 frames of 8000x6000 are more than 268435456 pixels"),
        (None, MARK, {"multi_modal_uuids": {"video": "b"}}, "no video with the uuid 'b' came before"),
    ],
)
def test_a_mistake_is_one_sentence_before_anything_runs(
    llm: LLM, given: object, text: str, more: dict[str, Any], said: str
) -> None:
    with pytest.raises(ValidationError, match=said) as caught:
        ask(llm, given, text, **more)
    assert "\n" not in str(caught.value)


def test_tokens_of_a_video_without_one_are_refused(llm: LLM) -> None:
    with pytest.raises(ValidationError, match=r"1 of the model's tokens for videos \(id \d+\) and no video"):
        llm.generate(MARK, SHORT, use_tqdm=False)
    with pytest.raises(ValidationError, match=r"1 of the model's tokens for videos \(id \d+\) and no video"):
        text = images.wrapped("qwen2_5_vl") + MARK
        llm.generate({"prompt": text, "multi_modal_data": {"image": images.PICTURES[0]}}, SHORT, use_tqdm=False)


def test_a_family_whose_videos_are_not_read_says_so(tmp_path: Path) -> None:
    images.write("llava", tmp_path)
    with LLM(tmp_path, use_tqdm_on_load=False) as llm:
        with pytest.raises(ValidationError, match="videos of 'llava' are not read; pass their frames as images"):
            ask(llm, FRAMES, "<video>")
        with pytest.raises(ValidationError, match="videos of 'llava' are not read"):
            llm.chat([{"role": "user", "content": [{"type": "video", "video": FRAMES}]}], SHORT, use_tqdm=False)


def test_numbers_in_words_are_num2words() -> None:
    """Its own results, of version 0.5.14."""
    known = {
        3: "three",
        17: "seventeen",
        20: "twenty",
        45: "forty-five",
        100: "one hundred",
        101: "one hundred and one",
        342: "three hundred and forty-two",
        1000: "one thousand",
        1001: "one thousand and one",
        1100: "one thousand, one hundred",
        4096: "four thousand and ninety-six",
        9999: "nine thousand, nine hundred and ninety-nine",
    }
    assert {number: video.in_words(number) for number in known} == known


def test_a_family_without_a_form_is_refused() -> None:
    with pytest.raises(UnsupportedModelError, match="videos of 'kimi' are not read"):
        video.VideoProcessor("kimi", SimpleNamespace(video_token="<video>"), [{}, {}, {}])


def test_tokens_that_do_not_change_are_left_out(tmp_path: Path) -> None:
    """VideoLLaMA 3's text depends on pixels: two videos of one size have other tokens, alone and together."""
    model = images.write("video_llama_3", tmp_path)
    changed = FRAMES[0].copy()
    changed.paste((0, 0, 0), (0, 0, 10, 10))
    clips = [FRAMES[0]] * 3, [FRAMES[0], FRAMES[0], changed]
    text = f"{images.video_mark('video_llama_3')} what"
    prompts: list[dict[str, Any]] = [
        {"prompt": text, "multi_modal_data": {"image": [], "video": [(clip, TIMING)]}} for clip in clips
    ]
    with LLM(tmp_path, use_tqdm_on_load=False) as llm:
        together = llm.generate(prompts, images.GREEDY, use_tqdm=False)
        all_tokens = {**prompts[0], "mm_processor_kwargs": {"use_token_compression": False}}
        (full,) = llm.generate(all_tokens, images.GREEDY, use_tqdm=False)
        assert sorted({len(output.prompt_token_ids) for output in (*together, full)}) == [
            len(output.prompt_token_ids) for output in (*together, full)
        ]
        for prompt, output in zip(prompts, together, strict=True):
            assert images.worst("video_llama_3", llm, model, prompt, output) < images.TOLERANCE
            (alone,) = llm.generate(prompt, images.GREEDY, use_tqdm=False)
            assert images.bits(alone) == images.bits(output)


def test_seconds_stand_where_the_prompt_has_a_place_for_them(tmp_path: Path) -> None:
    images.write("hyperclovax_vision_v2", tmp_path)
    with LLM(tmp_path, use_tqdm_on_load=False) as llm:
        known = [(FRAMES, {"fps": 2.0}), (FRAMES, {"duration": 9.876})]

        def tokens(text: str, *videos: Any) -> list[int]:
            prompt = {"prompt": text, "multi_modal_data": {"video": list(videos)}}
            return list(llm.generate(prompt, SHORT, use_tqdm=False)[0].prompt_token_ids)

        mark = "<|video_pad|>"
        said = tokens(f"<|video_duration|> s {mark} <|video_duration|> s {mark}", *known)
        assert said == tokens(f"1.5 s {mark} 9.88 s {mark}", *known)
        with pytest.raises(ValidationError, match=r"2 of <\|video_duration\|> and 1 videos"):
            tokens(f"<|video_duration|><|video_duration|>{mark}", known[0])
