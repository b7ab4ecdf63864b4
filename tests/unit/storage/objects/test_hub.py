"""What goes wrong with the hub is one sentence; a server in this process answers as the hub does."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from settings.errors import InvalidInput, UserError
from storage.objects.hub import check_on_hub, fetch_from_hub
from tasks.checks.preflight import check_model

_CONFIG = b'{"model_type": "kimi_k9", "auto_map": {"AutoModelForCausalLM": "code.Kimi"}}'
"""What it knows of a model's `config.json`."""
_CODES = {"private": "RepoNotFound", "gated": "GatedRepo"}


class _Hub(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        code = next((code for name, code in _CODES.items() if name in self.path), "")
        self.send_response(200 if "fine" in self.path else 503 if "broken" in self.path else 401)
        self.send_header("X-Error-Code", code)
        body = b'{"id": "me/fine", "tags": [], "config": %s}' % _CONFIG if "fine" in self.path else b"{}"
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture(scope="module")
def hub() -> Iterator[str]:
    with HTTPServer(("127.0.0.1", 0), _Hub) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("me/private", "the hub has no such model, or it is private; check the id"),
        ("me/gated", "only to those who have accepted its terms; accept them at"),
        ("me/broken", "does not answer"),
        ("me//x", "not a Hugging Face id"),
    ],
)
def test_a_repository_that_is_not_to_be_had_is_a_sentence(
    hub: str, name: str, sentence: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    _use(hub, monkeypatch)
    assert check_on_hub("me/fine", "model") == json.loads(_CONFIG)
    with pytest.raises(UserError, match=f"^model = '{name}': .*{sentence}"):
        check_on_hub(name, "model")


def test_a_kind_of_model_that_cannot_be_trained_is_refused_before_it_is_fetched(
    hub: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    _use(hub, monkeypatch)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(InvalidInput, match="^model = 'me/fine': .*'kimi_k9' needs code from its own folder"):
        check_model("me/fine")
    cached = tmp_path / "models--me--here" / "snapshots" / "abc"
    cached.mkdir(parents=True)
    (tmp_path / "models--me--here" / "refs").mkdir()
    (tmp_path / "models--me--here" / "refs" / "main").write_text("abc")
    (cached / "config.json").write_text('{"model_type": "llama", "quantization_config": {"quant_method": "fp8"}}')
    check_model("me/here")
    with pytest.raises(InvalidInput, match=r"^model = 'me/here': its weights are quantised \(fp8\)"):
        check_model("me/here", trains_weights=True)
    (cached / "config.json").write_text('{"model_type": "no_such_kind"}')
    with pytest.raises(InvalidInput, match="'no_such_kind' is no causal language model of transformers"):
        check_model("me/here")


def test_without_a_network_the_sentence_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _use("http://127.0.0.1:9", monkeypatch)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    for ask in (
        lambda: check_on_hub("me/data", "dataset"),
        lambda: fetch_from_hub("me/data", "dataset", patterns=["*"]),
    ):
        with pytest.raises(
            UserError, match="^dataset = 'me/data': it is not on this machine, and the hub at .* does not"
        ):
            ask()


def _use(endpoint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", endpoint)
    monkeypatch.setattr("huggingface_hub.hf_api.api.endpoint", endpoint)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
