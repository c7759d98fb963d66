"""The method of `LLM` that answers a file's rows into another file, and what identifies the model to a journal.

Owns the method; `llm.jobs` has the job.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from llm.api.flow import FlowHost
from llm.base.bar import UseTqdm
from llm.base.names import known_names
from llm.base.types import JsonObject
from llm.config.engine import EngineArgs
from llm.loading.source import ModelSource
from llm.sampling_params import SamplingParams

if TYPE_CHECKING:
    from llm.jobs.job import JobSummary


class JobsHost(FlowHost, Protocol):
    """Attributes:
    _args: what the engine was built from.
    _source: where its weights came from; None: they are random.
    _weights: their fingerprint, "" until it is needed.
    """

    _args: EngineArgs
    _source: ModelSource | None
    _weights: str

    def _identity(self) -> JsonObject: ...
    def _fingerprint(self) -> str: ...


class Jobs:
    _weights = ""

    @known_names("LLM.run")
    def run(
        self: JobsHost,
        input: str | Path,
        output: str | Path,
        sampling_params: SamplingParams | None = None,
        *,
        column: str | None = None,
        template: str | None = None,
        resume: bool = False,
        shard: str | None = None,
        on_error: str = "return",
        on_too_long: str = "error",
        use_tqdm: UseTqdm = True,
    ) -> JobSummary:
        """Answer the rows of a file into another; after Ctrl-C, SIGTERM, a crash or a full disk, `resume=True` goes on.

        Input: OpenAI's batch format (JSONL; chat completions and completions), or JSONL, CSV or Parquet with a prompt
        per row. The output has a row for each, in order; it appears when it is complete, and is to the byte that of a
        run that nothing interrupted. Until then the answers are in OUTPUT.journal. Seeds are derived from the row.

        Args:
            sampling_params: of all rows, and of a batch where a body says nothing; None: the model's defaults.
            column: which has the prompts; None: "prompt", or else "messages", conversations.
            template: makes the prompt from columns: "Translate: {text}".
            resume: go on with the journal of an interrupted run.
            shard: "i/n" answers every n-th row from the i-th on, from 0; `python -m llm merge OUTPUT` joins the parts.
            on_error: "return" answers bad rows with an error; "raise" refuses the input, and names them.
            on_too_long: as for `generate`.

        Raises:
            JobError: a file is wrong, or cannot be written; or the journal is of another model or setting.
            JobInterrupted: Ctrl-C or SIGTERM; the journal has everything, half answers too.
        """
        from llm.jobs.run import JobFiles, RunOptions, run_job

        params = self.get_default_sampling_params() if sampling_params is None else sampling_params
        options = RunOptions(params, column, template, resume, shard, on_error, on_too_long, use_tqdm)
        files = JobFiles.of(input, output, options)
        return run_job(self, files, options, self._identity(), Path(self._args.model).name)

    def _identity(self: JobsHost) -> JsonObject:
        from llm.jobs.identity import identity

        config = self._open_engine().config
        return identity(self._args, config, self._fingerprint(), self._preprocessor.logits_processors)

    def _fingerprint(self: JobsHost) -> str:
        """Of the weights; they are read for it once."""
        from llm.jobs.identity import fingerprint

        if not self._weights:
            self._weights = "random" if self._source is None else fingerprint(self._source)
        return self._weights
