"""Families that read images answer as transformers does, and a picture's bits depend on nothing else."""

from __future__ import annotations

import base64
import io
import json
import threading
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import images
import pytest
import torch
from same_answers import same_values
from starlette.testclient import TestClient

from llm import LLM, AsyncLLM, BeamSearchParams, PoolingParams, SamplingParams
from llm.errors import LLMError, ValidationError
from llm.models.vision.replacements import best_canvas
from llm.tools.serve.app import Endpoint

pytest.importorskip("PIL")
# Plain, of tiles and a row's own tokens, of three positions, with DeepStack, with spans that see both ways, and with
# features that the language model multiplies.
FAMILIES = ("llava", "idefics3", "qwen2_5_vl", "qwen3_vl", "gemma3", "mistral3", "llava_next-granite")
SHORT = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
MARK = images.wrapped("qwen2_5_vl")
PICTURE = images.PICTURES[0]


@pytest.fixture(scope="module", params=FAMILIES)
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path, Any]:
    """(family, folder, transformers' model)."""
    folder = tmp_path_factory.mktemp(request.param)
    return request.param, folder, images.write(request.param, folder)


def test_answers_are_those_of_transformers_and_do_not_depend_on_the_batch(made: tuple[str, Path, Any]) -> None:
    """Alone, together, in chunks, after a prefix that was cached, with pictures shared, with one thread."""
    name, folder, model = made
    prompts = images.asked(name)
    with LLM(folder, use_tqdm_on_load=False) as llm:
        together = llm.generate(prompts, images.GREEDY, use_tqdm=False)
        for prompt, output in zip(prompts, together, strict=True):
            assert images.worst(name, llm, model, prompt, output) < images.TOLERANCE
        unscored = images.GREEDY.clone()
        unscored.prompt_logprobs = None
        first = llm.generate(prompts, unscored, use_tqdm=False)
        hit = llm.generate(prompts[::-1], unscored, use_tqdm=False)[::-1]
        assert max(output.num_cached_tokens or 0 for output in hit) > 0
        for output, other, again in zip(together, first, hit, strict=True):
            assert images.answer_bits(output) == images.answer_bits(other) == images.answer_bits(again)
    small = {"max_num_batched_tokens": 13, "enable_prefix_caching": False, "max_num_seqs": 3, "num_threads": 1}
    with LLM(folder, use_tqdm_on_load=False, block_size=16, kv_cache_memory_bytes=_bytes_for(folder), **small) as llm:
        again = llm.generate(prompts, images.GREEDY, use_tqdm=False)
        assert [images.bits(output) for output in again] == [images.bits(output) for output in together]
        (alone,) = llm.generate(prompts[3], images.GREEDY, use_tqdm=False)
        assert images.bits(alone) == images.bits(together[3]) != images.bits(together[2])


def _bytes_for(folder: Path) -> int:
    """So little memory that rows lose their blocks."""
    with LLM(folder, use_tqdm_on_load=False, max_num_seqs=1) as llm:
        return llm.config.cache_config.kv_cache_memory_bytes


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("vlm")
    images.write("qwen2_5_vl", folder)
    PICTURE.save(folder / "a.png")
    return folder


@pytest.fixture(scope="module")
def llm(folder: Path) -> Iterator[LLM]:
    limits = {"image": {"count": 3, "width": 200, "height": 200}}
    with LLM(folder, use_tqdm_on_load=False, allowed_local_media_path=folder, limit_mm_per_prompt=limits) as llm:
        yield llm


def ask(llm: LLM, image: object, text: str = MARK, **more: Any) -> list[int]:
    prompt = {"prompt": text, "multi_modal_data": {"image": image}, **more}
    return list(llm.generate(prompt, SHORT, use_tqdm=False)[0].outputs[0].token_ids)


def png() -> bytes:
    file = io.BytesIO()
    PICTURE.save(file, "PNG")
    return file.getvalue()


def animation() -> bytes:
    file = io.BytesIO()
    PICTURE.save(file, "GIF", save_all=True, append_images=[PICTURE.rotate(180)])
    return file.getvalue()


def lazy(data: bytes) -> Any:
    """An image that Pillow decodes when it is used."""
    from PIL import Image

    return Image.open(io.BytesIO(data))


