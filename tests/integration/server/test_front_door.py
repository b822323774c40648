"""Who may use a server, under which name, and what it writes down about it."""

from __future__ import annotations

import asyncio
import json
import logging
import ssl
import subprocess
import sys
import threading
from functools import partial
from pathlib import Path
from typing import Any

import anthropic
import httpx
import openai
import pytest
from openai import OpenAI

from decodery.constraints import Choice
from decodery.core.errors import SettingsError
from decodery.monitors import Confidence
from decodery.scorers import LogProbability
from decodery.search import BestOfN
from decodery.server.fields import ChatRequest, CompletionRequest, Message, Methods, Shared
from decodery.server.hosts import AllowedHosts, require_hosts, require_origins
from decodery.server.key_defaults import KeyDefaults
from decodery.server.keys import read_keys
from decodery.server.run import Server
from decodery.server.settings import ServerSettings
from serving import SECONDS, TOOLS, client, serving, tiny_lm, user, wait_until

SUPPORT = Path(__file__).parents[2] / "support"
ASKED = {"prompt": "x", "max_tokens": 3}
ENDLESS: dict[str, object] = {"prompt": "x", "max_tokens": 30, "ignore_eos": True}


def test_a_local_server_has_local_names_only() -> None:
    with serving(tiny_lm()) as (_, url):
        port = url.rpartition(":")[2]
        statuses = [
            httpx.get(f"{url}/health", headers={"Host": host}).status_code
            for host in (f"localhost:{port}", f"127.0.0.1:{port}", f"evil.example:{port}")
        ]
        assert statuses == [200, 200, 400]
        told = httpx.get(f"{url}/health", headers={"Host": f"evil.example:{port}"}).json()["error"]["message"]
        assert told.startswith("this server does not answer as 'evil.example'") and "--allow-host" in told
    with serving(tiny_lm(), hosts=["model.example"]) as (_, url):
        assert httpx.get(f"{url}/health", headers={"Host": "model.example"}).status_code == 200
        assert httpx.get(f"{url}/health").status_code == 400


@pytest.mark.parametrize(
    ("header", "allowed"),
    [
        ("model.example", True), ("MODEL.example:8000", True), ("a.b.example", True), ("b.example", False),
        ("[::1]:8000", True), ("other", False), ("", False), ("user@model.example", False), ("model.example/x", False),
        ("[::1", False),
    ],
)  # fmt: skip
def test_names_are_compared_without_their_ports(header: str, allowed: bool) -> None:
    reached, answered = [], []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        reached.append(scope)

    async def send(message: Any) -> None:
        answered.append(message)

    asked = {"type": "http", "headers": [(b"host", header.encode())]}
    asyncio.run(AllowedHosts(app, ["Model.example", "*.b.example", "[::1]"])(asked, app, send))
    assert bool(reached) == allowed != bool(answered)


def test_names_and_pages_that_nothing_can_match_are_refused() -> None:
    require_hosts(["a.example", "*.a.example", "*", "127.0.0.1", "::1", "[::1]", "localhost"])
    require_origins(["https://a.example", "http://localhost:3000", "tauri://localhost", "*", "null"])
    for name in ("a.example:8000", "http://a.example", "a.example/", "*a.example", "a*", ""):
        with pytest.raises(SettingsError, match="--allow-host takes a name"):
            require_hosts([name])
    wrong = (
        "http://localhost:3000/",
        "localhost:3000",
        "https://a.example/page",
        "https://*.a.example",
        "https://A.example",
    )
    for origin in (*wrong, ""):
        with pytest.raises(SettingsError, match=r"--allow-origin takes https://example\.org without a path"):
            require_origins([origin])


