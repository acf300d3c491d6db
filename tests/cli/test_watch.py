"""`vllm-hsd watch` on a server of written metrics."""

import io
import json
import re
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
from rich.console import Console
from vllm.v1.metrics import loggers
from vllm.v1.spec_decode import metrics as spec_decode_metrics

from vllm_hsd import metrics
from vllm_hsd.cli.main import main
from vllm_hsd.cli.watch import Change, Snapshot, render

ROOT = Path(__file__).parents[2]
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
vllm:num_requests_running{engine="0",model_name="m"} 4.0
vllm:generation_tokens_total{engine="0",model_name="m"} 160.0
vllm:generation_tokens_total{engine="1",model_name="m"} 140.0
vllm:spec_decode_num_drafts_total{engine="0",model_name="m"} 30.0
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


def shown(before: str, after: str, seconds: float = 2.0) -> str:
    console = Console(width=120, record=True, file=io.StringIO())
    change = Change(Snapshot.parse(before, 0.0), Snapshot.parse(after, seconds))
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


def test_a_server_without_levels_says_so():
    text = shown("vllm:generation_tokens_total 1.0\n", "vllm:generation_tokens_total 3.0\n")
    assert "1 tokens/s no draft was verified" in text
    assert "runs no cascade" in text


def test_the_command(capsys):
    texts = iter([BEFORE, AFTER, AFTER])

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(200)
            self.end_headers()
            self.wfile.write(next(texts).encode())

        def log_message(self, *args):
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}"
        assert main(["watch", f"{url}/v1", "--interval", "0.01", "--count", "2"]) == 0
        server.shutdown()
    assert "suffix" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (["localhost:8000"], "not a URL"),
        (["http://127.0.0.1:1"], "address of a running server"),
        (["http://127.0.0.1:1", "--interval", "0"], "--interval"),
    ],
)
def test_mistakes(arguments, word, capsys):
    assert main(["watch", *arguments]) == 2
    assert word in capsys.readouterr().err


def test_the_dashboard_asks_for_metrics_that_are_there():
    """No Grafana is in the package registries: the file is read, not loaded."""
    dashboard = json.loads((ROOT / "docs" / "grafana.json").read_text())
    expressions = " ".join(t["expr"] for panel in dashboard["panels"] for t in panel["targets"])
    asked = set(re.findall(r"vllm(?:_hsd)?:\w+", expressions))
    ours = {f"vllm_hsd:level_{name}_total" for name in metrics.COUNTERS}
    ours |= {f"vllm_hsd:source_{name}_total" for name in metrics.SOURCE_COUNTERS}
    sources = [Path(module.__file__).read_text() for module in (loggers, spec_decode_metrics)]
    for name in asked - ours:
        assert any(f'"{name.removesuffix("_total")}"' in source for source in sources), name
    assert asked & ours and asked - ours