def test_a_row_with_pictures_that_loses_its_blocks_keeps_its_bits(folder: Path) -> None:
    prompts = [prompt for prompt in images.asked("qwen2_5_vl") for _ in range(2)]
    images.check_lost_blocks(folder, prompts, max_tokens=70, blocks=20)


def test_a_checkpoint_of_bfloat16_is_computed_in_float32(tmp_path: Path) -> None:
    from transformers import AutoModelForImageTextToText

    images.write("idefics3", tmp_path).to(torch.bfloat16).save_pretrained(tmp_path)
    model = AutoModelForImageTextToText.from_pretrained(tmp_path, dtype=torch.float32).eval()
    with LLM(tmp_path, use_tqdm_on_load=False, kv_cache_dtype="float32") as llm:
        prompts = images.asked("idefics3")
        for prompt, output in zip(prompts, llm.generate(prompts, images.GREEDY, use_tqdm=False), strict=True):
            assert images.worst("idefics3", llm, model, prompt, output) < images.TOLERANCE


def test_the_prompt_cache_on_disk_has_pictures(folder: Path, tmp_path: Path) -> None:
    prompts = images.asked("qwen2_5_vl")[1:]
    with LLM(folder, use_tqdm_on_load=False) as llm:
        expected = [output.outputs[0].token_ids for output in llm.generate(prompts, SHORT, use_tqdm=False)]
        llm.save_prefix_cache(tmp_path / "cache")
    other = {**prompts[0], "multi_modal_data": {"image": images.picture(53, 37, seed=9)}}
    with LLM(folder, use_tqdm_on_load=False, prefix_cache=tmp_path / "cache") as llm:
        outputs = llm.generate([*prompts, other], SHORT, use_tqdm=False)
        assert [output.outputs[0].token_ids for output in outputs[:-1]] == expected
        assert min(output.num_cached_tokens for output in outputs[:-1]) > 0 == outputs[-1].num_cached_tokens


def test_every_form_of_a_picture_is_the_same_picture(llm: LLM, folder: Path) -> None:
    import numpy as np

    expected = ask(llm, PICTURE)
    array = np.asarray(PICTURE)
    forms = (png(), folder / "a.png", str(folder / "a.png"), array, torch.from_numpy(array.copy()).permute(2, 0, 1))
    for form in (*forms, [PICTURE], array[None], array / 255.0):
        assert ask(llm, form) == expected
    assert ask(llm, images.picture(53, 37, seed=1)) != expected
    tokens = llm._preprocessor.images.processor.ids(MARK)
    output = llm.generate({"prompt_token_ids": tokens, "multi_modal_data": {"image": PICTURE}}, SHORT, use_tqdm=False)
    assert list(output[0].outputs[0].token_ids) == expected
    assert ask(llm, io.BytesIO(png())) == expected
    halves = torch.rand(3, 20, 30, generator=torch.Generator().manual_seed(1)).bfloat16()
    assert ask(llm, halves) == ask(llm, halves.float())
    whole = list(output[0].prompt_token_ids)  # with all tokens of the picture already
    output = llm.generate({"prompt_token_ids": whole, "multi_modal_data": {"image": PICTURE}}, SHORT, use_tqdm=False)
    assert list(output[0].outputs[0].token_ids) == expected


def test_one_image_that_is_not_decoded_yet_serves_many_prompts(llm: LLM) -> None:
    """Threads decode pictures, and Pillow's images are for one at a time."""
    large = io.BytesIO()
    images.picture(190, 190).save(large, "PNG")
    for _ in range(3):
        prompt = {"prompt": MARK, "multi_modal_data": {"image": lazy(large.getvalue())}}
        outputs = llm.generate([prompt] * 12, SHORT, use_tqdm=False)
        assert len({tuple(output.outputs[0].token_ids) for output in outputs}) == 1


