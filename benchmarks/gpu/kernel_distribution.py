"""Text that cascades write by the kernels alone, on tables in the place of models.

`cascade.program.Program` drafts, `verify_chain_padded` verifies for the target, in a batch, for
many steps; every level's next-token logits depend on the last token only, so that no cache is
needed and the target's distribution is known exactly. In the first control the lowest level's
tokens are drawn hotter than the verifier above it is told; in each of the others the target's
verifier has one of the faults of `faults`. All must show.
"""

from __future__ import annotations

from dataclasses import dataclass
from unittest import mock

import numpy as np
import torch

from benchmarks.gpu import pit
from benchmarks.gpu.faults import FAULTS, Step
from benchmarks.gpu.items import Finding, Setting
from tests.support.proposal_states import TableLevel
from vllm_hsd.cascade import cascade_steps
from vllm_hsd.cascade import program as program_module
from vllm_hsd.cascade.level import Level, LevelOptions
from vllm_hsd.cascade.program import Program
from vllm_hsd.cascade.proposal_state import KVGroups, ProposalState
from vllm_hsd.cascade.schedule import compile_schedule, first_draw
from vllm_hsd.kernels.chain_verify import verify_chain_padded
from vllm_hsd.kernels.sample_row import sample_row

CASES = {"two levels": (2, 5), "three levels": (1, 2, 5)}
# Its lowest level is the level below the one that verifies for the target: a further level between
# hides most of the bias.
CONTROL = "two levels"
HOTTER_DRAFTS = "drafts drawn hotter"
# Temperature of the control's draws over that of the rows that are kept with them.
HOTTER = 3.0


@dataclass(frozen=True)
class Sizes:
    """How much text, over how many tokens."""

    vocabulary: int
    batch: int
    length: int
    control_length: int

    @property
    def tokens(self) -> int:
        return self.batch * self.length


# 256 requests of 800 tokens are 200,000, of 256 tokens 65,536.
FULL = Sizes(vocabulary=4096, batch=256, length=800, control_length=256)
TOY = Sizes(vocabulary=6, batch=6, length=24, control_length=60)


def tables(sizes: Sizes, count: int, device: torch.device) -> list[torch.Tensor]:
    """Logits of `count` levels, each nearer to the target than the one below, then the target's.

    Rank 16 plus noise keeps a large vocabulary's tables cheap and its rows peaked.
    """
    g = torch.Generator().manual_seed(0)
    v = sizes.vocabulary
    left, right = (torch.randn(v, 16, generator=g) for _ in range(2))
    target = (left @ right.T / 2).to(device)
    noise = torch.randn(v, v, generator=g).to(device)
    levels = [target + noise * (1.0 - 0.4 * k) for k in range(count)]
    return [table.bfloat16() for table in (*levels, target)]


