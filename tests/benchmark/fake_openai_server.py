"""A server without a model that streams on a timetable, misbehaves on demand, and records what it did.

Run as a process: prints its port. The field "fake" of a request's body says how to answer:
  first_s, gap_s    when the first event goes out after the request came in, and the others after it
  per_event         tokens in one event
  per_write         events in one write
  seq               the request's number in GET /records
  status            answer with this status and an error object
  fail_after        "error" | "cut" | "hang" | "garbage" after `after` tokens
  no_usage, no_finish, no_done, html, no_answer, crlf, comments, split: true
GET /records: for each request [received_at, [written_at, tokens] ...] on the monotonic clock, and the bodies.
"""

import asyncio
import contextlib
import json
import sys
import time
from typing import Any

records: list[dict[str, Any]] = []


def event(data: object, fake: dict[str, Any]) -> bytes:
    """One server-sent event."""
    text = data if isinstance(data, str) else json.dumps(data)
    end = "\r\n\r\n" if fake.get("crlf") else "\n\n"
    comment = f": ping{end}" if fake.get("comments") else ""
    return f"{comment}data: {text}{end}".encode()


class Answer:
    """One request's."""

    def __init__(self, writer: asyncio.StreamWriter, body: dict[str, Any], is_chat: bool) -> None:
        self.writer = writer
        self.body = body
        self.fake = body.get("fake", {})
        self.is_chat = is_chat
        self.record: dict[str, Any] = {"received_at": time.monotonic(), "writes": [], "body": body}
        records.append(self.record)

    def chunk(self, text: str, finish: str | None = None) -> bytes:
        choice: dict[str, Any] = {"index": 0, "finish_reason": finish}
        choice |= {"delta": {"content": text}} if self.is_chat else {"text": text}
        return event({"choices": [choice], "usage": None}, self.fake)

    async def write(self, data: bytes, num_tokens: int = 0) -> None:
        """One chunk of the body, or two halves of it a moment apart."""
        halves = [data[: len(data) // 2], data[len(data) // 2 :]] if self.fake.get("split") else [data]
        for half in halves:
            if num_tokens and half is halves[-1]:
                self.record["writes"].append([time.monotonic(), num_tokens])
            self.writer.write(b"%x\r\n%s\r\n" % (len(half), half))
            await self.writer.drain()
            await asyncio.sleep(0.002 if self.fake.get("split") else 0)

    async def send(self) -> None:
        fake, num_tokens = self.fake, self.body["max_tokens"]
        kind = b"text/html" if fake.get("html") else b"text/event-stream"
        self.writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: %s\r\nTransfer-Encoding: chunked\r\n\r\n" % kind)
        if self.is_chat:
            await self.write(event({"choices": [{"index": 0, "delta": {"role": "assistant"}}]}, fake))
        due = self.record["received_at"] + fake.get("first_s", 0.0)
        per_event = fake.get("per_event", 1)
        num_left = num_tokens
        while num_left:
            await asyncio.sleep(max(0.0, due - time.monotonic()))
            if num_tokens - num_left >= fake.get("after", num_tokens) and await self.fail():
                return
            data, num_now = b"", 0
            for _ in range(fake.get("per_write", 1)):
                num = min(per_event, num_left)
                num_left -= num
                num_now += num
                last = not num_left and not self.is_chat and not fake.get("no_finish")
                data += self.chunk(" a" * num, "length" if last else None) if num else b""
            await self.write(data, num_now)
            due += fake.get("gap_s", 0.0)
        if self.is_chat:
            await self.write(self.chunk("", "length"))
        if not fake.get("no_usage"):
            usage = {"prompt_tokens": 7, "completion_tokens": num_tokens}
            usage |= {"prompt_tokens_details": {"cached_tokens": 3}}
            await self.write(event({"choices": [], "usage": usage}, fake))
        if not fake.get("no_done"):
            await self.write(event("[DONE]", fake))
        self.writer.write(b"0\r\n\r\n")

    async def fail(self) -> bool:
        """Misbehave as asked; whether the answer is over."""
        how = self.fake.get("fail_after")
        if how == "error":
            await self.write(event({"error": {"message": "the engine died", "code": "x"}}, self.fake))
            self.writer.write(b"0\r\n\r\n")
        elif how == "garbage":
            await self.write(event('{"choices": [}', self.fake))
            self.writer.write(b"0\r\n\r\n")
        elif how == "hang":
            await asyncio.sleep(60)
        elif how == "end":
            self.writer.write(b"0\r\n\r\n")
        return how is not None


async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """One connection, one request."""
    with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
        head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
        method, path, _ = head.split(" ", 2)
        length = next(
            (int(line[15:]) for line in head.split("\r\n") if line.lower().startswith("content-l")), 0
        )
        body = json.loads(await reader.readexactly(length) or "{}")
        if method == "GET":
            known = {"/v1/models": {"data": [{"id": "fake-model"}]}, "/records": records}
            reply(writer, 200 if path in known else 404, known.get(path, {"error": {"message": "no route"}}))
        elif path not in ("/v1/completions", "/v1/chat/completions"):
            reply(writer, 404, {"error": {"message": "no route"}})
        elif "status" in body.get("fake", {}):
            records.append({"received_at": time.monotonic(), "writes": [], "body": body})
            reply(writer, body["fake"]["status"], {"error": {"message": "too many of you"}})
        elif not body.get("fake", {}).get("no_answer"):
            await Answer(writer, body, "chat" in path).send()
        await writer.drain()
    writer.close()


def reply(writer: asyncio.StreamWriter, status: int, content: object) -> None:
    data = json.dumps(content).encode()
    head = f"HTTP/1.1 {status} X\r\nContent-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
    writer.write(head.encode() + data)


async def main() -> None:
    server = await asyncio.start_server(handle, "127.0.0.1", 0, backlog=512)
    sys.stdout.write(f"{server.sockets[0].getsockname()[1]}\n")
    sys.stdout.flush()
    await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(main())
