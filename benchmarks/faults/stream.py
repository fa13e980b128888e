"""One streaming completion on a thread, watched from outside: tokens so far, how it ended and when."""

import http.client
import json
import threading
import time
from dataclasses import dataclass, field

MODEL = "qwen4-exp-demo"


@dataclass
class Stream:
    """A request for `length` tokens after a prompt of token ids; `start()` sends it.

    `end` is one word for how it ended (done, error, http, cut) and `detail` says more; both are set by the time that
    `ended` is.  `ended_at` is on the clock of time.monotonic().
    """

    port: int
    prompt: list[int]
    length: int
    patience: float = 600.0
    tokens: int = 0
    end: str = ""
    detail: str = ""
    ended_at: float = 0.0
    retry_after: str | None = None
    ended: threading.Event = field(default_factory=threading.Event)
    connection: http.client.HTTPConnection | None = None

    def start(self) -> "Stream":
        threading.Thread(target=self._run, daemon=True).start()
        return self

    def hang_up(self) -> None:
        """Close the connection as a client that went away does."""
        if self.connection is not None and self.connection.sock is not None:
            self.connection.sock.shutdown(2)

    def wait_for_tokens(self, count: int, limit: float) -> bool:
        deadline = time.monotonic() + limit
        while self.tokens < count and not self.ended.is_set() and time.monotonic() < deadline:
            time.sleep(0.02)
        return self.tokens >= count

    def need_tokens(self, count: int, what_for: str, limit: float = 60) -> None:
        """Wait for them.

        Raises:
            RuntimeError: they did not come.
        """
        if not self.wait_for_tokens(count, limit):
            raise RuntimeError(f"no tokens {what_for}: {self.end} {self.detail}")

    def _run(self) -> None:
        try:
            self.end, self.detail = self._read()
        except (OSError, http.client.HTTPException) as error:
            self.end, self.detail = "cut", f"{type(error).__name__}: {error}"
        self.ended_at = time.monotonic()
        self.ended.set()

    def _read(self) -> tuple[str, str]:
        self.connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=self.patience)
        body = {
            "model": MODEL,
            "prompt": self.prompt,
            "max_tokens": self.length,
            "temperature": 0,
            "stream": True,
            "ignore_eos": True,
            # A chunk may hold several tokens, after a pause of the server.
            "return_token_ids": True,
        }
        self.connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
        response = self.connection.getresponse()
        if response.status != 200:
            self.retry_after = response.getheader("Retry-After")
            return "http", f"{response.status} {response.read(600).decode(errors='replace')}"
        for line in response:
            if not line.startswith(b"data: "):
                continue
            data = line[6:].strip()
            if data == b"[DONE]":
                return "done", f"{self.tokens} tokens"
            chunk = json.loads(data)
            if "error" in chunk:
                return "error", str(chunk["error"].get("message", chunk["error"]))
            self.tokens += sum(len(choice.get("token_ids") or ()) for choice in chunk["choices"])
        return "cut", "connection closed without [DONE]"