@torch.inference_mode()
def texts(
    lengths: tuple[int, ...],
    sizes: Sizes,
    device: torch.device,
    fault: str | None = None,
    tokens: int | None = None,
) -> tuple[list[np.ndarray], float]:
    """(`pit.places` of every text, tokens per target step) of one cascade.

    Args:
        fault: HOTTER_DRAFTS, or a name of `faults.FAULTS`.
        tokens: of every text, by default those of `sizes`.
    """
    *drafters, target = tables(sizes, len(lengths), device)
    schedule = compile_schedule([LevelOptions(n) for n in lengths])
    batch, k = sizes.batch, schedule.num_speculative_tokens
    wanted = tokens or sizes.length
    longest = wanted + 2 * k + schedule.window + schedule.margin + 2
    blocks = torch.zeros(batch, longest // 16 + 1, dtype=torch.int32, device=device)
    groups = KVGroups(
        torch.tensor([blocks.data_ptr()], dtype=torch.uint64, device=device),
        torch.tensor([blocks.stride(0)], device=device),
        torch.tensor([16], dtype=torch.int32, device=device),
    )
    levels = [Level(TableLevel(table)) for table in drafters]
    program = Program(schedule, levels, groups, longest)
    state = ProposalState.allocate(
        schedule,
        batch=batch,
        max_num_reqs=batch,
        vocab_size=sizes.vocabulary,
        dtypes=[torch.bfloat16] * len(lengths),
        num_kv_groups=1,
        device=device,
    )
    g = torch.Generator().manual_seed(1)
    text = torch.zeros(batch, longest, dtype=torch.int32)
    # The window before the text that is tested.
    prompt = schedule.window + 1
    text[:, :prompt] = torch.randint(0, sizes.vocabulary, (batch, prompt), generator=g)
    text = text.to(device)
    length = torch.full((batch,), prompt, dtype=torch.int32, device=device)
    seeds = torch.randint(-(2**62), 2**62, (batch,), generator=g).to(device)
    one = torch.ones(batch, device=device)
    index = torch.arange(batch, dtype=torch.int32, device=device)
    starts = torch.arange(batch + 1, dtype=torch.int32, device=device) * (k + 1)
    columns = torch.arange(k + 1, device=device)
    steps = 0
    before, after = FAULTS.get(fault or "", (None, None))
    generator = torch.Generator(device).manual_seed(2)
    draw = _hotter if fault == HOTTER_DRAFTS else sample_row
    with mock.patch.object(program_module, "sample_row", draw):
        while int(length.min()) < prompt + wanted:
            cascade_steps.stage(
                state,
                schedule,
                index=index,
                text=text,
                length=length,
                num_sampled=torch.ones(batch, dtype=torch.int32, device=device),
                temperature=one,
                top_k=torch.zeros_like(index),
                top_p=one,
                min_p=0 * one,
                seeds=seeds,
                scales=torch.ones(len(lengths), device=device),
                most_drafted=torch.full_like(index, longest),
                max_model_len=longest,
            )
            program.run(state)
            last = text.gather(1, (length - 1)[:, None].long())
            fed = torch.cat((last, state.draft_tokens.int()), 1)
            rows = state.rows[-1]
            assert rows is not None
            drafts = state.draft_tokens.long()
            drawn = rows.gather(2, drafts[..., None])[..., 0].float() - state.lse[-1]
            logits, lse = target[fed.long()], state.lse[-1].clone()
            step = Step(logits, lse, drafts, drawn, fed.long(), length, generator)
            if before is not None:
                before(step)
            result = verify_chain_padded(
                step.logits.flatten(0, 1),
                rows,
                fed.flatten(),
                starts,
                index,
                one,
                seeds,
                first_draw(length.long()),
                max_draft_tokens=k,
                level=len(lengths),
                draft_temperature=one,
                draft_lse=step.lse,
                draft_index=index,
                draft_length=state.draft_length,
            )
            step.token_ids, step.num_emitted = result.token_ids, result.num_emitted
            if after is not None:
                after(step)
            steps += 1
            # A text that is long enough waits for the others.
            emitted = torch.where(length < prompt + wanted, step.num_emitted, 0)
            keep = columns[None] < emitted[:, None]
            at = (length[:, None] + columns[None]).long()
            text.scatter_(1, at, torch.where(keep, step.token_ids.int(), text.gather(1, at)))
            length += emitted
    rate = float((length - prompt).sum()) / (steps * batch)
    places = []
    for b in range(batch):
        whole = text[b, prompt - 1 : prompt + wanted].long()
        logits = target[whole[:-1]].float()
        places.append(pit.places(logits, whole[1:], drafters[-1][whole[:-1]]))
    return places, rate


def _hotter(logits, temperature, *rest, **options):
    """A token drawn hotter, with the logsumexp of the colder row: what a bug would give."""
    token, _ = sample_row(logits, temperature * HOTTER, *rest, **options)
    _, lse = sample_row(logits, temperature, *rest, **options)
    return token, lse


def run(setting: Setting) -> Finding:
    """Every cascade's text against the target's distribution; the controls' must differ."""
    sizes = TOY if setting.toy else FULL
    # A few hundred tokens show a bias less strongly.
    rejected = pit.PASSES if setting.toy else pit.REJECTED
    rows = []
    for name, lengths in CASES.items():
        controls = [HOTTER_DRAFTS, *([] if setting.toy else FAULTS)] if name == CONTROL else []
        for fault in (None, *controls):
            count = sizes.length if fault is None else sizes.control_length
            found, rate = texts(lengths, sizes, torch.device(setting.device), fault, count)
            label = name if fault is None else f"{name}: {fault}"
            biased = fault is not None
            rows.append(pit.checked_row("cascade", label, found, rate, biased, rejected))
    return Finding([pit.sentence(row, row["cascade"]) for row in rows], rows)
