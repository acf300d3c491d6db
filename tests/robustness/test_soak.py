"""The OpenAI server under 64 streams of everything at once: long and in other modes.

The one-minute form is in `test_serve`, on the server of the tests there.
"""

import os
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from support.openai_server import running_server
from support.soak import assert_clean, soak
from support.soak_requests import answered_catalog, catalog
from support.soak_servers import CROWDED, FakeServer, three_levels, two_models, write_table

# Twenty minutes unless the environment says otherwise; the other modes take a tenth of it.
LONG = float(os.environ.get("SOAK_SECONDS", "1200"))


@pytest.fixture(scope="module")
def requests(text_family):
    return answered_catalog(text_family.target)


@pytest.fixture(scope="module")
def bigram(tmp_path_factory) -> str:
    return write_table(tmp_path_factory.mktemp("bigram") / "table.npz")


def test_the_harness_counts_every_fault_of_a_server_and_no_other():
    with FakeServer({"wrong": 12, "hung": 30, "error": 25, "lost": 15, "cut": 10}) as server:
        report = soak(server, server.requests, seconds=0, at_least=400, patience=8)
    faults, outcomes = server.faults, report.outcomes
    assert all(faults[kind] > 0 for kind in server.every), faults
    for kind in ("wrong", "hung", "error"):
        assert outcomes[kind] == faults[kind], str(report)
    # A client that leaves does not see that its stream has no end.
    assert faults["lost"] < outcomes["lost"] <= faults["lost"] + faults["cut"], str(report)
    with FakeServer({}) as server:
        report = soak(server, server.requests, seconds=0, at_least=400)
    assert_clean(report)
    assert report.outcomes["aborted"] > 0 and report.outcomes["refused"] > 0


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_a_broken_server_is_noticed(text_family, requests, tmp_path):
    """Corrupted and forgotten requests are counted as what they are."""
    config, plugin = two_models(text_family), "support.soak_faults:both"
    with running_server(text_family.target, tmp_path, config, plugin=plugin) as server:
        report = soak(server, requests, seconds=8, at_least=250, patience=25)
        print(report)
    assert report.outcomes["wrong"] > 0 and report.outcomes["hung"] > 0, str(report)
    assert report.outcomes["finished"] > 100, str(report)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("end", ["the engine raises", "the engine is killed", "SIGTERM"])
def test_a_server_that_ends_under_load_ends_every_stream(text_family, requests, tmp_path, end):
    plugin = "support.soak_faults:engine_dies" if end == "the engine raises" else None
    config = two_models(text_family)
    with running_server(text_family.target, tmp_path, config, plugin=plugin) as server:
        signals = {"the engine is killed": server.kill_engine, "SIGTERM": server.process.terminate}
        timer = threading.Timer(20, signals.get(end, bool))
        timer.start()
        report = soak(server, requests, seconds=1200)
        print(report)
        timer.join()
        status = server.process.wait(timeout=600)
    assert (status == 0) == (end == "SIGTERM")
    assert report.outcomes["lost"] + report.outcomes["error"] > 0, str(report)
    assert report.outcomes["hung"] == report.outcomes["wrong"] == 0, str(report)


MODES: dict[str, dict] = {
    "compiled": {"enforce-eager": False},
    "one request at a time": {"max-num-seqs": 1},
    "256 requests at a time": {"max-num-seqs": 256, "max-num-batched-tokens": 2048},
    "requests with priorities": {"scheduling-policy": "priority"},
    "20 blocks, 512 tokens a step": {
        "num-gpu-blocks-override": 20,
        "max-num-batched-tokens": 512,
    },
    "without a prefix cache": {"no-enable-prefix-caching": True},
    "two ranks": {"tensor-parallel-size": 2},
}


@pytest.mark.slow
@pytest.mark.timeout(LONG + 3600)
@pytest.mark.parametrize("mode", MODES)
def test_a_soak_in_other_modes(text_family, bigram, requests, tmp_path, mode):
    config, options = three_levels(text_family, bigram), {**CROWDED, **MODES[mode]}
    environment = {}
    if mode == "two ranks":
        environment["VLLM_CPU_OMP_THREADS_BIND"] = "0|1"
    with running_server(
        text_family.target, tmp_path, config, options, environment=environment
    ) as server:
        streams = 256 if options["max-num-seqs"] == 256 else 64
        priorities = 3 if "scheduling-policy" in options else 1
        report = soak(
            server, requests, LONG / 10, at_least=300, streams=streams, priorities=priorities
        )
        print(report)
    assert_clean(report)


@pytest.mark.slow
@pytest.mark.timeout(3 * LONG + 3600)
def test_a_long_soak_beside_plain_vllm(text_family, bigram, requests, tmp_path):
    """Two servers at once: after the first half, memory grows no faster than plain vLLM's."""
    plain_requests = catalog(seeded=False)
    for request, known in zip(plain_requests, requests, strict=True):
        request.expected, request.refused = known.expected, known.refused
        request.judge = known.judge
    config = three_levels(text_family, bigram)
    (tmp_path / "cascade").mkdir()
    (tmp_path / "plain").mkdir()
    with (
        running_server(text_family.target, tmp_path / "cascade", config, CROWDED) as cascade,
        running_server(text_family.target, tmp_path / "plain", None, CROWDED) as plain,
        ThreadPoolExecutor(2) as pool,
    ):
        soaks = [
            pool.submit(soak, cascade, requests, LONG),
            pool.submit(soak, plain, plain_requests, LONG),
        ]
        cascade_report, plain_report = (running.result() for running in soaks)
        print("cascade:", cascade_report, "plain:", plain_report, sep="\n")
    assert_clean(cascade_report)
    assert_clean(plain_report)
    assert cascade_report.preemptions > 0
    for role in ("api", "EngineCore", "Worker"):
        grown = cascade_report.growth(role)
        assert grown < plain_report.growth(role) + 32, (role, cascade_report, plain_report)
