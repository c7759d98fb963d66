"""lm-evaluation-harness on an `LLM`: importing this module registers the model "offline_llm" (`pip install lm-eval`).

    python -m llm.lm_eval run --model offline_llm --model_args pretrained=FOLDER,quantization=w8a8 --tasks hellaswag

is the harness's own command. In Python: `lm_eval.simple_evaluate(model=OfflineLLM(llm=llm), tasks=[...])`.

Tokens are those of the harness's "hf" model; all requests of a call are one batch.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from llm.base.checks import refuse
from llm.base.optional import optional_package
from llm.config.engine_args import EngineArgs
from llm.llm import LLM
from llm.logger import init_logger
from llm.sampling_params import SamplingParams

if TYPE_CHECKING:
    from lm_eval.api.instance import Instance

optional_package("lm_eval", "lm-eval")

from lm_eval.api.model import TemplateLM  # noqa: E402
from lm_eval.api.registry import register_model  # noqa: E402
from lm_eval.models.utils import (  # noqa: E402
    handle_stop_sequences,
    normalize_gen_kwargs,
    postprocess_generated_text,
)
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window  # noqa: E402

logger = init_logger("llm")

# (a request's context and continuation as text, or None, and both as token ids)
Pair = tuple[tuple[str, str] | None, list[int], list[int]]


@register_model("offline_llm")
class OfflineLLM(TemplateLM):
    """An `LLM` as a model of the harness.

    Args:
        pretrained: the model, as `LLM(model)`; `model` is the same.
        llm: a model that is open already, instead.
        max_gen_toks: most tokens of an answer whose task sets none.
        batch_size, max_batch_size: not used; the engine forms the batches.
        device: as for `LLM`; but "cuda:0" is what the harness passes where nothing is given, and means "auto".
        arguments: further ones of `LLM`.
    """

    def __init__(
        self,
        pretrained: str | None = None,
        *,
        model: str | None = None,
        llm: LLM | None = None,
        max_gen_toks: int = 256,
        batch_size: object = None,
        max_batch_size: object = None,
        device: str | None = None,
        **arguments: object,
    ) -> None:
        super().__init__()
        if llm is None:
            name = model or pretrained
            if name is None:
                refuse("pretrained", None, "a model's folder or name")
            arguments["device"] = "auto" if device in (None, "cuda:0") else device
            llm = LLM.from_engine_args(EngineArgs(name, **arguments))
        elif arguments or model or pretrained:
            refuse("llm", llm, "given alone, as it has its arguments already")
        self.llm = llm
        self.tokenizer = llm.get_tokenizer()
        self.max_gen_toks = max_gen_toks
        # One token is always generated.
        self.max_length = llm.config.model_config.max_model_len - 1

    @property
    def eot_token_id(self) -> int:
        return int(self.tokenizer.eos_token_id)

    @property
    def prefix_token_id(self) -> int:
        """What a text without context is conditioned on."""
        start = self.tokenizer.bos_token_id
        return self.eot_token_id if start is None else int(start)

    @property
    def tokenizer_name(self) -> str:
        return str(self.tokenizer.name_or_path).replace("/", "__")

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        [prompt] = self.llm.render_chat(
            chat_history,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=not add_generation_prompt,
        )
        return prompt["prompt"]

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **ignored: object) -> list[int]:
        """With special tokens, unless the text has its first one already or the caller wants none."""
        start = self.tokenizer.bos_token
        if add_special_tokens is None:
            add_special_tokens = not (start and string.startswith(start))
        return list(self.tokenizer.encode(string, add_special_tokens=add_special_tokens))

    def loglikelihood_rolling(self, requests: Sequence[Instance], disable_tqdm: bool = False) -> list[float]:
        windows: list[list[Pair]] = []
        for request in requests:
            spans = get_rolling_token_windows(
                token_list=self.tok_encode(request.args[0]),
                prefix_token=self.prefix_token_id,
                max_seq_len=self.max_length - 1,
                context_len=1,
            )
            windows.append([(None, *make_disjoint_window(span)) for span in spans])
        scored = iter(self._loglikelihood_tokens(list(itertools.chain(*windows)), disable_tqdm=disable_tqdm))
        totals = [sum(next(scored)[0] for _ in own) for own in windows]
        for request, total in zip(requests, totals, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, total)
        return totals

    def generate_until(self, requests: Sequence[Instance], disable_tqdm: bool = False) -> list[str]:
        prompts, params = [], []
        for request in requests:
            context, options = request.args
            own = self._sampling_params(options)
            prompts.append(
                {"prompt_token_ids": self.tok_encode(context)[(own.max_tokens or 0) - self.max_length - 1 :]}
            )
            params.append(own)
        outputs = self.llm.generate(prompts, params, use_tqdm=not disable_tqdm)
        texts = [
            postprocess_generated_text(output.outputs[0].text, own.stop, None)
            for output, own in zip(outputs, params, strict=True)
        ]
        for request, text in zip(requests, texts, strict=True):
            self.cache_hook.add_partial("generate_until", request.args, text)
        return texts

    def _sampling_params(self, options: dict[str, object]) -> SamplingParams:
        given = dict(normalize_gen_kwargs(options, default_max_gen_toks=self.max_gen_toks))
        stop = handle_stop_sequences(given.pop("until", None), eos=self.tokenizer.decode([self.eot_token_id]))
        most = min(int(given.pop("max_gen_toks")), self.max_length)
        if not given.pop("do_sample", None):  # the harness leaves the temperature out where it means 0
            given["temperature"] = 0.0
        return SamplingParams(max_tokens=most, stop=list(filter(None, stop)), skip_special_tokens=False, **given)

    def _loglikelihood_tokens(
        self, requests: Sequence[Pair], disable_tqdm: bool = False, **ignored: object
    ) -> list[tuple[float, bool]]:
        """Of contexts that are too long, the first tokens are cut."""
        answers: list[tuple[float, bool]] = [(0.0, True)] * len(requests)
        places = [place for place, (_, _, tail) in enumerate(requests) if tail]
        heads, tails, num_cut = [], [], 0
        for place in places:
            _, head, tail = requests[place]
            whole = (head + tail)[-self.max_length :]
            num_cut += len(whole) < len(head) + len(tail)
            border = max(1, len(whole) - len(tail))
            heads.append(whole[:border])
            tails.append(whole[border:])
        if num_cut:
            logger.warning("%d contexts are too long for max_model_len; their first tokens are cut.", num_cut)
        outputs = self.llm.loglikelihood(heads, tails, use_tqdm=not disable_tqdm)
        for place, output in zip(places, outputs, strict=True):
            answers[place] = output.logprob, output.is_greedy
        for (texts, _, _), answer in zip(requests, answers, strict=True):
            if texts is not None:
                self.cache_hook.add_partial("loglikelihood", texts, answer)
        return answers


if __name__ == "__main__":
    from lm_eval.__main__ import cli_evaluate

    sys.exit(cli_evaluate())
