"""Triton compiles nothing anew for a number of requests: such a step would wait for it."""

import pytest
from support import kernel_builds, launch_cases, meta_tensors

BATCHES = (1, 2, 3, 4, 5, 8, 16)


@pytest.mark.parametrize("number", range(len(launch_cases.SHORT)))
def test_launches_have_the_same_keys_at_every_batch_size(number, monkeypatch):
    by_batch = []
    for batch in BATCHES:
        monkeypatch.setattr(meta_tensors, "BATCH", batch)
        with kernel_builds.launch_keys(90) as found:
            launch_cases.launch([launch_cases.SHORT[number]])
        by_batch.append(found)
    differ = {
        f"{kernel}, {batch} requests"
        for batch, found in zip(BATCHES, by_batch, strict=True)
        for kernel, keys in found.items()
        if keys != by_batch[2][kernel]
    }
    assert by_batch[0] and not differ
