"""A server of MLflow, or a disk, that names files outside of a version's folder gets none written or read (Z1)."""

from __future__ import annotations

import http.server
import json
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from alto_core.errors import TrackingError
from alto_core.settings import Settings, load_settings
from alto_core.tracking import RegisteredAdapter, Tracker

NAMES = ["../../evil", "/etc/evil", "a/../../../evil", "..%2f..%2fevil", "%2e%2e/evil"]
ADAPTER = RegisteredAdapter(name="m", version=1, aliases=(), run_id="r", tags={})


@pytest.fixture
def evil_server() -> Iterator[tuple[str, list[str]]]:
    """Its address, and the names of files that it claims to hold."""
    names: list[str] = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if "get-download-uri" in self.path:
                self.answer({"artifact_uri": "mlflow-artifacts:/1/models/m"})
            elif "mlflow-artifacts/artifacts?" in self.path:
                self.answer({"files": [{"path": name, "is_dir": False, "file_size": 4} for name in names]})
            else:
                self.answer({"evil": True})

        def do_POST(self) -> None:
            self.answer({"experiments": []})

        def answer(self, content: object) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(json.dumps(content).encode())

        def log_message(self, *_: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}", names
        server.shutdown()
        thread.join()


@pytest.mark.parametrize("name", NAMES)
def test_a_server_writes_nothing_outside_of_the_folder(
    evil_server: tuple[str, list[str]], tmp_path: Path, name: str
) -> None:
    address, names = evil_server
    names.append(name)
    settings = load_settings({"ALTO_HOME": str(tmp_path / "alto"), "MLFLOW_TRACKING_URI": address})
    target = tmp_path / "a" / "b" / "download"
    with pytest.raises(TrackingError):
        Tracker(settings).registry.download(ADAPTER, target)
    outside = [p for p in tmp_path.rglob("*evil*") if target not in p.parents]
    assert outside == []
    assert not Path("/etc/evil").exists()


def test_a_link_on_the_disk_is_not_followed(
    embedded: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = tmp_path / "version"
    source.mkdir()
    (source / "adapter_config.json").write_text("{}")
    (source / "adapter_model.safetensors").symlink_to("/etc/hostname")
    registry = Tracker(embedded).registry
    client = registry._connection.client
    monkeypatch.setattr(client, "get_model_version_download_uri", lambda *_: source.as_uri())
    with pytest.raises(TrackingError, match="got the symbolic link adapter_model"):
        registry.download(ADAPTER, tmp_path / "download")
    assert not (tmp_path / "download" / "adapter_model.safetensors").exists()
