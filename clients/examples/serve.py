#!/usr/bin/env python3
"""An OpenAI-compatible server whose attention and KV cache are attnd's.

    clients/examples/serve.py [--model FOLDER] [--port 8000] [--url ipc:///run/attnd/attnd.sock]

    curl http://127.0.0.1:8000/v1/completions -H 'Content-Type: application/json' \\
        -d '{"prompt": "def read(self, ", "max_tokens": 40, "temperature": 0, "stream": true}'

Run as many of them on one daemon as you like: they share its memory, and their steps its launches. A
client that hangs up ends its generation, and the blocks of its sequence are free again.

Takes /v1/completions and /v1/chat/completions (where the tokenizer has a chat template) with
max_tokens, temperature, top_p, stop, stream; one text for each request. --model is a folder of
HuggingFace's; the default is bytelm, which writes Python byte by byte and needs no tokenizer.
"""

from __future__ import annotations

import argparse
import http.server
import json
import pathlib
import queue
import select
import socket
import threading
import time
import uuid
from collections.abc import Iterator
from typing import Any

import torch
import transformers

import attnd
import attnd.hf

BYTELM = pathlib.Path(__file__).resolve().parents[1] / "python" / "examples" / "bytelm"


class BadRequest(Exception):
    """What OpenAI's clients show to their users."""


class ByteTokenizer:
    """A token is a byte."""

    chat_template = None

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def decode(self, ids: list[int], **_: Any) -> str:
        return bytes(ids).decode(errors="replace")