def test_pages_elsewhere_may_use_it_where_they_are_named() -> None:
    asked = {"Origin": "https://page.example", "Access-Control-Request-Method": "POST"}
    with serving(tiny_lm(), origins=["https://page.example"]) as (_, url):
        found = httpx.options(f"{url}/v1/completions", headers=asked)
        assert found.headers["access-control-allow-origin"] == "https://page.example"
        other = httpx.options(f"{url}/v1/completions", headers=asked | {"Origin": "https://other.example"})
        assert "access-control-allow-origin" not in other.headers
    with serving(tiny_lm()) as (_, url):
        assert "access-control-allow-origin" not in httpx.options(f"{url}/v1/completions", headers=asked).headers


def test_a_body_without_a_type_is_json_from_programs_alone() -> None:
    body = json.dumps(ASKED).encode()
    with serving(tiny_lm()) as (_, url):
        for headers, status in (
            ({}, 200),
            ({"Origin": "https://page.example"}, 415),
            ({"Content-Type": "text/plain"}, 415),
        ):
            assert httpx.post(f"{url}/v1/completions", content=body, headers=headers).status_code == status


def test_keys_come_with_any_spelling_of_the_scheme() -> None:
    with serving(tiny_lm(), keys={"secret": "a"}, metrics_key=True) as (_, url):
        for header in ("Bearer secret", "bearer secret", "BEARER  secret", "secret"):
            sent = {"Authorization": header}
            assert httpx.post(f"{url}/v1/completions", json=ASKED, headers=sent).status_code == 200, header
        refused = httpx.post(f"{url}/v1/completions", json=ASKED, headers={"Authorization": "Basic secret"})
        assert refused.status_code == 401 and refused.headers["www-authenticate"] == "Bearer"
        assert httpx.get(f"{url}/metrics").status_code == 401
        assert httpx.get(f"{url}/metrics", headers={"Authorization": "Bearer secret"}).status_code == 200
    with serving(tiny_lm(), keys={"secret": "a"}) as (_, url):
        assert httpx.get(f"{url}/metrics").status_code == 200


def test_every_request_has_an_id_and_a_line_without_its_text(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "decodery.server.access"), serving(tiny_lm()) as (_, url):
        answer = httpx.post(f"{url}/v1/completions", json={"prompt": "a secret", "max_tokens": 2})
        name = answer.headers["x-request-id"]
    (line,) = [json.loads(record.message) for record in caplog.records if name in record.message]
    assert (line["method"], line["path"], line["status"]) == ("POST", "/v1/completions", 200)
    assert "secret" not in caplog.text


def test_no_request_leaves_out_a_monitor_of_the_server() -> None:
    guard = Confidence(threshold=-1e9, action="stop")
    with serving(tiny_lm(), guards=[guard]) as (_, url):

        def asked(**more: object) -> httpx.Response:
            return httpx.post(f"{url}/v1/completions", json=ENDLESS | more)

        for more in ({}, {"decodery": {"monitor": []}}, {"decodery": {"monitor": "confidence"}}):
            (choice,) = asked(**more).json()["choices"]
            assert choice["finish_reason"] == "content_filter", more
        for more in ({"search": "best-of-n:n=2,scorer=log-probability"}, {"diffuse": "confidence"}):
            assert asked(decodery=more).status_code == 400
    with serving(tiny_lm()) as (_, url):
        assert asked().json()["choices"][0]["finish_reason"] == "length"


def test_no_request_leaves_out_a_constraint_of_the_server() -> None:
    with serving(tiny_lm(), constraint=Choice(("yes", "no"))) as (_, url):
        api = client(url)
        assert api.chat.completions.create(model="tiny", messages=user("x")).choices[0].message.content in ("yes", "no")
        assert api.completions.create(model="tiny", prompt="x").choices[0].text in ("yes", "no")
        schema: Any = {"type": "json_schema", "json_schema": {"name": "n", "schema": {"enum": [7]}}}
        for more in ({"response_format": schema}, {"tools": TOOLS}, {"extra_body": {"guided_regex": "a"}}):
            with pytest.raises(openai.BadRequestError, match="this server constrains every answer"):
                api.chat.completions.create(model="tiny", messages=user("x"), **more)


