"""Order-1 Markov models: cascades that really draw, verify and emit tokens."""

import numpy as np

from vllm_hsd.planner import prompt_lookup


def markov_chains(rng, models, vocabulary=5, drift=0.4):
    """Transition tables float64 [models, V, V], worst drafter first, the target last."""
    tables = [rng.dirichlet(np.full(vocabulary, 0.6), size=vocabulary)]
    for _ in range(models - 1):
        other = rng.dirichlet(np.full(vocabulary, 0.6), size=vocabulary)
        tables.append((1 - drift) * tables[-1] + drift * other)
    return np.stack(tables[::-1])


def sample_text(table, texts, length, rng, start=None):
    """Tokens int64 [texts, length + 1]; column 0 is the context, uniform unless given."""
    tokens = np.zeros((texts, length + 1), dtype=np.int64)
    tokens[:, 0] = rng.integers(len(table), size=texts) if start is None else start
    reached = table.cumsum(1)
    for t in range(length):
        below = rng.random(texts)[:, None] > reached[tokens[:, t]]
        tokens[:, t + 1] = np.minimum(below.sum(1), len(table) - 1)
    return tokens


def log_ratios(drafter, verifier, tokens):
    """log q(x) - log p(x) along texts, [texts, length]."""
    steps = tokens[:, :-1], tokens[:, 1:]
    return np.log(drafter[steps]) - np.log(verifier[steps])


def verify_chain(p, q, draft, verifier, rng):
    """Accepted length of one draft and the probabilities of the next token.

    p [n + 1, V], q [n, V], draft [n]. Block verification caps the prefix ratios, and the last
    success wins.
    """
    n = len(draft)
    ratios = [p[t, x] / q[t, x] for t, x in enumerate(draft)]
    kept, weight, a = 0, 1.0, 1.0
    if verifier == "standard":
        while kept < n and rng.random() < ratios[kept]:
            kept += 1
    else:
        for t in range(1, n + 1):
            a = min(1.0, a * ratios[t - 1])
            spare = np.maximum(a * p[t] - q[t], 0).sum() if t < n else 0.0
            chance = a if t == n or a == 1.0 else spare / (spare + 1 - a)
            if rng.random() < chance:
                kept, weight = t, a
    if kept == n:
        return kept, p[n]
    residual = np.maximum(weight * p[kept] - q[kept], 0)
    return kept, residual / residual.sum() if residual.sum() > 0 else p[kept]


class MarkovTokens:
    """A `simulated_cascade.TokenSource` whose rounds verify real tokens.

    tables: transition tables of the levels, cheapest first, then the target; None for a prompt
    lookup at level 0, of matches of 1 to `longest` tokens.
    """

    def __init__(self, tables, verifier, rng, requests=1, longest=2):
        self.tables, self.verifier, self.rng, self.longest = tables, verifier, rng, longest
        self.texts = [[0] for _ in range(requests)]  # what the target emitted
        self.drafts = [[] for _ in range(requests)]  # (token, row it was drawn from)

    def _draw(self, row):
        return int(min(np.searchsorted(row.cumsum(), self.rng.random()), len(row) - 1))

    def _end(self, request):
        return self.drafts[request][-1][0] if self.drafts[request] else self.texts[request][-1]

    def draft(self, active):
        for request in np.flatnonzero(active):
            row = self.tables[0][self._end(request)]
            self.drafts[request].append((self._draw(row), row))

    def look_up(self, active, emitted, requested):
        found = np.zeros_like(requested)
        for request in np.flatnonzero(active):
            drafted = [token for token, _ in self.drafts[request]]
            text = np.array(self.texts[request] + drafted)
            tokens = prompt_lookup.propose(text, 1, self.longest, requested.flat[request])
            rows = np.eye(len(self.tables[-1]))[tokens]
            self.drafts[request].extend(zip(tokens.tolist(), rows, strict=True))
            found.flat[request] = len(tokens)
        return found

    def verify(self, active, level, emitted, drafted):
        kept = np.zeros_like(drafted)
        for request in np.flatnonzero(active):
            kept.flat[request] = self.verify_one(request, level, drafted.flat[request])
        return kept

    def verify_one(self, request, level, drafted):
        stack = self.drafts[request]
        draft = stack[len(stack) - drafted :]
        del stack[len(stack) - drafted :]
        contexts = [self._end(request), *(token for token, _ in draft)]
        rows = self.tables[level][contexts]
        q = np.array([row for _, row in draft]).reshape(drafted, rows.shape[1])
        tokens = [token for token, _ in draft]
        kept, row = verify_chain(rows, q, tokens, self.verifier, self.rng)
        token = self._draw(row)
        if level == len(self.tables) - 1:
            self.texts[request] += [*tokens[:kept], token]
            stack.clear()
        else:
            stack.extend(zip(tokens[:kept], rows[:kept], strict=True))
            stack.append((token, rows[kept]))
        return kept
