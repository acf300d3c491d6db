"""With `adaptive`, levels read the steps in which nothing pays by CUDA graphs (stand-ins here)."""

import pytest
from support.cascades import cascade
from support.engines import PROMPTS, run_engine

pytestmark = pytest.mark.usefixtures("as_on_gpus")
JOB = {"prompts": PROMPTS, "params": {"temperature": 1, "max_tokens": 60, "ignore_eos": True}}


@pytest.mark.parametrize("patch", ["install", "install_unread"])
def test_levels_have_read_every_step(patch, family):
    """The target as its own drafter: all is accepted; and a control whose caches have holes."""
    config = {**cascade([{"model": family.target}]), "adaptive": True}
    engine = {"model": family.target, "max_num_seqs": 4, "max_model_len": 128}
    found = run_engine(
        {**engine, "speculative_config": config},
        {"": JOB},
        patch=f"support.steps_without_drafts:{patch}",
    )[""]
    counters = found["counters"]
    drafted = counters["spec_decode_num_draft_tokens"]
    accepted = counters["spec_decode_num_accepted_tokens"]
    assert drafted > 50 and (accepted == drafted) == (patch == "install")
