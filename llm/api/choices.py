"""The method of `LLM` that chooses among given answers, with probabilities.

Owns the method, as a base class of `LLM` without state.
"""

from __future__ import annotations

from llm.api.adapters import LoRARequests, give_adapters, requests_per_row
from llm.api.host import Host
from llm.api.scoring import score_rows
from llm.base.bar import UseTqdm
from llm.base.checks import check_choice, known_names, refuse
from llm.engine.interrupt import InterruptGuard
from llm.engine.progress import check_use_tqdm
from llm.engine.scoring import LENGTHS, choice_output, likelihood, question_rows, questions
from llm.outputs import ChoiceOutput


class Choices:
    @known_names("LLM.classify_choices")
    def classify_choices(
        self: Host,
        prompts: object,
        choices: object,
        *,
        normalize: str | None = None,
        delimiter: str = " ",
        lora_request: LoRARequests = None,
        use_tqdm: UseTqdm = True,
    ) -> list[ChoiceOutput]:
        """The likeliest of some answers to each prompt, and the probability of each answer.

        All prompts and choices are one batch; a prompt is computed once, whatever the number of its choices. Nothing is
        generated, so every prompt gets a label, and the probabilities of its choices sum to 1.

        A choice's score is the log-likelihood of its tokens after the prompt, divided by its length if `normalize` says
        so; the label has the highest score, and the probabilities are the softmax of the scores. Tokens, scores and
        labels are those of lm-evaluation-harness: the label counts in its `acc` (None), `acc_norm` ("characters") or
        `acc_bytes` ("bytes").

        Args:
            prompts: as for `generate`; of a conversation, `render_chat(messages)`, with delimiter="".
            choices: texts, the same for all prompts, or one list of texts per prompt.
            normalize: divide by the number of "characters" or "bytes" of the choice, without the delimiter: long
                choices are less likely because they are long. Such probabilities rank choices, but are not those of
                the model.
            delimiter: between prompt and choice, the harness's `target_delimiter`.
            lora_request: as for `generate`.
            use_tqdm: as for `generate`.

        Raises:
            ValidationError: names the first bad prompt or choice, before any work starts.
            GenerationInterrupted: Ctrl-C.
        """
        check_use_tqdm(use_tqdm)
        if normalize is not None:
            check_choice("normalize", normalize, [str(name) for name in LENGTHS if name])
        if not isinstance(delimiter, str):
            refuse("delimiter", delimiter, "a text")
        with InterruptGuard() as guard, self._exclusive():
            engine = self._begin()
            asked = questions(prompts, choices)
            rows = question_rows(self._preprocessor, asked, delimiter)
            adapters = requests_per_row(lora_request, len(asked))
            per_choice = [own for own, item in zip(adapters, asked, strict=True) for _ in item.choices]
            give_adapters(engine, rows, per_choice)
            outputs = score_rows(self, rows, use_tqdm, guard)
        scored = iter([likelihood(row, output) for row, output in zip(rows, outputs, strict=True)])
        return [choice_output(question, [next(scored) for _ in question.choices], normalize) for question in asked]
