"""The OpenAI server under 64 streams of everything at once; a minute of it: `test_serve`."""

import os
import re
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
from support.level_files import write_level_files
from support.odd_requests import VOCABULARY
from support.openai_server import running_server
from support.soak import assert_clean, soak
from support.soak_requests import SoakRequest, answered_catalog
from support.soak_servers import CROWDED, lookups_and_heads, three_levels, two_models, write_table

# Twenty minutes unless the environment says otherwise; the other modes take a tenth of it.
LONG = float(os.environ.get("SOAK_SECONDS", "1200"))
pytestmark = pytest.mark.slow
THINKING = {"reasoning-config": CROWDED["reasoning-config"]}


@pytest.fixture(scope="module")
def requests(text_family):
    return answered_catalog(text_family.target)


@pytest.fixture(scope="module")
def cascades(text_family, tmp_path_factory) -> dict[str, dict]:
    directory = tmp_path_factory.mktemp("levels")
    files = write_level_files(text_family.target, directory, VOCABULARY, trained=True)
    table = write_table(directory / "table.safetensors")
    three = three_levels(text_family, table)
    return {"three levels": three, **lookups_and_heads(text_family, files)}


@pytest.mark.timeout(3600)
def test_a_broken_server_is_noticed(text_family, requests, tmp_path):
    """Corrupted and forgotten requests are counted as what they are."""
    config, plugin = two_models(text_family), "support.server_faults:soak"
    with running_server(text_family.target, tmp_path, config, THINKING, plugin=plugin) as server:
        report = soak(server, requests, seconds=8, at_least=250, patience=25)
        print(report)
    assert report.outcomes["wrong"] > 0 and report.outcomes["hung"] > 0, str(report)
    assert report.outcomes["finished"] > 100, str(report)


@pytest.mark.timeout(3600)
def test_a_server_whose_engine_is_killed_under_load_ends_every_stream(
    text_family, requests, tmp_path
):
    """And itself, with vLLM's exit status, which is 0 (0.32)."""
    config = two_models(text_family)
    with running_server(text_family.target, tmp_path, config, THINKING) as server:
        threading.Timer(20, server.processes()["EngineCore"][0].kill).start()
        report = soak(server, requests, seconds=1200)
        print(report)
        server.process.wait(timeout=600)
    assert report.outcomes["lost"] + report.outcomes["error"] > 0, str(report)
    assert report.outcomes["hung"] == report.outcomes["wrong"] == 0, str(report)


def without_seeds(requests: list[SoakRequest]) -> list[SoakRequest]:
    """The same requests for plain vLLM, which dies of seeded prompts prefilled in chunks."""
    return [
        replace(request, params={k: v for k, v in request.params.items() if k != "seed"})
        for request in requests
    ]


# Of three levels: options of the server in addition to CROWDED.
MODES: dict[str, dict] = {
    "compiled": {"enforce-eager": False},
    "one request at a time": {"max-num-seqs": 1},
    "256 requests at a time": {"max-num-seqs": 256, "max-num-batched-tokens": 2048},
    "requests with priorities": {"scheduling-policy": "priority"},
    "20 blocks, 512 tokens a step": {"num-gpu-blocks-override": 20, "max-num-batched-tokens": 512},
    "without a prefix cache": {"no-enable-prefix-caching": True},
    "two ranks": {"tensor-parallel-size": 2},
}
# Levels and lengths then change in every step, whatever pays.
FORCED = "forced "
OTHERS = (
    *("suffix", "suffix below a model", "sources", "eagle3 in sources", "adaptive"),
    *(f"{FORCED}adaptive", f"{FORCED}head above lookups", "eagle3", "eagle3 below a model"),
)


@pytest.mark.timeout(LONG + 3600)
@pytest.mark.parametrize("name", [*MODES, *OTHERS])
def test_a_soak_of_other_modes_and_levels(text_family, cascades, requests, tmp_path, name):
    options = {**CROWDED, **MODES.get(name, {})}
    config = cascades["three levels" if name in MODES else name.removeprefix(FORCED)]
    plugin = "support.adversarial_depth:install" if name.startswith(FORCED) else None
    ranks = {"VLLM_CPU_OMP_THREADS_BIND": "0|1"} if name == "two ranks" else {}
    load = {"streams": 256 if options["max-num-seqs"] == 256 else 64}
    load["priorities"] = 3 if "scheduling-policy" in options else 1
    with running_server(text_family.target, tmp_path, config, options, plugin, ranks) as server:
        report = soak(server, requests, LONG / 10, at_least=300, **load)
        print(report)
        metrics = server.metrics()
    assert_clean(report)
    if name in MODES:
        return
    assert report.preemptions > 0
    # Next to a model the suffix lookup has all of its offers, too.
    redundant = 'source="ngram"' if name == "sources" else "none"
    counts = re.compile("vllm_hsd:(level_drafted|level_accepted|source_drafted)_total")
    counted = {key: n for key, n in metrics.items() if counts.match(key) and redundant not in key}
    print(counted)
    assert counted and all(value > 0 for value in counted.values()), counted


@pytest.mark.timeout(3 * LONG + 3600)
@pytest.mark.parametrize("name", ["three levels", "adaptive"])
def test_a_long_soak_next_to_plain_vllm(text_family, cascades, requests, tmp_path, name):
    """Two servers at once: after the first half, memory grows no faster than plain vLLM's."""
    for directory in ("cascade", "plain"):
        (tmp_path / directory).mkdir()
    with (
        running_server(
            text_family.target, tmp_path / "cascade", cascades[name], CROWDED
        ) as cascade,
        running_server(text_family.target, tmp_path / "plain", None, CROWDED) as plain,
        ThreadPoolExecutor(2) as pool,
    ):
        soaks = [
            # Levels that change all the time meet new shapes for about a thousand requests.
            pool.submit(soak, cascade, requests, LONG, at_least=2000 if name == "adaptive" else 0),
            pool.submit(soak, plain, without_seeds(requests), LONG),
        ]
        cascade_report, plain_report = (running.result() for running in soaks)
        print("cascade:", cascade_report, "plain:", plain_report, sep="\n")
    assert_clean(cascade_report)
    assert_clean(plain_report)
    assert cascade_report.preemptions > 0
    for role in ("api", "EngineCore", "Worker"):
        grown = cascade_report.growth(role)
        assert grown < plain_report.growth(role) + 32, (role, cascade_report, plain_report)
