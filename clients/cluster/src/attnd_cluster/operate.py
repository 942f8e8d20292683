"""What operators and the controller ask of agents, over their HTTP."""

from __future__ import annotations

import json
import pathlib
from typing import Any

import urllib3

from .keys import Member

_SECONDS = 5.0
_MOVE_SECONDS = 120.0


class AgentError(Exception):
    """The agent did not do it; says why."""


class Agents:
    """token_file: what the agents' --token-file has; ca_file: of https:// agents."""

    def __init__(self, token_file: str | None, ca_file: str | None = None):
        self._token_file = token_file
        tls: dict[str, Any] = {"ca_certs": ca_file} if ca_file is not None else {}
        self._pool = urllib3.PoolManager(num_pools=32, **tls)

    def ask(
        self, member: Member, path: str, body: Any = None, timeout: float = _SECONDS
    ) -> dict[str, Any]:
        """Raises AgentError."""
        if not member.agent:
            raise AgentError(f"{member.name}: no agent is known")
        headers = {"Connection": "close"}
        if self._token_file is not None:
            token = pathlib.Path(self._token_file).read_text().split("\n")[0].strip()
            headers["Authorization"] = f"Bearer {token}"
        try:
            r = self._pool.request(
                "GET" if body is None else "POST",
                member.agent + path,
                body=None if body is None else json.dumps(body).encode(),
                headers=headers,
                timeout=timeout,
                retries=False,
            )
        except urllib3.exceptions.HTTPError as e:
            raise AgentError(f"{member.name}: {e}") from None
        if r.status >= 300:
            raise AgentError(f"{member.name}: {r.data[:300].decode('utf-8', 'replace').strip()}")
        answer: dict[str, Any] = json.loads(r.data)
        return answer

    def sequences(self, member: Member) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = self.ask(member, "/v1/sequences")["sequences"]
        return found

    def move(self, member: Member, sequence: int, to: str | None) -> str:
        """The name of who has it now."""
        body = {"sequence": sequence} if to is None else {"sequence": sequence, "to": to}
        taker: str = self.ask(member, "/v1/move", body, _MOVE_SECONDS)["to"]
        return taker
