"""`LLM.generate(checkpoint=...)`: a journal of the outputs of a call.

The rows that the journal has are found by their keys, so prompts may be added, left out or moved as long as their
tokens and parameters, seeds included, stay the same.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

from llm.base.checks import refuse
from llm.calls.flow import Entry
from llm.engine.output import PromptState
from llm.engine.rows import AnyRow, RefusedRow
from llm.errors import JobError
from llm.jobs.identity import row_key
from llm.jobs.journal import Journal, Partials, RowRecord, output_from_json
from llm.output_formats import output_as_json
from llm.outputs import RequestOutput


class Checkpoint:
    """The open journal of a call.

    Raises:
        JobError: the journal is of another model or setting, in use, or cannot be written.
    """

    def __init__(self, path: object, identity: Mapping[str, object]) -> None:
        if not isinstance(path, str | Path):
            refuse("checkpoint", path, "the path of a file, or None")
        path = Path(path)
        if not path.parent.is_dir():
            raise JobError(f"{path.parent} is no folder; make it, or choose another place for the checkpoint.")
        self._identity = identity
        self._journal = Journal(path, identity)
        self._keys: dict[int, str] = {}  # of the rows that run
        self._partials = Partials(self._journal, self._keys.get)
        self._known: dict[str, RowRecord] = {}
        for record in self._journal.records():
            answer = self._known.setdefault(record["k"], RowRecord(record["k"]))
            if "o" in record:
                answer.output, answer.tokens = record["o"], []
            elif answer.output is None:
                answer.extend(record["p"])

    def entries(self, rows: Sequence[AnyRow]) -> list[Entry]:
        """`rows` with the outputs that the journal has in their places.

        Raises:
            ValidationError: the parameters of a row cannot be recorded.
        """
        try:
            return [self._entry(row) for row in rows]
        except BaseException:
            self._journal.close()
            raise

    def _entry(self, row: AnyRow) -> Entry:
        """The row's output if the journal has it; else the row, which continues from its tokens in the journal."""
        if isinstance(row, RefusedRow):
            return row
        key = row_key(row, self._identity)
        known = self._known.get(key)
        if known is not None and known.output is not None:
            params = row.params.copy_validated()
            params.structure = None  # an output has plain data only
            return output_from_json({**known.output, "index": row.index, "prompt": row.prompt}, params)
        self._keys[row.index] = key
        if known is not None:
            self._partials.written[row.index] = known.continued_by(row)
        return row

    def keep(self, output: RequestOutput) -> None:
        self._journal.add({"i": output.index, "k": self._keys.pop(output.index), "o": output_as_json(output)})
        self._journal.flush()

    def after_step(self, states: Collection[PromptState]) -> None:
        self._partials.after_step(lambda: states)

    def end(self, states: Collection[PromptState]) -> None:
        """Write what there is of rows that have not ended, and close the journal."""
        try:
            self._partials.write(states)
            self._journal.flush(sync=True)
        finally:
            self._journal.close()
