"""`vllm-hsd watch` on a server of written metrics."""

import io
import json
import re
import shutil
import subprocess
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable
from contextlib import AbstractContextManager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
from rich.console import Console
from support.command_line import refused
from support.stand_in_servers import listening
from vllm.v1.metrics import loggers
from vllm.v1.spec_decode import metrics as spec_decode_metrics

from benchmarks.common import REPOSITORY
from vllm_hsd.host import metrics
from vllm_hsd.tools.cli.main import main
from vllm_hsd.tools.cli.watch import Change, Snapshot, render

BEFORE = """\
vllm:num_requests_running{engine="0",model_name="m"} 3.0
vllm:generation_tokens_total{engine="0",model_name="m"} 100.0
vllm:generation_tokens_total{engine="1",model_name="m"} 100.0
vllm:spec_decode_num_drafts_total{engine="0",model_name="m"} 10.0
vllm:spec_decode_num_accepted_tokens_total{engine="0",model_name="m"} 10.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="m",position="0"} 8.0
vllm_hsd:level_drafted_total{engine="0",level="0"} 40.0
"""
AFTER = """\
vllm:generation_tokens_total{engine="2",model_name="m"} NaN
vllm:num_requests_running{engine="0",model_name="m"} 4.0
vllm:generation_tokens_total{engine="0",model_name="m"} 160.0
vllm:generation_tokens_total{engine="1",model_name="m"} 140.0
vllm:spec_decode_num_drafts_total{engine="0",model_name="m"} 30.0
vllm:spec_decode_num_draft_tokens_total{engine="0",model_name="m"} 100.0
vllm:spec_decode_num_accepted_tokens_total{engine="0",model_name="m"} 40.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="m",position="0"} 23.0
vllm_hsd:level_drafted_total{engine="0",level="0"} 100.0
vllm_hsd:level_accepted_total{engine="0",level="0"} 30.0
vllm_hsd:level_requested_total{engine="0",level="0"} 20.0
vllm_hsd:level_empty_total{engine="0",level="0"} 5.0
vllm_hsd:level_seconds_total{engine="0",level="0"} 0.5
vllm_hsd:source_drafted_total{engine="0",level="0",source="suffix"} 50.0
vllm_hsd:source_accepted_total{engine="0",level="0",source="suffix"} 20.0
"""


def shown(before: str, after: str) -> str:
    console = Console(width=120, record=True, file=io.StringIO())
    change = Change(Snapshot.parse(before, 0.0), Snapshot.parse(after, 2.0))
    console.print(render(change, [1.0, 2.0]))
    return " ".join(console.export_text().split())


def test_rates_of_a_cascade():
    text = shown(BEFORE, AFTER)
    assert "50 tokens/s" in text  # both engines
    assert "2.50 tokens per verified draft" in text
    assert "4 running, 0 waiting" in text
    assert "accepted by place 1: 75%" in text
    # drafted/s, accepted, drafts/s, mean length, none drafted, share of time
    assert "0 30 50% 0.0 3.0 25% 25%" in text
    assert "suffix 25 40%" in text
    assert "since its start: 40 of 100 drafted tokens accepted, 2.33 tokens" in text


def test_a_server_without_levels_says_so():
    text = shown("vllm:generation_tokens_total 1.0\n", "vllm:generation_tokens_total 3.0\n")
    assert "1 tokens/s no draft just now" in text
    assert "runs no cascade" in text


def serving(text: Callable[[], str]) -> AbstractContextManager[str]:
    """URL of a server whose answers are `text()`."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(200)
            self.end_headers()
            self.wfile.write(text().encode())

        def log_message(self, *args):
            pass

    return listening(Handler)


def test_the_command(capsys):
    with serving(iter([BEFORE, AFTER, AFTER]).__next__) as url:
        assert main(["watch", f"{url}/v1", "--interval", "0.01", "--count", "2"]) == 0
    # A view after the other where the output is no terminal.
    out = capsys.readouterr().out
    assert out.count("vllm-hsd watch") == 2 and "suffix" in out


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (["localhost:8000"], "not a URL"),
        (["http://127.0.0.1:1"], "address of a running server"),
        (["http://localhost:eight"], "address of a running server"),
        (["http://127.0.0.1:1", "--interval", "0"], "--interval"),
        (["http://127.0.0.1:1", "--interval", "inf"], "--interval"),
        (["http://127.0.0.1:1", "--count", "0"], "--count"),
    ],
)
def test_mistakes(arguments, word, capsys):
    assert word in refused(capsys, "watch", *arguments)


def dashboard_expressions() -> list[str]:
    dashboard = json.loads((REPOSITORY / "docs" / "grafana.json").read_text())
    return [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]


def test_the_dashboard_asks_for_metrics_that_are_there():
    """No Grafana is in the package registries: the file is read, not loaded."""
    asked = set(re.findall(r"vllm(?:_hsd)?:\w+", " ".join(dashboard_expressions())))
    ours = {f"vllm_hsd:level_{name}_total" for name in metrics.COUNTERS}
    ours |= {f"vllm_hsd:source_{name}_total" for name in metrics.SOURCE_COUNTERS}
    sources = [Path(module.__file__).read_text() for module in (loggers, spec_decode_metrics)]
    for name in asked - ours:
        assert any(f'"{name.removesuffix("_total")}"' in source for source in sources), name
    assert asked & ours and asked - ours


@pytest.mark.skipif(not shutil.which("prometheus"), reason="needs prometheus (a Debian package)")
def test_prometheus_answers_what_the_dashboard_asks(tmp_path):
    started = time.monotonic()

    def growing() -> str:
        lines = [line.rsplit(" ", 1) for line in AFTER.splitlines() if "NaN" not in line]
        factor = 1 + time.monotonic() - started
        text = "".join(f"{name} {float(value) * factor}\n" for name, value in lines)
        return f'{text}vllm:num_requests_waiting{{model_name="m"}} 1.0\n'

    with serving(growing) as url:
        scrape = f"static_configs: [{{targets: ['{url.removeprefix('http://')}']}}]"
        (tmp_path / "prometheus.yml").write_text(
            f"scrape_configs: [{{job_name: vllm, scrape_interval: 1s, {scrape}}}]"
        )
        with HTTPServer(("127.0.0.1", 0), BaseHTTPRequestHandler) as free:
            address = f"127.0.0.1:{free.server_port}"
        command = ["prometheus", f"--config.file={tmp_path / 'prometheus.yml'}"]
        command += [f"--storage.tsdb.path={tmp_path / 'data'}", f"--web.listen-address={address}"]
        process = subprocess.Popen(command, stderr=subprocess.DEVNULL)
        try:
            missing = [
                text.replace("$model", "m").replace("$__rate_interval", "20s")
                for text in dashboard_expressions()
            ]
            while missing and time.monotonic() < started + 60:
                time.sleep(1)
                missing = [text for text in missing if not answered(address, text)]
        finally:
            process.terminate()
            process.wait()
    assert not missing


def answered(address: str, expression: str) -> bool:
    """Whether the server at `address` has a finite number for it by now."""
    query = urllib.parse.urlencode({"query": expression})
    try:
        with urllib.request.urlopen(f"http://{address}/api/v1/query?{query}") as response:
            series = json.load(response)["data"]["result"]
    except urllib.error.HTTPError:
        raise
    except OSError:
        return False  # not up yet
    return any(0 <= float(one["value"][1]) < float("inf") for one in series)
