"""A soak: many streams against one OpenAI server, every answer judged, nothing left behind."""

import asyncio
import json
import random
import time
from collections import Counter
from dataclasses import dataclass, field

import aiohttp
from support.openai_server import OpenAIServer
from support.soak_requests import Answer, SoakRequest

# A request that takes longer is counted as hung; the slowest take seconds.
PATIENCE = 120.0
ABORTED_SHARE, STREAMED_SHARE = 0.08, 0.4
SHARES = {"certain": 0.4, "sampled": 0.3, "structured": 0.15, "odd": 0.15}


class _HttpError(Exception):
    def __init__(self, status: int, message: str) -> None:
        super().__init__(f"HTTP {status}: {message[:200]}")
        self.status = status


@dataclass
class Report:
    """What became of the requests of one soak.

    Attributes:
        outcomes: number of requests by outcome: "finished", "refused", "aborted" (by the client),
            and the faults "wrong", "lost" (ended without an answer), "hung" and "error" (HTTP 5xx).
        kinds: requests sent, by kind.
        faults: what was wrong with the first few.
        memory: (seconds since the start, role of a process -> resident MB).
        preemptions: of requests, by the scheduler, in total.
        leftover: what the server still counts as running, waiting or cached after the last answer.
    """

    sent: int = 0
    outcomes: Counter = field(default_factory=Counter)
    kinds: Counter = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)
    memory: list[tuple[float, dict[str, float]]] = field(default_factory=list)
    preemptions: int = 0
    leftover: dict[str, float] = field(default_factory=dict)
    seconds: float = 0.0

    @property
    def fault_count(self) -> int:
        return sum(self.outcomes[outcome] for outcome in ("wrong", "lost", "hung", "error"))

    def growth(self, role: str) -> float:
        """Resident MB gained between the middle and the end of the soak."""
        return self.memory[-1][1][role] - self.memory[len(self.memory) // 2][1][role]

    def note(self, request: SoakRequest, outcome: str, detail: str = "") -> None:
        self.outcomes[outcome] += 1
        self.kinds[request.kind] += 1
        if detail and len(self.faults) < 20:
            params = {key: str(value)[:60] for key, value in request.params.items()}
            self.faults.append(f"{outcome}: {detail[:300]} for {params}")

    def __str__(self) -> str:
        lines = [
            f"{self.sent} requests in {self.seconds:.0f} s, {self.preemptions} preemptions",
            f"outcomes {dict(self.outcomes)}, kinds {dict(self.kinds)}, left {self.leftover}",
        ]
        for role in self.memory[0][1] if self.memory else ():
            points = self.memory[:: max(1, len(self.memory) // 10)]
            series = ", ".join(f"{seconds:.0f} s {mb[role]:.0f}" for seconds, mb in points)
            lines.append(f"resident MB of {role}: {series}")
        return "\n".join([*lines, *self.faults])


def soak(
    server: OpenAIServer,
    requests: list[SoakRequest],
    seconds: float,
    *,
    streams: int = 64,
    seed: int = 0,
    patience: float = PATIENCE,
    at_least: int = 0,
    priorities: int = 1,
) -> Report:
    """Send requests in `streams` streams until the time is over, then wait for the last answers.

    Args:
        requests: each stream draws from them at random, by the SHARES of their kinds.
        patience: seconds after which a request counts as hung.
        at_least: go on until so many were sent, whatever the time.
        priorities: number of priorities among the requests, for a server that schedules by them.
    """
    report = Report()
    plan = _Plan(server, requests, seconds, streams, seed, patience, at_least, priorities, report)
    asyncio.run(_soak(plan))
    return report


@dataclass
class _Plan:
    """Arguments of `soak` and its report."""

    server: OpenAIServer
    requests: list[SoakRequest]
    seconds: float
    streams: int
    seed: int
    patience: float
    at_least: int
    priorities: int
    report: Report


async def _soak(plan: _Plan) -> None:
    server, report = plan.server, plan.report
    began = time.monotonic()
    # A connection each: the server closes idle ones after 5 s, which would look like lost requests.
    connector = aiohttp.TCPConnector(limit=0, force_close=True)
    timeout = aiohttp.ClientTimeout(total=None)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session:

        async def stream(number: int) -> None:
            draw = random.Random(f"{plan.seed}-{number}")
            while time.monotonic() - began < plan.seconds or report.sent < plan.at_least:
                if report.fault_count > 3 * plan.streams or server.process.poll() is not None:
                    return
                report.sent += 1
                [kind] = draw.choices(list(SHARES), list(SHARES.values()))
                of_kind = [request for request in plan.requests if request.kind == kind]
                await _send(session, plan, draw.choice(of_kind), draw)

        watch = asyncio.create_task(_watch_memory(server, began, plan.seconds, report))
        await asyncio.gather(*[stream(number) for number in range(plan.streams)])
        watch.cancel()
        report.seconds = time.monotonic() - began
    if server.process.poll() is None:
        _look_after(server, report)


async def _send(session, plan: _Plan, request: SoakRequest, draw: random.Random) -> None:
    report = plan.report
    aborted = draw.random() < ABORTED_SHARE
    streamed = aborted or draw.random() < STREAMED_SHARE
    if "prompt_logprobs" in request.params:  # vLLM does not stream these.
        aborted = streamed = False
    chunks = draw.randrange(6) if aborted else None
    body = {**request.body, "stream": streamed}
    if plan.priorities > 1:
        body["priority"] = draw.randrange(plan.priorities)
    try:
        async with asyncio.timeout(plan.patience):
            url = f"{plan.server.url}/v1/completions"
            await _converse(session, url, body, request, chunks, report)
    except _HttpError as error:
        report.note(request, *_judge_error(request, error))
    except TimeoutError:
        report.note(request, "hung", f"no answer after {plan.patience:.0f} s")
    except (aiohttp.ClientError, json.JSONDecodeError, KeyError) as error:
        report.note(request, "lost", f"{type(error).__name__}: {error}")


async def _converse(session, url, body, request, chunks, report) -> None:
    """Send a request and judge its answer; `chunks`: leave after so many of them."""
    async with session.post(url, json=body) as answer:
        if answer.status >= 400:
            raise _HttpError(answer.status, await answer.text())
        if body["stream"]:
            choices, whole = await _read_stream(answer, chunks)
        else:
            listed = (await answer.json())["choices"]
            choices, whole = {choice["index"]: choice for choice in listed}, True
    fault = _fault_of(request, choices, whole)
    report.note(request, *(fault or ("finished" if whole else "aborted",)))


async def _read_stream(answer, chunks: int | None) -> tuple[dict[int, dict], bool]:
    """Choices put together from the chunks, and whether the stream was read to its end."""
    choices: dict[int, dict] = {}
    count = 0
    async for line in answer.content:
        if not line.startswith(b"data: "):
            continue
        if line.strip() == b"data: [DONE]":
            return choices, True
        if chunks is not None and count >= chunks:
            return choices, False
        count += 1
        body = json.loads(line[len(b"data: ") :])
        if "error" in body:  # vLLM begins some streams before it has looked at the request.
            raise _HttpError(body["error"]["code"], body["error"]["message"])
        for part in body["choices"]:
            empty = {"text": "", "token_ids": [], "finish_reason": None}
            choice = choices.setdefault(part["index"], empty)
            choice["text"] += part["text"]
            choice["token_ids"] += part.get("token_ids") or []
            choice["finish_reason"] = part["finish_reason"] or choice["finish_reason"]
    raise aiohttp.ClientPayloadError("the stream ended without [DONE]")


def _judge_error(request: SoakRequest, error: _HttpError) -> tuple[str, str]:
    """Outcome and detail where the server answered with an error."""
    if error.status >= 500:
        as_plain = request.expected is not None and request.expected[0].finish == "error"
        return ("finished", "") if as_plain else ("error", str(error))
    return ("wrong", str(error)) if request.refused is False else ("refused", "")


def _fault_of(
    request: SoakRequest, choices: dict[int, dict], whole: bool
) -> tuple[str, str] | None:
    """(outcome, detail) of a faulty answer, None for a right one."""
    if not whole:
        if request.expected and 0 in choices:
            got, ids = choices[0]["token_ids"], request.expected[0].ids
            if got != ids[: len(got)]:
                return "wrong", f"{got} does not begin {ids}"
        return None
    if request.refused:
        return "wrong", "taken, and plain vLLM refuses it"
    if set(choices) != set(range(request.params.get("n", 1))):
        return "lost", f"choices {sorted(choices)}"
    for index, choice in choices.items():
        got = Answer(choice["token_ids"], choice["finish_reason"], choice["text"])
        if got.finish is None:
            return "lost", "no finish reason"
        if request.expected is not None and got != request.expected[index]:
            return "wrong", f"{got}, expected {request.expected[index]}"
        if not request.judge(got):
            return "wrong", str(got)
    return None


async def _watch_memory(server, began: float, seconds: float, report: Report) -> None:
    while True:
        report.memory.append((time.monotonic() - began, server.resident_megabytes()))
        await asyncio.sleep(max(1.0, seconds / 200))


def _look_after(server: OpenAIServer, report: Report) -> None:
    """Requests and cache blocks that the server still holds half a minute after the last answer."""
    names = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
    until = time.monotonic() + 30
    while True:
        report.leftover = {name: server.total(f"vllm:{name}") for name in names}
        if not any(report.leftover.values()) or time.monotonic() > until:
            break
        time.sleep(0.5)
    report.preemptions = int(server.total("vllm:num_preemptions_total"))
