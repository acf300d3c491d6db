"""Which blocks a level may use: by hand, and against a plain record of every position."""

import numpy as np

from vllm_hsd.runner_v1.lazy_caches import FilledBlocks

BLOCKS = np.array([[4, 9, 2, 7]])


def at(*positions: int) -> list[np.ndarray]:
    return [np.array([position]) for position in positions]


def test_a_level_that_left_a_block_out_may_use_those_before_it():
    filled = FilledBlocks(2, block_size=4)
    filled.begin(BLOCKS, *at(0, 16))
    filled.fill(0, BLOCKS, *at(0, 16))
    filled.fill(1, BLOCKS, *at(0, 4))
    filled.fill(1, BLOCKS, *at(8, 16))
    assert filled.usable(BLOCKS[0], 16).tolist() == [16, 4]
    assert filled.usable(BLOCKS[0], 10).tolist() == [10, 4]


def test_a_block_that_is_filled_in_part_is_not_usable():
    filled = FilledBlocks(1, block_size=4)
    filled.fill(0, BLOCKS, *at(0, 7))
    assert filled.usable(BLOCKS[0], 8).tolist() == [4]
    filled.fill(0, BLOCKS, *at(7, 8))
    assert filled.usable(BLOCKS[0], 8).tolist() == [8]


def test_a_block_with_a_new_owner_holds_nothing():
    filled = FilledBlocks(1, block_size=4)
    filled.fill(0, BLOCKS, *at(0, 16))
    filled.begin(BLOCKS, *at(8, 9))
    assert filled.usable(BLOCKS[0], 16).tolist() == [8]


def test_unknown_blocks_hold_nothing():
    assert FilledBlocks(2, block_size=4).usable(BLOCKS[0], 16).tolist() == [0, 0]
