"""States of the target that a head has not read yet."""

import numpy as np
import torch

from vllm_hsd.host import unread_states
from vllm_hsd.host.unread_states import UnreadStates


def states(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float32)[:, None]


def test_what_is_kept_is_taken_once_in_the_order_of_positions():
    unread, step = UnreadStates(3), states(7, 8, 9)
    unread.restart(2, 5)
    unread.keep(2, step[:2])
    unread.keep(0, step[2:])
    # vLLM's memory has the next step by then.
    step.zero_()
    unread.keep(2, states(10))
    assert unread.first[2] == 5 and unread.count[2] == 3
    assert unread.take(np.array([2, 0])).flatten().tolist() == [7, 8, 10, 9]
    assert unread.first.tolist() == [1, 0, 8] and not unread.count.any()


def test_a_request_that_enters_a_slot_has_nothing_of_the_one_before():
    unread = UnreadStates(1)
    unread.keep(0, states(1, 2, 3))
    unread.restart(0, 3)
    unread.keep(0, states(4))
    assert unread.take(np.array([0])).flatten().tolist() == [4]


def test_the_oldest_are_lost_where_nothing_is_drafted_for_long(monkeypatch):
    monkeypatch.setattr(unread_states, "MOST", 4)
    unread = UnreadStates(1)
    for i in range(10):
        unread.keep(0, states(2 * i, 2 * i + 1))
    unread.keep(0, states(20))
    assert unread.first[0] == 17 and unread.count[0] == 4
    assert unread.take(np.array([0])).flatten().tolist() == [17, 18, 19, 20]


def test_of_a_prompt_the_last_ones_are_kept(monkeypatch):
    monkeypatch.setattr(unread_states, "MOST", 4)
    unread = UnreadStates(1)
    unread.keep(0, states(0, 1, 2))
    unread.keep(0, states(*range(3, 10)))
    assert unread.first[0] == 6 and unread.count[0] == 4
    assert unread.take(np.array([0])).flatten().tolist() == [6, 7, 8, 9]