@pytest.mark.parametrize("name", ["ovis2", "minicpmv4_6", "llama4"])
def test_families_whose_pictures_have_more_than_one_kind_of_token(name: str, tmp_path: Path) -> None:
    """Ovis 2's have features in the places of several ids, MiniCPM's have numbers, Llama 4's are cut here."""
    model = images.write(name, tmp_path)
    prompts = images.asked(name)[:3]
    with LLM(tmp_path, use_tqdm_on_load=False, enable_prefix_caching=False) as llm:
        together = llm.generate(prompts, images.GREEDY, use_tqdm=False)
        for prompt, output in zip(prompts, together, strict=True):
            assert images.worst(name, llm, model, prompt, output) < images.TOLERANCE
        ids = llm._preprocessor.images.processor.ids(prompts[2]["prompt"])
        of_ids = {"prompt_token_ids": ids, "multi_modal_data": prompts[2]["multi_modal_data"]}
        again = llm.generate(of_ids, images.GREEDY, use_tqdm=False)
        assert again[0].prompt_token_ids[-40:] == together[2].prompt_token_ids[-40:]
        of_ids["prompt_token_ids"] = list(together[2].prompt_token_ids)  # with all tokens of the pictures
        again = llm.generate(of_ids, images.GREEDY, use_tqdm=False)
        assert images.bits(again[0]) == images.bits(together[2])
        if name == "ovis2":
            features = {"image_embeds": torch.zeros(4, 48)}
            with pytest.raises(ValidationError, match="image_embeds of this model are not read"):
                llm.generate({**prompts[1], "multi_modal_data": {"image": features}}, SHORT, use_tqdm=False)
        if name == "minicpmv4_6":
            plain = {**prompts[2], "mm_processor_kwargs": {"use_image_id": False}}
            (output,) = llm.generate(plain, SHORT, use_tqdm=False)
            assert len(output.prompt_token_ids) == len(together[2].prompt_token_ids) - 6  # <image_id>0</image_id> twice
    with LLM(tmp_path, use_tqdm_on_load=False, max_num_batched_tokens=13, enable_prefix_caching=False) as llm:
        again = llm.generate(prompts, images.GREEDY, use_tqdm=False)
        assert [images.bits(output) for output in again] == [images.bits(output) for output in together]


