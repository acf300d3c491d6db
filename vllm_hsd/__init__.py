"""Hierarchical speculative decoding for vLLM: the map.

Text: a request's committed tokens, and the window of a proposal on them (`cascade.proposal_state`).
Draft: tokens after a text, each with the row it was drawn from (`cascade.proposal_state`; several
    drafts of a request are rows that share a root, `cascade.row_layout`).
Source: what finds or draws the lowest level's draft; the most promising one drafts
    (`levels.sources`, `budget.source_choice`).
Level: a drafter that verifies the one below: its keys in `levels`, a file for each kind, its passes
    in `cascade.program` (`ProgramLevel`), run as a `cascade.level.Level`.
Schedule: the fixed list of passes of a proposal, known before any token (`cascade.schedule`).
Program: what runs a proposal: the schedule on a GPU (`cascade.program`), the recursion on a CPU
    (`host.host_program`).
Rule and Verdict: exact verification of drafts, and what it accepts and emits (`rules`; the same on
    logits in `kernels`).
Survival: the probability that a token and all before it are accepted (`budget.acceptance`).
Costs: seconds of a level's pass and of the target's step by tokens (`budget.step_times`).
Budget: which levels draft, and how much: survival against price (`budget.draft_budget`).
Counts: tokens drafted and accepted by level and source (`cascade.counters`, `host.device_counts`).
Host: the only package that knows vLLM's runner: what it gives, and what it is owed (`host`).

To be read first: `tools.reference.simple`, the algorithm for one request.
"""

__version__ = "0.1.0"
