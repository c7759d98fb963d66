"""Logits processors: the interface, the state that follows the batch, adapters for request-level callables."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from llm.sampling.logits_processors import (
    AdapterLogitsProcessor,
    BatchUpdate,
    BatchUpdateBuilder,
    MoveDirectionality,
    process_dict_updates,
)
from llm.sampling_params import SamplingParams

UNIDIRECTIONAL, SWAP = MoveDirectionality.UNIDIRECTIONAL, MoveDirectionality.SWAP


def test_the_builder_gives_the_lowest_removed_row_first_and_refuses_removals_after_the_first_look() -> None:
    builder = BatchUpdateBuilder()
    for row in (3, 7, 1):
        builder.removed_append(row)
    assert builder.batch_changed and builder.has_removed()
    assert builder.peek_removed() == builder.pop_removed() == 1
    assert builder.removed == [7, 3]
    with pytest.raises(RuntimeError, match="has been read"):
        builder.removed_append(5)
    builder.moved.append((9, 3, UNIDIRECTIONAL))
    update = builder.get_and_reset(8)
    assert update == BatchUpdate(8, [7, 3], [], [(9, 3, UNIDIRECTIONAL)])
    builder.removed_append(0)
    assert update.removed == [7, 3]
    assert builder.reset() and not builder.reset()
    assert builder.peek_removed() is None and builder.pop_removed() is None
    assert builder.get_and_reset(8) is None
    builder.removed_append(2)


def test_a_removal_that_is_replaced_is_an_add_alone() -> None:
    builder = BatchUpdateBuilder()
    builder.removed_append(2)
    row = builder.pop_removed()
    assert row == 2
    builder.added.append((row, SamplingParams(), [1], []))
    update = builder.get_and_reset(3)
    assert update is not None and (update.removed, update.moved) == ([], [])
    assert [added[0] for added in update.added] == [2]


CHANGES = st.lists(
    st.tuples(
        st.sets(st.integers(0, 5)),
        st.dictionaries(st.integers(0, 5), st.integers(0, 2)),
        st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5), st.sampled_from(list(MoveDirectionality)))),
    ),
    max_size=4,
)


@given(changes=CHANGES)
def test_a_dict_follows_the_batch_as_a_list_of_places_would(changes: list[Any]) -> None:
    """Rows with no state (0 here) leave no entry, wherever they go."""
    places = [0] * 6
    entries: dict[int, int] = {}
    for removed, added, moved in changes:
        before = dict(entries)
        moved = [move for move in moved if move[0] != move[1]]
        update = BatchUpdate(
            6,
            sorted(removed, reverse=True),
            [(row, SamplingParams(), None, [value]) for row, value in added.items()],
            moved,
        )
        changed = process_dict_updates(entries, update, lambda params, prompt, output: output[0] or None)
        for row in removed:
            places[row] = 0
        for row, value in added.items():
            places[row] = value
        for source, target, direction in moved:
            kept = places[target] if direction is SWAP else 0
            places[target], places[source] = places[source], kept
        assert entries == {row: value for row, value in enumerate(places) if value}
        assert changed or entries == before
    assert process_dict_updates(entries, None, lambda *args: 1) is False


class Adapter(AdapterLogitsProcessor):
    """The callable a request names in its `extra_args`."""

    def is_argmax_invariant(self) -> bool:
        return False

    def new_req_logits_processor(self, params: SamplingParams) -> Any:
        if params.extra_args is None:
            return None
        return params.extra_args["make"]() if "make" in params.extra_args else params.extra_args["function"]


def adapter_with(*functions: Any) -> Adapter:
    adapter = Adapter(None, torch.device("cpu"), False)  # type: ignore[arg-type]
    params = [SamplingParams(extra_args=function and {"function": function}) for function in functions]
    added = [(row, own, [10, row], [20 + row]) for row, own in enumerate(params)]
    adapter.update_state(BatchUpdate(len(functions), [], added, []))
    return adapter


class ThreeArguments:
    def __call__(self, prompt: list[int], output: list[int], logits: torch.Tensor) -> torch.Tensor:
        logits[:] = sum(prompt) + sum(output)
        return logits


def two_arguments(output: list[int], logits: torch.Tensor, scale: float = 2.0) -> torch.Tensor:
    return logits * scale * sum(output)


def test_callables_of_two_and_of_three_arguments_see_their_own_row() -> None:
    adapter = adapter_with(two_arguments, None, ThreeArguments())
    logits = adapter.apply(torch.ones(3, 4))
    assert logits[:, 0].tolist() == [40.0, 1.0, 34.0]
    assert sorted(adapter.req_info) == [0, 2] and not adapter.is_idle()
    assert adapter_with(None).is_idle()


def wrong_shape(output: list[int], logits: torch.Tensor) -> torch.Tensor:
    return logits[:2]


def wrong_type(output: list[int], logits: torch.Tensor) -> Any:
    return None


def raises(output: list[int], logits: torch.Tensor) -> torch.Tensor:
    raise KeyError("mine")


@pytest.mark.parametrize(("function", "kind"), [(wrong_shape, ValueError), (wrong_type, TypeError), (raises, KeyError)])
def test_what_a_callable_raises_is_its_rows_affair(function: Callable[..., Any], kind: type[Exception]) -> None:
    adapter = adapter_with(two_arguments, function, two_arguments)
    logits = adapter.apply(torch.ones(3, 4))
    assert list(adapter.row_errors) == [1] and isinstance(adapter.row_errors[1], kind)
    assert logits[:, 0].tolist() == [40.0, 1.0, 44.0]


def test_a_factory_that_raises_ends_its_row_wherever_that_has_moved() -> None:
    adapter = adapter_with(None)

    def make() -> Any:
        raise OSError("no such table")

    params = SamplingParams(extra_args={"make": make})
    adapter.update_state(BatchUpdate(2, [], [(5, params, [1], [])], [(5, 1, UNIDIRECTIONAL)]))
    adapter.apply(torch.ones(2, 4))
    assert {row: str(error) for row, error in adapter.row_errors.items()} == {1: "no such table"}