def test_a_tower_that_draws_its_features_is_refused(tmp_path: Path) -> None:
    images.write("ovis2", tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config["vision_config"]["tokenize_function"] = "gumbel_argmax"
    (tmp_path / "config.json").write_text(json.dumps(config))
    with LLM(tmp_path, use_tqdm_on_load=False) as llm, pytest.raises(LLMError, match="at random"):
        llm.generate(images.asked("ovis2")[1], SHORT, use_tqdm=False)


def test_canvases_of_llama_4_are_those_of_transformers() -> None:
    """(height, width), edge, most, largest -> (rows, columns), from Llama4ImageProcessor, which needs torchvision."""
    expected = {
        ((336, 336), 336, 16, False): (1, 1),
        ((1000, 700), 336, 16, False): (3, 3),
        ((300, 2000), 336, 16, False): (1, 6),
        ((5000, 4000), 336, 16, False): (4, 4),
        ((90, 20), 32, 4, False): (3, 1),
        ((672, 336), 336, 16, True): (5, 3),
    }
    for (size, edge, most, largest), found in expected.items():
        assert best_canvas(size, edge, most, largest) == found


def test_a_placeholder_without_an_image_is_refused(llm: LLM) -> None:
    with pytest.raises(ValidationError, match="tokens for images"):
        llm.generate(MARK, SHORT, use_tqdm=False)
    with pytest.raises(ValidationError, match="tokens for images"):
        llm.chat([{"role": "user", "content": images.placeholder("qwen2_5_vl")}], SHORT, use_tqdm=False)


def test_threads_that_read_pictures_leave_the_filters_of_warnings(llm: LLM) -> None:
    before = list(warnings.filters)
    ask(llm, [png()] * 3, MARK * 3)
    assert list(warnings.filters) == before


def test_a_conversation_has_pictures_of_every_form(llm: LLM, folder: Path) -> None:
    url = f"data:image/png;base64,{base64.b64encode(png()).decode()}"
    parts: list[dict[str, object]] = [
        {"type": "image_url", "image_url": {"url": url}},
        {"type": "image_url", "image_url": "a.png"},
        {"type": "image_url", "image_url": {"url": f"file://{folder / 'a.png'}"}},
        {"type": "image_pil", "image_pil": PICTURE},
        {"type": "image", "image": PICTURE},
    ]
    text = {"type": "text", "text": "what?"}
    messages = [[{"role": "user", "content": [part, text]}] for part in parts]
    outputs = llm.chat(messages, SHORT, use_tqdm=False)
    assert len({tuple(output.outputs[0].token_ids) for output in outputs}) == 1
    (prompt,) = llm.render_chat(messages[0])
    again = llm.generate(prompt, SHORT, use_tqdm=False)
    assert again[0].outputs[0].token_ids == outputs[0].outputs[0].token_ids
    assert "".join(llm.stream_chat(messages[3], SHORT)) == outputs[0].outputs[0].text


def test_other_calls_take_pictures(llm: LLM) -> None:
    prompt = {"prompt": MARK, "multi_modal_data": {"image": PICTURE}}
    expected = ask(llm, PICTURE)
    assert [list(output.outputs[0].token_ids) for output in llm.generate_iter([prompt] * 3, SHORT)] == [expected] * 3
    greedy = llm.beam_search([prompt], BeamSearchParams(beam_width=1, max_tokens=4, ignore_eos=True))
    assert greedy[0].sequences[0].tokens[-4:] == expected
    drawn = llm.generate(prompt, SamplingParams(n=3, temperature=1.0, seed=5, max_tokens=4), use_tqdm=False)[0]
    one = llm.generate(prompt, SamplingParams(n=3, temperature=1.0, seed=5, max_tokens=4), use_tqdm=False)[0]
    assert [own.token_ids for own in drawn.outputs] == [own.token_ids for own in one.outputs]


def features_of(llm: LLM, picture: Any) -> dict[str, torch.Tensor]:
    """What the tower makes of a picture, as a user has it."""
    inputs = llm._preprocessor.images.processor.process(picture, {}).inputs
    found = llm._engine.runner.images.tower.features(inputs)
    grid = {"image_grid_thw": inputs["image_grid_thw"]} if "image_grid_thw" in inputs else {}
    return {"image_embeds": torch.cat([found.rows, *found.deep], 1), **grid}


@pytest.mark.parametrize("name", ["qwen3_vl", "gemma3", "idefics3"])
def test_features_that_the_user_computed_are_those_of_the_picture(name: str, tmp_path: Path) -> None:
    images.write(name, tmp_path)
    mark, pictures = images.wrapped(name), list(images.PICTURES[:2])
    with LLM(tmp_path, use_tqdm_on_load=False) as llm:
        prompt = {"prompt": f"a {mark} b {mark}", "multi_modal_data": {"image": pictures}}
        (expected,) = llm.generate(prompt, SHORT, use_tqdm=False)
        first, second = (features_of(llm, picture) for picture in pictures)
        whole = {"prompt_token_ids": expected.prompt_token_ids, "multi_modal_data": {"image": pictures}}
        assert llm.generate(whole, SHORT, use_tqdm=False)[0].outputs[0].token_ids == expected.outputs[0].token_ids
    forms: list[Any] = [[first, second], [first, pictures[1]], {key: [first[key], second[key]] for key in first}]
    if name == "qwen3_vl":
        forms[2] = {key: torch.cat([first[key], second[key]]) for key in first}
    with LLM(tmp_path, use_tqdm_on_load=False) as llm:
        for form in forms:
            text: dict[str, Any] = {"prompt": prompt["prompt"]}
            if name == "idefics3":
                with pytest.raises(ValidationError, match="pass prompt_token_ids"):
                    llm.generate({**text, "multi_modal_data": {"image": form}}, SHORT, use_tqdm=False)
                text = {"prompt_token_ids": expected.prompt_token_ids}
            (output,) = llm.generate({**text, "multi_modal_data": {"image": form}}, SHORT, use_tqdm=False)
            assert output.outputs[0].token_ids == expected.outputs[0].token_ids
            assert output.prompt_token_ids == expected.prompt_token_ids
        other = {**first, "image_embeds": first["image_embeds"] + 0.5}
        (output,) = llm.generate({**text, "multi_modal_data": {"image": [other, second]}}, SHORT, use_tqdm=False)
        assert output.outputs[0].token_ids != expected.outputs[0].token_ids


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"image_embeds": torch.zeros(4, 47)}, "47 channels and the model has 48"),
        ({"image_embeds": torch.zeros(4, 48)}, "need image_grid_thw"),
        ({"image_embeds": torch.zeros(4), "image_grid_thw": [1, 4, 4]}, r"floats \[tokens, channels\]"),
        ({"image_embeds": torch.full((4, 48), torch.nan)}, "not finite"),
        ({"image_embeds": "AAAA"}, "a pickled one is not read"),
        ({"image_embeds": torch.zeros(4, 48), "grid": 1}, "got 'grid'"),
    ],
)
def test_features_that_do_not_fit_are_refused(llm: LLM, given: dict[str, Any], said: str) -> None:
    with pytest.raises(ValidationError, match=said):
        ask(llm, given)
    with pytest.raises(ValidationError, match=said):
        llm.chat(
            [{"role": "user", "content": [{"type": "image_embeds", "image_embeds": given}]}], SHORT, use_tqdm=False
        )


