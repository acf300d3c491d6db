"""A soak: many streams against one OpenAI server, every answer judged, nothing left behind."""

import asyncio
import contextlib
import itertools
import json
import random
import time
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

import aiohttp
import numpy as np
from support.openai_server import OpenAIServer
from support.soak_requests import Answer, SoakRequest

# A request is hung once so many later ones per stream were answered, or once no stream has got
# anything for so many seconds. How long it takes itself depends on the machine.
OVERTAKEN_PER_STREAM = 20
PATIENCE = 300.0
FAULTS = ("wrong", "lost", "hung", "error")
ABORTED_SHARE, STREAMED_SHARE = 0.08, 0.4
SHARES = {"certain": 0.4, "sampled": 0.3, "structured": 0.15, "odd": 0.15}


class _HttpError(Exception):
    def __init__(self, status: int, message: str) -> None:
        super().__init__(f"HTTP {status}: {message[:200]}")
        self.status = status


@dataclass
class Report:
    """What became of the requests of one soak.

    Outcomes are "finished", "refused", "aborted" (by the client), and the faults "wrong", "lost"
    (ended without an answer), "hung" and "error" (HTTP 5xx).
    """

    sent: int = 0
    outcomes: Counter = field(default_factory=Counter)
    kinds: Counter = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)  # the first few
    # Seconds since the start, role of a process -> resident MB.
    memory: list[tuple[float, dict[str, float]]] = field(default_factory=list)
    preemptions: int = 0
    leftover: dict[str, float] = field(default_factory=dict)  # on the server, after the last answer
    seconds: float = 0.0

    @property
    def fault_count(self) -> int:
        return sum(self.outcomes[outcome] for outcome in FAULTS)

    def growth(self, role: str) -> float:
        """Resident MB gained in the second half of the soak, by a straight line through it."""
        half = self.memory[len(self.memory) // 2 :]
        seconds = [seconds for seconds, _ in half]
        slope, _ = np.polyfit(seconds, [megabytes[role] for _, megabytes in half], 1)
        return float(slope) * (seconds[-1] - seconds[0])

    def note(self, request: SoakRequest, outcome: str, detail: str = "") -> None:
        self.outcomes[outcome] += 1
        self.kinds[request.kind] += 1
        if outcome in FAULTS and len(self.faults) < 20:
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
            grown = f"; {self.growth(role):+.1f} in the second half" if len(points) > 9 else ""
            lines.append(f"resident MB of {role}: {series}{grown}")
        return "\n".join([*lines, *self.faults])


def assert_clean(report: Report) -> None:
    """Every request has got an answer, all are right, and nothing is left on the server."""
    assert report.fault_count == 0, str(report)
    assert sum(report.outcomes.values()) == report.sent, str(report)
    assert set(report.kinds) == set(SHARES), str(report)
    assert not any(report.leftover.values()), str(report)


def soak(server: OpenAIServer, requests: list[SoakRequest], seconds: float, **options) -> Report:
    """Send random requests, by the SHARES of their kinds, in many streams; options: see `_Plan`."""
    plan = _Plan(server, requests, seconds, **options)
    asyncio.run(_soak(plan))
    return plan.report


class _HangWatch:
    """Ends requests by what the other streams get meanwhile, not by how long they take."""

    def __init__(self, patience: float, most_overtaken: int) -> None:
        self.patience, self.most_overtaken = patience, most_overtaken
        # In the order of sending: the limit of a request without an answer, and its overtakings.
        self.waiting: dict[asyncio.Timeout, int] = {}
        self.event()

    def event(self) -> None:
        """A stream got an answer or a part of one."""
        self.last_event = time.monotonic()

    @contextlib.asynccontextmanager
    async def limit(self) -> AsyncIterator[None]:
        """Raise TimeoutError in the block once the request that it sends is hung."""
        async with asyncio.timeout(None) as limit:
            self.waiting[limit] = 0
            try:
                yield
            finally:
                for earlier in itertools.takewhile(lambda other: other is not limit, self.waiting):
                    self.waiting[earlier] += 1
                del self.waiting[limit]
                self.event()

    async def run(self) -> None:
        while True:
            stalled = time.monotonic() - self.last_event > self.patience
            for limit, overtaken in self.waiting.items():
                if stalled or overtaken > self.most_overtaken:
                    limit.reschedule(asyncio.get_running_loop().time())
            await asyncio.sleep(1)


@dataclass
class _Plan:
    """Arguments of `soak` and its report."""

    server: OpenAIServer
    requests: list[SoakRequest]
    seconds: float
    streams: int = 64
    patience: float = PATIENCE
    at_least: int = 0  # sent, whatever the time
    priorities: int = 1  # among the requests, for a server that schedules by them
    report: Report = field(default_factory=Report)

    def __post_init__(self) -> None:
        self.watch = _HangWatch(self.patience, OVERTAKEN_PER_STREAM * self.streams)


async def _soak(plan: _Plan) -> None:
    server, report = plan.server, plan.report
    began = time.monotonic()
    # A connection each: the server closes idle ones after 5 s, which would look like lost requests.
    connector = aiohttp.TCPConnector(limit=0, force_close=True)
    timeout = aiohttp.ClientTimeout(total=None)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session:

        async def stream(number: int) -> None:
            draw = random.Random(f"0-{number}")
            while time.monotonic() - began < plan.seconds or report.sent < plan.at_least:
                if report.fault_count > 3 * plan.streams or server.process.poll() is not None:
                    return
                report.sent += 1
                [kind] = draw.choices(list(SHARES), list(SHARES.values()))
                of_kind = [request for request in plan.requests if request.kind == kind]
                await _send(session, plan, draw.choice(of_kind), draw)

        watches = [_watch_memory(server, began, plan.seconds, report), plan.watch.run()]
        tasks = [asyncio.create_task(watch) for watch in watches]
        await asyncio.gather(*[stream(number) for number in range(plan.streams)])
        for task in tasks:
            task.cancel()
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
    body = {"model": "tiny", "prompt": request.prompt, "return_token_ids": True}
    body |= {**request.params, "stream": streamed}
    if plan.priorities > 1:
        body["priority"] = draw.randrange(plan.priorities)
    try:
        async with plan.watch.limit():
            await _converse(session, plan, body, request, chunks)
    except _HttpError as error:
        as_plain = request.expected is not None and request.expected[0].finish == "error"
        if error.status >= 500:
            report.note(request, "finished" if as_plain else "error", str(error))
        else:
            report.note(request, "refused" if request.refused else "wrong", str(error))
    except TimeoutError:
        report.note(request, "hung", "no answer while others were answered, or none to anybody")
    except (aiohttp.ClientError, json.JSONDecodeError, KeyError) as error:
        report.note(request, "lost", f"{type(error).__name__}: {error}")


async def _converse(session, plan: _Plan, body, request, chunks) -> None:
    """Send a request and judge its answer; `chunks`: leave after so many of them."""
    async with session.post(f"{plan.server.url}/v1/completions", json=body) as answer:
        if answer.status >= 400:
            raise _HttpError(answer.status, await answer.text())
        if body["stream"]:
            choices, whole = await _read_stream(answer, chunks, plan.watch)
        else:
            listed = (await answer.json())["choices"]
            choices, whole = {choice["index"]: choice for choice in listed}, True
    fault = _fault_of(request, choices, whole)
    plan.report.note(request, *(fault or ("finished" if whole else "aborted",)))


async def _read_stream(
    answer, chunks: int | None, watch: _HangWatch
) -> tuple[dict[int, dict], bool]:
    """Choices put together from the chunks, and whether the stream was read to its end."""
    choices: dict[int, dict] = {}
    count = 0
    async for line in answer.content:
        if not line.startswith(b"data: "):
            continue
        watch.event()
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
            outcome = "lost" if got.finish == "abort" else "wrong"
            return outcome, f"{got}, expected {request.expected[index]}"
        if not request.judge(got):
            return "lost" if got.finish == "abort" else "wrong", str(got)
    return None


async def _watch_memory(server, began: float, seconds: float, report: Report) -> None:
    while True:
        report.memory.append((time.monotonic() - began, server.resident_megabytes()))
        await asyncio.sleep(max(1.0, seconds / 200))


def _look_after(server: OpenAIServer, report: Report) -> None:
    """Requests and cache blocks that the server still holds two minutes after the last answer."""
    names = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
    report.leftover = {"unreachable server": 1}
    until = time.monotonic() + 120
    while True:
        try:
            report.leftover = {name: server.total(f"vllm:{name}") for name in names}
            report.preemptions = int(server.total("vllm:num_preemptions_total"))
        except OSError:  # The server is going down.
            break
        if not any(report.leftover.values()) or time.monotonic() > until:
            break
        time.sleep(0.5)
