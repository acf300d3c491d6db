"""docs/grafana.json: the metrics that the dashboard queries are exported."""

import json
import re
import shutil
import subprocess
import time
import urllib.error
import urllib.parse
import urllib.request
from http.server import HTTPServer
from pathlib import Path

import pytest
from support.stand_in_servers import Handler, listening
from vllm.v1.metrics import loggers
from vllm.v1.spec_decode import metrics as spec_decode_metrics

from benchmarks.common import REPOSITORY
from vllm_hsd.host import metrics

METRICS = """\
vllm:num_requests_running{engine="0",model_name="m"} 4.0
vllm:num_requests_waiting{engine="0",model_name="m"} 1.0
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

    class Growing(Handler):
        def do_GET(self):
            self.send_response(200)
            self.end_headers()
            factor = 1 + time.monotonic() - started
            for line in METRICS.splitlines():
                name, value = line.rsplit(" ", 1)
                self.wfile.write(f"{name} {float(value) * factor}\n".encode())

    with listening(Growing) as url:
        scrape = f"static_configs: [{{targets: ['{url.removeprefix('http://')}']}}]"
        (tmp_path / "prometheus.yml").write_text(
            f"scrape_configs: [{{job_name: vllm, scrape_interval: 1s, {scrape}}}]"
        )
        with HTTPServer(("127.0.0.1", 0), Handler) as free:
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