def test_a_uuid_stands_for_a_picture_that_came_before(llm: LLM) -> None:
    named = {"multi_modal_uuids": {"image": "page 1"}}
    assert ask(llm, PICTURE, **named) == ask(llm, None, **named)
    with pytest.raises(ValidationError, match="'page 1' was that of another image"):
        ask(llm, images.PICTURES[1], **named)
    with pytest.raises(ValidationError, match="no image with the uuid 'page 2' came before"):
        ask(llm, None, multi_modal_uuids={"image": "page 2"})


@pytest.mark.parametrize(
    ("image", "text", "more", "said"),
    [
        (PICTURE, "no place", {}, "has 0 of the placeholder '<|image_pad|>' and 1 image;"),
        (PICTURE, MARK * 2, {}, "has 2 of the placeholder '<|image_pad|>' and 1 image;"),
        ([PICTURE] * 4, MARK * 4, {}, "4 images and limit_mm_per_prompt allows 3"),
        (images.picture(201, 8), MARK, {}, "201x8 pixels and limit_mm_per_prompt allows 200x200"),
        (b"no picture", MARK, {}, "none of JPEG, PNG"),
        (png()[:200], MARK, {}, "truncated"),
        ("/no/such.png", MARK, {}, "No such file"),
        ([PICTURE, 5], MARK * 2, {}, "image 1: an image must be a PIL image, a path, bytes"),
        (PICTURE, MARK, {"mm_processor_kwargs": {"sise": 1}}, "no key 'sise'.*did you mean 'size'"),
        (PICTURE, MARK, {"multi_modal_uuids": {"image": ["a", "b"]}}, "as many as there are images"),
        (animation(), MARK, {}, "2 frames and must have one; pass its frames as images"),
        (lazy(animation()), MARK, {}, r"2 frames and must have one; pass the copy\(\) of a frame"),
        ([], MARK, {}, r"1 of the model's tokens for images \(id 264\) and no image"),
        (PICTURE, MARK + "x" * 1300, {}, "max_model_len is 1024"),
        ([PICTURE] * 2, "<|image_pad|>" * 2, {}, "no token between them"),
    ],
)
def test_a_mistake_is_one_sentence_before_anything_runs(
    llm: LLM, image: object, text: str, more: dict[str, Any], said: str
) -> None:
    with pytest.raises(ValidationError, match=f"(?i){said}") as caught:
        ask(llm, image, text, **more)
    assert "\n" not in str(caught.value)
    outputs = llm.generate(
        ["text", {"prompt": text, "multi_modal_data": {"image": image}, **more}],
        SHORT,
        use_tqdm=False,
        on_error="return",
    )
    assert outputs[0].error is None and outputs[1].error is not None


