"""The kernels between forward passes on a GPU; `test_cascade_steps.py` has the same on a CPU."""

import pytest
from support.marks import DEVICE, TOY, on_gpu
from support.proposal_states import LENGTHS, schedule_of
from support.proposal_walk import walk

pytestmark = on_gpu


@pytest.mark.parametrize(
    ("lengths", "lookup"), [((4,), False), ((3, 8), False), (LENGTHS, False), ((3, 8), True)]
)
def test_every_step_equals_its_reference(lengths, lookup):
    """Each on 25 random states: padding, prompt chunks, little room, guard rows."""
    for seed in range(2 if TOY else 25):
        walk(schedule_of(*lengths, lookup=lookup), seed, 7, 6, lookup, device=DEVICE)