def test_a_key_has_defaults_that_its_requests_may_say_otherwise(tmp_path: Path) -> None:
    path, lm = tmp_path / "keys", tiny_lm()
    path.write_text(
        'alice one {"temperature": 1.0, "seed": 5, "max_tokens": 9, "decodery": {"drafter": "none"}}\nbob two\n'
    )
    secrets, defaults = read_keys(path)
    with serving(lm, keys=secrets, defaults=defaults) as (_, url):
        plain = lm.chat(user("x"), max_new_tokens=9)
        drawn, other = (lm.chat(user("x"), max_new_tokens=n, temperature=1.0, seed=5) for n in (9, 4))
        alice, bob = (client(url, key) for key in secrets)

        def said(api: OpenAI, **settings: Any) -> str | None:
            return api.chat.completions.create(model="tiny", messages=user("x"), **settings).choices[0].message.content

        assert said(alice) == drawn.text != plain.text and said(bob, max_tokens=9) == plain.text
        assert said(alice, temperature=0) == plain.text and said(alice, max_completion_tokens=4) == other.text
        claude = anthropic.Anthropic(base_url=url, api_key="one", max_retries=0)
        (block,) = claude.messages.create(model="tiny", messages=user("x"), max_tokens=4).content
        assert block.type == "text" and block.text == other.text
        steps = {"decodery": {"trace": "steps"}}
        body = {"model": "tiny", "messages": user("x"), **steps}
        found = httpx.post(f"{url}/v1/chat/completions", json=body, headers={"x-api-key": "one"}).json()
        assert all(step["tree"]["tokens"][1:] == [] for step in found["choices"][0]["decodery"]["steps"])
    for wrong, why in (("{", "no JSON object"), ("[]", "a JSON object"), ('{"temprature": 1}', "no field 'temprature'"),
                       ('{"prompt": "x"}', "'prompt' has no default"), ('{"n": 0}', "line 1: n")):  # fmt: skip
        path.write_text(f"alice one {wrong}\n")
        with pytest.raises(SettingsError, match=why):
            read_keys(path)
    for lines, why in (('one {"seed":5}', "need a name before the key"), ("alice one\nbob one", "is 'alice' already")):
        path.write_text(f"{lines}\n")
        with pytest.raises(SettingsError, match=why) as refused:
            read_keys(path)
        assert "one" not in str(refused.value)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/messages", {"messages": user("x"), "max_tokens": 2}),
        ("/v1/responses", {"input": "x", "max_output_tokens": 2}),
        ("/api/chat", {"model": "tiny", "messages": user("x"), "stream": False, "options": {"num_predict": 2}}),
    ],
)
def test_forms_of_one_text_have_one_whatever_the_default_of_a_key(path: str, body: dict[str, Any]) -> None:
    with serving(tiny_lm(), keys={"one": "alice"}, defaults={"alice": {"n": 2}}) as (_, url):
        headers = {"Authorization": "Bearer one"}
        assert httpx.post(url + path, json=body, headers=headers, timeout=SECONDS).status_code == 200
        chat = {"messages": user("x"), "max_tokens": 2}
        found = httpx.post(f"{url}/v1/chat/completions", json=chat, headers=headers, timeout=SECONDS)
        assert len(found.json()["choices"]) == 2


@pytest.mark.parametrize("path", ["/v1/models", "/api/tags", "/v1/messages"])
def test_an_error_of_the_server_has_an_id_and_a_status_in_the_log(path: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "decodery.server.access")
    with serving(tiny_lm()) as (server, url):
        # Every request is of somebody: what fails there is nothing that a request could cause.
        server.front.keys = None  # type: ignore[assignment]
        found = httpx.post(url + path, json={}) if path == "/v1/messages" else httpx.get(url + path)
    (line,) = [json.loads(record.message) for record in caplog.records if record.name == "decodery.server.access"]
    assert found.status_code == line["status"] == 500 and found.headers["x-request-id"] == line["request_id"]
    said = found.json()["error"]
    assert (said["type"] if path.startswith("/v1") else said) == {
        "/v1/models": "server_error", "/v1/messages": "api_error",
        "/api/tags": "the server failed at this request (AttributeError)",
    }[path]  # fmt: skip


