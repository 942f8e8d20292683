"""Links that a test cuts, many a second and as any user: a process that passes bytes on between addresses.

A link that is cut holds what is under way and passes it on once it is healed, as TCP does after an
outage, or ends its connections (ends=True). New connections wait. The namespaces of net.py cut real
links, and take seconds for it.

    with Links() as links:
        address = links.add("a", ("127.0.0.1", 2379))     # or the path of a Unix socket, for one
        links.cut("a", "b"), links.cut("a", seconds=0.1), links.heal("a", "b")
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import threading


class Links:
    def __init__(self):
        self._lock = threading.Lock()

    def __enter__(self) -> Links:
        self._process = subprocess.Popen(
            [sys.executable, "-B", __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        return self

    def __exit__(self, *exc) -> None:
        self._process.kill()
        self._process.wait()

    def _ask(self, **what):
        with self._lock:
            self._process.stdin.write(json.dumps(what) + "\n")
            self._process.stdin.flush()
            return json.loads(self._process.stdout.readline())

    def add(self, name: str, to, listen=None):
        """Where it listens: listen, or a free port of loopback. Addresses are (host, port) or paths."""
        at = self._ask(do="add", name=name, to=to, listen=listen)
        return at if isinstance(at, str) else tuple(at)

    def cut(self, *names: str, ends: bool = False, seconds: float | None = None) -> None:
        """Returns once it is cut; seconds: heals itself then."""
        self._ask(do="cut", names=names, ends=ends, seconds=seconds)

    def heal(self, *names: str) -> None:
        self._ask(do="heal", names=names)


class _Link:
    def __init__(self, to):
        self._to = to
        self._is_open = asyncio.Event()
        self._is_open.set()
        self._writers: set[asyncio.StreamWriter] = set()

    async def listen(self, listen):
        if isinstance(listen, str):
            await asyncio.start_unix_server(self._serve, listen)
            return listen
        server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        return server.sockets[0].getsockname()

    def cut(self, ends: bool) -> None:
        self._is_open.clear()
        for w in [*self._writers] if ends else ():
            w.transport.abort()

    def heal(self) -> None:
        self._is_open.set()

    async def _serve(self, reader, writer) -> None:
        self._writers.add(writer)
        far = None
        try:
            await self._is_open.wait()
            if isinstance(self._to, str):
                there, far = await asyncio.open_unix_connection(self._to)
            else:
                there, far = await asyncio.open_connection(*self._to)
            self._writers.add(far)
            await asyncio.gather(self._pass(reader, far), self._pass(there, writer))
        except OSError:
            pass
        finally:
            for w in (writer, far):
                if w is not None:
                    self._writers.discard(w)
                    w.transport.abort()

    async def _pass(self, reader, writer) -> None:
        while True:
            piece = await reader.read(1 << 18)
            await self._is_open.wait()
            if not piece:
                if writer.can_write_eof():
                    writer.write_eof()
                return
            writer.write(piece)
            await writer.drain()


async def _main() -> None:
    links: dict[str, _Link] = {}
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    while line := await reader.readline():
        o, answer = json.loads(line), None
        if o["do"] == "add":
            to = o["to"] if isinstance(o["to"], str) else tuple(o["to"])
            links[o["name"]] = _Link(to)
            answer = await links[o["name"]].listen(o["listen"])
        for name in o.get("names", ()):
            if o["do"] == "cut":
                links[name].cut(o["ends"])
                if o["seconds"] is not None:
                    loop.call_later(o["seconds"], links[name].heal)
            else:
                links[name].heal()
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    asyncio.run(_main())
