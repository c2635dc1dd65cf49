"""A server for load tests: it streams as it is told, on a thread of its own, and counts."""

import asyncio
import contextlib
import json
import socket
import threading

import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, StreamingResponse


@contextlib.contextmanager
def serving(app):
    """Serve an ASGI app; yields its base URL."""
    listener = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(app, log_level="error"))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    thread.start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join()


class StubApi:
    """An API that answers each request with as many pieces as it wants tokens.

    Attributes are what it does: seconds before the first piece and between pieces, whether it says usage, and what goes
    wrong with the request of a number.
    """

    def __init__(self):
        self.first_s, self.between_s, self.usage, self.faults = 0.0, 0.0, True, {}
        self.bodies, self.keys, self.clients, self.running, self.most = [], [], set(), 0, 0
        self.app = FastAPI()
        self.app.get("/v1/models")(lambda: {"data": [{"id": "stub"}, {"id": "other"}]})
        self.app.post("/v1/chat/completions")(self.answer)
        self.app.post("/v1/completions")(self.answer)

    async def answer(self, request: Request):
        number = len(self.bodies)
        self.bodies.append(await request.json())
        self.keys.append(request.headers.get("authorization"))
        self.clients.add(request.client)
        fault = self.faults.get(number)
        if isinstance(fault, int):
            return JSONResponse({"error": {"message": f"no {fault}"}}, fault)
        return StreamingResponse(self.pieces(self.bodies[-1], fault), media_type="text/event-stream")

    async def pieces(self, body, fault):
        chat = "messages" in body
        self.running += 1
        self.most = max(self.most, self.running)

        def event(text, finish_reason=None):
            choice = {"delta": {"content": text} if text else {}} if chat else {"text": text}
            return f"data: {json.dumps({'choices': [choice | {'finish_reason': finish_reason}]})}\n\n"

        try:
            if chat:
                yield 'data: {"choices": [{"delta": {"role": "assistant", "content": ""}, "finish_reason": null}]}\n\n'
            await asyncio.sleep(self.first_s)
            for number in range(body["max_tokens"]):
                if number == 2 and fault == "cut":
                    return
                if number == 2 and fault == "error":
                    yield 'data: {"error": {"message": "no blocks"}}\n\n'
                    return
                if number == 2 and fault == "hang":
                    await asyncio.sleep(60)
                if number:
                    await asyncio.sleep(self.between_s)
                yield event("x")
            yield event("", "length")
            if self.usage:
                usage = {"prompt_tokens": 7, "completion_tokens": body["max_tokens"]}
                yield f"data: {json.dumps({'choices': [], 'usage': usage})}\n\n"
            yield "data: [DONE]\n\n"
        finally:
            self.running -= 1
