"""The nginx example of docs/scaling.md, run as it is written; skipped if nginx is not installed."""

import os
import re
import shutil
import subprocess
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import httpx
import pytest

from serving import PATIENT
from test_serve_process import free_port, until

NGINX = shutil.which("nginx") or shutil.which("nginx", path="/usr/sbin:/usr/local/sbin")
EXAMPLE = re.search(r"```nginx\n(.*?)```", (Path(__file__).parents[1] / "docs" / "scaling.md").read_text(), re.S)[1]
FOLDERS = ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")


def test_the_example_takes_no_full_server_for_a_broken_one():
    servers = re.findall(r"^ *server 10.*$", EXAMPLE, re.M)
    assert len(servers) == 2
    assert all(line.endswith(" max_fails=0;") for line in servers)


class Full(BaseHTTPRequestHandler):
    """A server that is full at two of three requests."""

    hosts: list[str]
    lock = threading.Lock()

    def do_POST(self):
        self.rfile.read(int(self.headers["content-length"]))
        with self.lock:
            self.hosts.append(self.headers["host"])
            self.send_response(200 if len(self.hosts) % 3 == 0 else 429)
        self.send_header("content-length", "0")
        self.end_headers()

    def log_message(self, *args):
        pass


@pytest.mark.skipif(NGINX is None, reason="nginx is not installed")
def test_requests_to_full_servers_are_not_lost(tmp_path):
    handlers = [type("Handler", (Full,), {"hosts": []}) for _ in range(2)]
    servers = [ThreadingHTTPServer(("127.0.0.1", 0), handler) for handler in handlers]
    threads = [threading.Thread(target=server.serve_forever, daemon=True) for server in servers]
    port, example = free_port(), EXAMPLE
    for number, server in enumerate(servers, 1):
        example = example.replace(f"10.0.0.{number}:8000", f"127.0.0.1:{server.server_port}")
    example = example.replace("listen 8080", f"listen 127.0.0.1:{port}")
    paths = "".join(f"{name}_temp_path {tmp_path / name};" for name in FOLDERS)
    user = "user root;" if os.geteuid() == 0 else ""
    config = tmp_path / "nginx.conf"
    config.write_text(
        f"{user} daemon off; pid {tmp_path / 'pid'}; error_log stderr; events {{}}\n"
        f"http {{ access_log off; {paths}\n{example} }}"
    )
    for thread in threads:
        thread.start()
    process = subprocess.Popen([NGINX, "-p", str(tmp_path), "-c", str(config)], stderr=subprocess.PIPE, text=True)
    try:
        found, url = [], f"http://127.0.0.1:{port}/"
        with httpx.Client(timeout=PATIENT) as http:
            for number in range(30):
                request = http.build_request("POST", url, content=b"x", headers={"x-session-id": str(number)})
                found.append(until(lambda request=request: http.send(request)).status_code)
    finally:
        process.terminate()
        errors = process.communicate()[1]
        for server in servers:
            server.shutdown()
            server.server_close()
    assert set(found) <= {200, 429}, errors
    assert found.count(200) > 10
    assert {host for handler in handlers for host in handler.hosts} == {"draftwing"}