class Generation(transformers.generation.BaseStreamer, transformers.StoppingCriteria):
    """One request on a thread of its own; its tokens come out of a queue as they are made."""

    def __init__(self, worker: attnd.hf.Worker, ids: list[int], options: dict[str, Any]):
        self._tokens: queue.Queue[int | Exception | None] = queue.Queue()
        self._is_cancelled = threading.Event()
        self._is_prompt = True
        self._thread = threading.Thread(target=self._run, args=(worker, ids, options))
        self._thread.start()

    def _run(self, worker: attnd.hf.Worker, ids: list[int], options: dict[str, Any]) -> None:
        try:
            prompt = torch.tensor([ids], device=worker.model.device)
            mask = torch.ones_like(prompt)
            worker.generate(
                prompt, attention_mask=mask, streamer=self, stopping_criteria=[self], **options
            )
            self._tokens.put(None)
        except Exception as e:
            self._tokens.put(e)

    def put(self, value: torch.Tensor) -> None:
        """Of BaseStreamer."""
        if not self._is_prompt:
            for token in value.flatten().tolist():
                self._tokens.put(token)
        self._is_prompt = False

    def end(self) -> None:
        """Of BaseStreamer."""

    def __call__(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        """Of StoppingCriteria: for each row, whether it ends here."""
        return torch.full(
            (input_ids.shape[0],), self._is_cancelled.is_set(), device=input_ids.device
        )

    def cancel(self) -> None:
        """Ends it after the token it is at; returns when its sequence is closed."""
        self._is_cancelled.set()
        self._thread.join()

    def tokens(self, connection: socket.socket) -> Iterator[int]:
        """As they come; ConnectionError when the client has hung up meanwhile."""
        while True:
            try:
                token = self._tokens.get(timeout=0.1)
            except queue.Empty:
                if select.select([connection], [], [], 0)[0] and not connection.recv(
                    1, socket.MSG_PEEK
                ):
                    raise ConnectionError("the client hung up") from None
                continue
            if token is None:
                return
            if isinstance(token, Exception):
                raise token
            yield token


class Text:
    """The text of tokens so far; keeps back what the next token may change, or may end in a stop."""

    def __init__(self, tokenizer: Any, stops: list[str]):
        self._tokenizer, self._stops = tokenizer, stops
        self._ids: list[int] = []
        self._n_out = 0
        self.is_stopped = False

    def add(self, ids: list[int], is_last: bool = False) -> str:
        """What is certain and new."""
        self._ids += ids
        text = self._tokenizer.decode(self._ids, skip_special_tokens=True)
        found = [at for at in map(text.find, self._stops) if at >= 0]
        self.is_stopped = bool(found)
        end = min(found, default=len(text))
        if not (self.is_stopped or is_last):
            end = len(text.rstrip("\ufffd"))  # half of a character
            for stop in self._stops:
                starts = [n for n in range(1, len(stop)) if text[:end].endswith(stop[:n])]
                end -= max(starts, default=0)
        new = text[self._n_out : end]
        self._n_out = max(self._n_out, end)
        return new


def number(body: dict[str, Any], name: str, default: float, least: float, most: float) -> float:
    value = body.get(name)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not least <= value <= most:
        raise BadRequest(f"{name} is {value!r}, expected {least} to {most}")
    return value


class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Server

    def do_GET(self) -> None:
        if self.path == "/health":
            self._send(200, {"status": "ok"})
        elif self.path == "/v1/models":
            self._send(
                200, {"object": "list", "data": [{"id": self.server.name, "object": "model"}]}
            )
        else:
            self._fail(404, f"no such path: {self.path}")

    def do_POST(self) -> None:
        is_chat = self.path == "/v1/chat/completions"
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        if not is_chat and self.path != "/v1/completions":
            return self._fail(404, f"no such path: {self.path}")
        try:
            self._complete(json.loads(body), is_chat)
        except (BadRequest, json.JSONDecodeError, attnd.UnsupportedError) as e:
            self._fail(400, str(e))
        except ConnectionError:
            self.close_connection = True
        except attnd.AttndError as e:
            self._fail(503 if e.is_retryable else 500, str(e), e.retry_after)

    def _prompt(self, body: dict[str, Any], is_chat: bool) -> list[int]:
        tokenizer = self.server.tokenizer
        if not is_chat:
            if not isinstance(body.get("prompt"), str) or not body["prompt"]:
                raise BadRequest("prompt is missing, empty, or no string")
            return tokenizer.encode(body["prompt"])
        if not tokenizer.chat_template:
            raise BadRequest(f"{self.server.name} has no chat template: use /v1/completions")
        if not isinstance(body.get("messages"), list):
            raise BadRequest("messages is missing, or no list")
        return tokenizer.apply_chat_template(
            body["messages"], add_generation_prompt=True, return_dict=False
        )

    def _complete(self, body: Any, is_chat: bool) -> None:
        if not isinstance(body, dict):
            raise BadRequest("the body is no JSON object")
        ids = self._prompt(body, is_chat)
        stops = body.get("stop") or []
        stops = [stops] if isinstance(stops, str) else stops
        if not all(isinstance(s, str) and s for s in stops):
            raise BadRequest(f"stop is {body['stop']!r}, expected strings")
        if body.get("n") not in (None, 1):
            raise BadRequest(f"n is {body['n']!r}, this server gives one text")
        temperature = number(body, "temperature", 1.0, 0, 2)
        n_most = int(number(body, "max_tokens", 256, 1, 65536))
        options = {"max_new_tokens": n_most, "do_sample": temperature > 0}
        if temperature > 0:
            options.update(temperature=temperature, top_p=number(body, "top_p", 1.0, 0, 1))
        kind = "chat.completion" if is_chat else "text_completion"
        reply = {"id": uuid.uuid4().hex, "object": kind, "model": self.server.name}
        reply["created"] = int(time.time())
        text, pieces, n_new = Text(self.server.tokenizer, stops), [], 0
        generation = Generation(self.server.worker, ids, options)
        is_begun = False
        try:
            for token in generation.tokens(self.connection):
                n_new += 1
                pieces.append(text.add([token]))
                if body.get("stream"):
                    if not is_begun:
                        self._begin_stream()
                        is_begun = True
                    self._event({**reply, "choices": [choice(is_chat, pieces[-1], None, True)]})
                if text.is_stopped:
                    break
            pieces.append(text.add([], is_last=True))
        except attnd.AttndError as e:
            if not is_begun:
                raise
            self._event({"error": {"message": str(e), "type": "server_error"}})
            self.close_connection = True
            return
        finally:
            generation.cancel()
        reason = "length" if n_new == n_most and not text.is_stopped else "stop"
        if body.get("stream"):
            if not is_begun:
                self._begin_stream()
            self._event({**reply, "choices": [choice(is_chat, pieces[-1], reason, True)]})
            self._event(None)
            self.wfile.write(b"0\r\n\r\n")
            return
        usage = {"prompt_tokens": len(ids), "completion_tokens": n_new}
        usage["total_tokens"] = len(ids) + n_new
        choices = [choice(is_chat, "".join(pieces), reason, False)]
        self._send(200, {**reply, "choices": choices, "usage": usage})

    def _begin_stream(self) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()

    def _event(self, event: Any) -> None:
        data = b"data: " + (b"[DONE]" if event is None else json.dumps(event).encode()) + b"\n\n"
        self.wfile.write(b"%x\r\n%s\r\n" % (len(data), data))

    def _send(self, status: int, body: Any, retry_after: float | None = None) -> None:
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        if retry_after is not None:
            self.send_header("Retry-After", str(max(1, round(retry_after))))
        self.end_headers()
        self.wfile.write(data)

    def _fail(self, status: int, message: str, retry_after: float | None = None) -> None:
        kind = "invalid_request_error" if status < 500 else "server_error"
        self._send(status, {"error": {"message": message, "type": kind}}, retry_after)


def choice(is_chat: bool, text: str, reason: str | None, is_part: bool) -> dict[str, Any]:
    said: dict[str, Any] = {"text": text}
    if is_chat:
        said = {"delta" if is_part else "message": {"role": "assistant", "content": text}}
    return {"index": 0, **said, "finish_reason": reason}


class Server(http.server.ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, address: tuple[str, int], model: str, url: str | None, n_tokens: int):
        folder = pathlib.Path(model)
        self.name = folder.name
        loaded = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype="auto").eval()
        self.tokenizer: Any = ByteTokenizer()
        if any(folder.glob("tokenizer*")):
            self.tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
        self.worker = attnd.hf.attach(loaded, url or attnd.default_url(), n_tokens=n_tokens)
        super().__init__(address, Handler)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default=str(BYTELM))
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000, help="0: any that is free")
    parser.add_argument(
        "--url", help="the daemon's; default: $ATTND_ENDPOINT, or where attnd listens"
    )
    parser.add_argument("--n-tokens", type=int, default=0, help="room of a new pool; default 8192")
    args = parser.parse_args()
    server = Server((args.host, args.port), args.model, args.url, args.n_tokens)
    print(f"http://{args.host}:{server.server_port}", flush=True)
    try:
        server.serve_forever()
    except KeyboardInterrupt:
        pass
    finally:
        server.worker.close()


if __name__ == "__main__":
    main()