@pytest.mark.parametrize(
    ("part", "said"),
    [
        ({"type": "image_url", "image_url": {"url": "https://a.b/c.png"}}, "on a network"),
        ({"type": "image_url", "image_url": "../../../etc/passwd"}, "is not below allowed_local_media_path"),
        ({"type": "image_url", "image_url": {"url": "data:image/png,abc"}}, "must be data:image/"),
        ({"type": "video_url", "video_url": "a.mp4"}, "pass the list of the frames"),
        ({"type": "image_pil"}, "must have the image under 'image_pil'"),
    ],
)
def test_a_part_of_a_conversation_that_is_no_picture_is_refused(llm: LLM, part: dict[str, Any], said: str) -> None:
    with pytest.raises(ValidationError, match=said):
        llm.chat([{"role": "user", "content": [part]}], SHORT, use_tqdm=False)


def test_a_closed_llm_keeps_no_tower_and_no_thread(folder: Path) -> None:
    before = set(threading.enumerate())
    with LLM(folder, use_tqdm_on_load=False) as llm:
        ask(llm, PICTURE)
        tower = llm._engine.runner.images.tower
        assert sum(weight.numel() for weight in tower.parameters()) > 0
    assert sum(weight.numel() for weight in tower.parameters()) == 0
    assert not [thread for thread in set(threading.enumerate()) - before if thread.name.startswith("llm-images")]


@pytest.mark.parametrize("call", ["loglikelihood", "classify_choices", "perplexity"])
def test_scoring_refuses_pictures(llm: LLM, call: str) -> None:
    prompts = [{"prompt": MARK, "multi_modal_data": {"image": PICTURE}}]
    more = {"loglikelihood": [["a"]], "classify_choices": [["a", "b"]], "perplexity": []}[call]
    with pytest.raises(ValidationError, match="takes no images"):
        getattr(llm, call)(prompts, *more)


def test_a_model_without_a_tower_refuses_pictures() -> None:
    with LLM() as llm, pytest.raises(ValidationError, match="reads no images"):
        ask(llm, PICTURE)


def test_the_tower_is_read_with_the_first_picture_and_features_are_kept(folder: Path) -> None:
    with LLM(folder, use_tqdm_on_load=False, quantization="w8a8") as llm:
        llm.generate("text alone", SHORT, use_tqdm=False)
        rows = llm._engine.runner.images
        assert rows._tower is None
        first = ask(llm, PICTURE)
        rows.tower.features = None  # the second answer computes none
        assert ask(llm, PICTURE) == first


def test_an_endpoint_reads_pictures_as_data(llm: LLM) -> None:
    """A client's URLs lead to no network, and to no file but those that may be read."""
    url = "data:image/png;base64," + base64.b64encode(png()).decode()

    def sent(image: object) -> dict[str, object]:
        parts = [{"type": "image_url", "image_url": image}, {"type": "text", "text": "What is it?"}]
        return {"messages": [{"role": "user", "content": parts}], "max_tokens": 4, "temperature": 0, "ignore_eos": True}

    part = {"type": "image_pil", "image_pil": PICTURE}
    conversation: Any = [{"role": "user", "content": [part, {"type": "text", "text": "What is it?"}]}]
    (expected,) = llm.chat(conversation, SHORT, use_tqdm=False)
    endpoint = Endpoint(AsyncLLM(llm), ("eyes",))
    with TestClient(endpoint.app(), base_url="http://localhost") as client:
        for image in ({"url": url}, {"url": url, "detail": "auto"}, {"url": "file://a.png"}):
            found = client.post("/v1/chat/completions", json=sent(image)).json()
            assert found["choices"][0]["message"]["content"] == expected.outputs[0].text, found
            assert found["usage"]["prompt_tokens"] == len(expected.prompt_token_ids or ())
        for image, said in (
            ({"url": "https://example.org/a.png"}, "nothing is fetched"),
            ({"url": "file:///etc/hostname"}, "not below allowed_local_media_path"),
            ({"url": "../../etc/hostname"}, "not below allowed_local_media_path"),
            ({"url": url[:-40]}, "cannot be decoded"),
            ({"url": 5}, "must be a string"),
            (None, "must have the image"),
        ):
            response = client.post("/v1/chat/completions", json=sent(image))
            assert response.status_code == 400 and said in response.json()["error"]["message"], image
        assert endpoint.num_running == 0