def test_a_default_stands_back_for_what_takes_its_place() -> None:
    def filled(given: dict[str, Any], body: Shared) -> Shared:
        KeyDefaults(given).fill(body)
        return body

    def chat(**said: Any) -> ChatRequest:
        return ChatRequest(messages=[Message(role="user", content="x")], **said)

    bound: dict[str, Any] = {"response_format": {"type": "json_object"}}
    assert filled(bound, chat(guided_regex="a")) == chat(guided_regex="a")
    assert filled(bound, chat(decodery=Methods(constraint="digits"))) == chat(decodery=Methods(constraint="digits"))
    own = {"decodery": {"sampler": "top-k:k=3", "constraint": "digits", "trace": "steps"}}
    assert filled(own, chat(temperature=0.5, guided_regex="a")).decodery == Methods(trace="steps")
    assert filled({"decodery": {"sampler": "top-k:k=3"}}, chat(temperature=0.5)) == chat(temperature=0.5)
    assert filled(own, chat(decodery=Methods(drafter="none"))).decodery == Methods(drafter="none", **own["decodery"])
    # False is no number of log-probabilities.
    completion = CompletionRequest(prompt="x")
    assert filled({"logprobs": False, "seed": 3}, completion) == CompletionRequest(prompt="x", seed=3)


def test_the_best_of_several_texts_are_answered() -> None:
    lm = tiny_lm()
    with serving(lm) as (_, url):
        create = partial(client(url).completions.create, model="tiny", prompt="x", temperature=1.0, seed=4)
        best = lm.search("x", BestOfN(n=4, scorer=LogProbability()), apply_chat_template=False,
                         temperature=1.0, seed=4, max_new_tokens=6)  # fmt: skip
        for n in (1, 2):
            found = create(best_of=4, n=n, max_tokens=6)
            assert [choice.text for choice in found.choices] == [output.text for output in best[:n]]
        assert best[0].text != create(max_tokens=6).choices[0].text
        with pytest.raises(openai.BadRequestError, match="best_of must be at least n, and 2 is less than 3"):
            create(best_of=2, n=3)
        with pytest.raises(openai.BadRequestError, match="best_of is a search of its own"):
            create(best_of=2, extra_body={"decodery": {"search": "beam"}})


def test_a_certificate_makes_it_https() -> None:
    files = SUPPORT / "tls-cert.pem", SUPPORT / "tls-key.pem"
    server = Server(tiny_lm(), ServerSettings(), port=0, tls=files)
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        wait_until(lambda: server.started)
        assert server.url.startswith("https://")
        trusted = ssl.create_default_context(cafile=str(files[0]))
        assert httpx.get(f"{server.url}/health", verify=trusted).json() == {"status": "ok"}
    finally:
        server.stop()
        thread.join(SECONDS)


def test_wrong_options_are_refused_before_the_model_is_read() -> None:
    command = [sys.executable, "-m", "decodery", "serve", "-m", "/no/such/model"]
    for options, said in (
        (["--tls-cert", str(SUPPORT / "tls-cert.pem")], "--tls-cert and --tls-key go together"),
        (["--guard", "no-such"], "no monitor method is called"),
        (["--guard", "regex:pattern=a", "--guard", "choice:options=a/b"], "a text follows one constraint"),
    ):
        found = subprocess.run([*command, *options], capture_output=True, text=True, timeout=SECONDS)
        assert found.returncode != 0 and said in found.stderr
