"""The method of `LLM` that answers a file's rows into another file, and what identifies the model to a journal.

Owns the method; `llm.jobs` has the job.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from llm.api.adapters import adapters_of
from llm.api.flow import FlowHost
from llm.base.bar import UseTqdm
from llm.base.checks import known_names
from llm.base.types import JsonObject
from llm.config.engine import EngineArgs
from llm.engine.boundary import PoolingPlan
from llm.inputs import LoRARequest
from llm.loading.source import ModelSource
from llm.pooling_params import PoolingParams
from llm.sampling_params import SamplingParams

if TYPE_CHECKING:
    from llm.jobs.job import JobSummary
    from llm.jobs.requests import JobAdapters


class JobsHost(FlowHost, Protocol):
    """Attributes:
    _args: what the engine was built from.
    _source: where its weights came from; None: they are random.
    _weights: their fingerprint, "" until it is needed.
    _pooling: what a model makes of hidden states; None: it generates.
    """

    _args: EngineArgs
    _source: ModelSource | None
    _weights: str
    _pooling: PoolingPlan | None

    def _identity(self) -> JsonObject: ...
    def _fingerprint(self) -> str: ...
    def _job_adapters(self, lora_modules: object, lora_request: object) -> JobAdapters: ...


class Jobs:
    _weights = ""

    @known_names("LLM.run")
    def run(
        self: JobsHost,
        input: str | Path,
        output: str | Path,
        sampling_params: SamplingParams | None = None,
        *,
        pooling_params: PoolingParams | None = None,
        lora_request: LoRARequest | None = None,
        lora_modules: Mapping[str, str | Path] | None = None,
        column: str | None = None,
        template: str | None = None,
        resume: bool = False,
        shard: str | None = None,
        on_error: str = "return",
        on_too_long: str = "error",
        row_params: bool = False,
        use_tqdm: UseTqdm = True,
    ) -> JobSummary:
        """Answer the rows of a file into another; after Ctrl-C, SIGTERM, a crash or a full disk, `resume=True` goes on.

        Input: OpenAI's batch format (JSONL; chat completions, completions, embeddings), or JSONL, CSV or Parquet with a
        prompt per row. The output has a row for each, in order; it appears when it is complete, and is to the byte that
        of a run that nothing interrupted. Until then the answers are in OUTPUT.journal. Seeds are derived from the row.
        A model that pools answers with vectors, classes, or scores of pairs (columns text_1 and text_2).

        Args:
            sampling_params: of all rows, and of a batch where a body says nothing; None: the model's defaults.
            pooling_params: the same for a model that pools.
            lora_request: the adapter of all rows (`enable_lora`).
            lora_modules: folders of adapters by name; a row of a batch names one as its `model`, another row in a
                column lora_name, and those that name none or the model have none.
            column: which has the prompts; None: "prompt", or else "messages", conversations.
            template: makes the prompt from columns: "Translate: {text}".
            resume: go on with the journal of an interrupted run.
            shard: "i/n" answers every n-th row from the i-th on, from 0; `python -m llm merge OUTPUT` joins the parts.
            on_error: "return" answers bad rows with an error; "raise" refuses the input, and names them.
            on_too_long: as for `generate`.
            row_params: columns with the names of parameters (max_tokens, temperature, ...) are those of their rows.

        Raises:
            JobError: a file is wrong, or cannot be written; or the journal is of another model or setting.
            JobInterrupted: Ctrl-C or SIGTERM; the journal has everything, half answers too.
        """
        from llm.jobs.job import JobDefaults, JobFiles, RunOptions, run_job

        options = RunOptions(column, template, resume, shard, on_error, on_too_long, row_params, use_tqdm)
        adapters = self._job_adapters(lora_modules, lora_request)
        default = self.get_default_sampling_params
        defaults = JobDefaults.of(self._pooling, sampling_params, pooling_params, adapters, default)
        files = JobFiles.of(input, output, options)
        return run_job(self, files, options, defaults, self._identity(), Path(self._args.model).name)

    def _job_adapters(self: JobsHost, lora_modules: object, lora_request: object) -> JobAdapters:
        """What `run` was given, checked: adapters that cannot be used are told before any work starts."""
        from llm.jobs.requests import JobAdapters

        model = str(self._args.model)
        adapters = JobAdapters.of(lora_modules, lora_request, (Path(model).name, model))
        with self._exclusive():
            adapters_of(self._begin(), adapters.all(), len(adapters.all()))
        return adapters

    def _identity(self: JobsHost) -> JsonObject:
        from llm.jobs.identity import identity, pooling_identity

        config = self._open_engine().config
        found = identity(self._args, config, self._fingerprint(), self._preprocessor.logits_processors)
        return found | pooling_identity(self._pooling)

    def _fingerprint(self: JobsHost) -> str:
        """Of the weights; they are read for it once."""
        from llm.jobs.identity import fingerprint

        if not self._weights:
            self._weights = "random" if self._source is None else fingerprint(self._source)
        return self._weights