def test_an_adapter_of_the_tower_is_refused(folder: Path, tmp_path: Path) -> None:
    import json

    from safetensors.torch import save_file

    from llm.inputs import LoRARequest

    config = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "target_modules": ["qkv"], "task_type": "CAUSAL_LM"}
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    name = "base_model.model.model.visual.blocks.0.attn.qkv"
    pair = {f"{name}.lora_A.weight": torch.ones(2, 16), f"{name}.lora_B.weight": torch.ones(48, 2)}
    save_file(pair, str(tmp_path / "adapter_model.safetensors"))
    with LLM(folder, use_tqdm_on_load=False, enable_lora=True) as llm, pytest.raises(LLMError, match="vision tower"):
        llm.generate("a", SHORT, use_tqdm=False, lora_request=LoRARequest("a", 1, str(tmp_path)))


@pytest.mark.parametrize("name", ["qwen2_5_vl", "gemma3"])
def test_vectors_of_prompts_with_pictures_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    """The last token's hidden state, alone and in a batch; scores are the cosines."""
    import numpy as np

    model = images.write(name, tmp_path)
    prompts = images.asked(name)
    with LLM(tmp_path, use_tqdm_on_load=False, runner="pooling", max_num_batched_tokens=64) as llm:
        outputs = llm.embed(prompts, use_tqdm=False)
        found = outputs.to_numpy()
        alone = np.concatenate([llm.embed(prompt, use_tqdm=False).to_numpy() for prompt in prompts])
        assert same_values(found, alone)
        for prompt, output, vector in zip(prompts, outputs, found, strict=True):
            inputs = images.theirs(llm, prompt, output)
            with torch.inference_mode():
                hidden = model(**inputs, output_hidden_states=True).hidden_states[-1][0, -1]
            expected = torch.nn.functional.normalize(hidden, dim=-1).numpy()
            assert np.abs(vector - expected).max() < images.TOLERANCE
        scores = llm.score("hello", prompts[1:], use_tqdm=False).to_numpy()
        text = llm.embed("hello", use_tqdm=False).to_numpy()[0]
        assert np.allclose(scores, found[1:] @ text, atol=1e-6) and len(set(scores.tolist())) == len(scores)
        bad = {"prompt": "no place", "multi_modal_data": {"image": PICTURE}}
        with pytest.raises(ValidationError, match="has 0 of the placeholder"):
            llm.embed(["text", bad], use_tqdm=False)
        with pytest.raises(ValidationError, match="cannot be cut"):
            llm.embed(prompts[1], pooling_params=PoolingParams(truncate_prompt_tokens=3), use_tqdm=False)
        assert llm.embed("hello", use_tqdm=False).to_numpy().tolist() == [text.tolist()]


def test_a_tower_can_be_quantized(folder: Path) -> None:
    prompts = images.asked("qwen2_5_vl")[1:]
    features = {}
    for tower in (None, "w8a8", "fp8"):
        with LLM(folder, use_tqdm_on_load=False, quantization={"scheme": "w8a8", "tower": tower}) as llm:
            together = [output.outputs[0].token_ids for output in llm.generate(prompts, SHORT, use_tqdm=False)]
            alone = [llm.generate(prompt, SHORT, use_tqdm=False)[0].outputs[0].token_ids for prompt in prompts]
            assert together == alone
            features[tower] = features_of(llm, PICTURE)["image_embeds"]
            kinds = {type(layer.quant_method).__name__ for layer in linear_layers(llm)}
            assert len(kinds) == 1 and ("Unquantized" in kinds.pop()) == (tower is None)
    for tower in ("w8a8", "fp8"):
        assert not torch.equal(features[tower], features[None])
        assert torch.cosine_similarity(features[tower], features[None], dim=-1).min() > 0.98


def linear_layers(llm: LLM) -> list[Any]:
    tower = llm._engine.runner.images.tower
    return [module for module in tower.modules() if hasattr(module, "quant_method")]


def test_a_scheme_for_no_tower_is_refused(folder: Path) -> None:
    with pytest.raises(ValidationError, match="vision tower, which this model does not have"):
        LLM(quantization={"scheme": "w8a8", "tower": "w8a8"})
    with pytest.raises(ValidationError, match="tower='w4a16'; the vision tower can be 'w8a8'"):
        LLM(folder, quantization={"scheme": "w8a8", "tower": "w4a16"})
