"""The events of /v1/responses, and the response that they add up to."""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator, Sequence
from typing import Literal

from rorqual.server.parsing.events import Content, Event, Reasoning, ToolCallArguments, ToolCallStart
from rorqual.server.schemas import responses as api

LastWord = Literal["completed", "incomplete", "failed"]


class ResponseBuilder:
    """Turns what the parsers say of one answer into events, in order, and keeps `response` up to date.

    Args:
        response: the new one; it is filled in.
        summary: whether thinking is sent as summary.
    """

    def __init__(self, response: api.Response, *, summary: bool) -> None:
        self.response = response
        self._summary = summary
        self._number = 0
        self._item: api.OutputItem | None = None
        """The one that is being written; it is in the response already."""
        self._pieces: list[str] = []
        """Its text."""
        self._logprobs: list[api.OutputLogprob] = []

    def start(self) -> Iterator[api.Event]:
        """The first events."""
        for name in ("response.created", "response.in_progress"):
            yield api.ResponseEvent(type=name, sequence_number=self._next(), response=self.response)

    def push(self, events: Sequence[Event], logprobs: Sequence[api.OutputLogprob] = ()) -> Iterator[api.Event]:
        """More of the answer; `logprobs` belong to the content in `events`."""
        for event in events:
            if isinstance(event, Content):
                yield from self._text(event.text, list(logprobs))
                logprobs = ()
            elif isinstance(event, Reasoning):
                yield from self._reasoning(event.text)
            else:
                yield from self._call(event)

    def add_logprobs(self, logprobs: Sequence[api.OutputLogprob]) -> None:
        """Of tokens that end the message without a text of their own."""
        if isinstance(self._item, api.OutputMessage):
            self._logprobs += logprobs

    def finish(
        self, status: LastWord, usage: api.ResponseUsage | None, error: str | None = None
    ) -> Iterator[api.Event]:
        """The last events."""
        response = self.response
        if status == "completed" and not response.output:
            yield from self._open(self._new_message())
        yield from self._close("completed" if status == "completed" else "incomplete")
        response.status, response.usage = status, usage
        if status == "completed":
            response.completed_at = int(time.time())
        elif status == "incomplete":
            response.incomplete_details = api.IncompleteDetails()
        else:
            response.error = api.ResponseFault(message=error or "")
        yield api.ResponseEvent(type=f"response.{status}", sequence_number=self._next(), response=response)

    # --- items

    def _text(self, text: str, logprobs: list[api.OutputLogprob]) -> Iterator[api.Event]:
        if not isinstance(self._item, api.OutputMessage):
            yield from self._close("completed")
            yield from self._open(self._new_message())
        self._pieces.append(text)
        self._logprobs += logprobs
        yield api.TextDeltaEvent(
            type="response.output_text.delta", **self._place(), content_index=0, delta=text, logprobs=logprobs
        )

    def _reasoning(self, text: str) -> Iterator[api.Event]:
        if not isinstance(self._item, api.ReasoningItem):
            yield from self._close("completed")
            yield from self._open(api.ReasoningItem(id=_new_id("rs"), status="in_progress", summary=[], content=[]))
        self._pieces.append(text)
        if self._summary:
            yield api.SummaryDeltaEvent(
                type="response.reasoning_summary_text.delta", **self._place(), summary_index=0, delta=text
            )
        else:
            yield api.ReasoningDeltaEvent(
                type="response.reasoning_text.delta", **self._place(), content_index=0, delta=text
            )

    def _call(self, event: ToolCallStart | ToolCallArguments) -> Iterator[api.Event]:
        if isinstance(event, ToolCallStart):
            yield from self._close("completed")
            yield from self._open(
                api.FunctionCallItem(
                    id=_new_id("fc"), status="in_progress", call_id=event.id, name=event.name, arguments=""
                )
            )
            return
        self._pieces.append(event.text)
        yield api.ArgumentsDeltaEvent(type="response.function_call_arguments.delta", **self._place(), delta=event.text)

    @staticmethod
    def _new_message() -> api.OutputMessage:
        return api.OutputMessage(id=_new_id("msg"), status="in_progress", content=[])

    def _open(self, item: api.OutputItem) -> Iterator[api.Event]:
        self.response.output.append(item)
        self._item, self._pieces, self._logprobs = item, [], []
        place = self._place  # numbers are given in the order of the events
        index = len(self.response.output) - 1
        yield api.ItemEvent(
            type="response.output_item.added", sequence_number=self._next(), output_index=index, item=item
        )
        if isinstance(item, api.OutputMessage):
            part = api.OutputText(text="")
            yield api.PartEvent(type="response.content_part.added", **place(), content_index=0, part=part)
        elif isinstance(item, api.ReasoningItem):
            if self._summary:
                yield api.SummaryPartEvent(
                    type="response.reasoning_summary_part.added",
                    **place(),
                    summary_index=0,
                    part=api.SummaryText(text=""),
                )
            else:
                yield api.PartEvent(
                    type="response.content_part.added",
                    **place(),
                    content_index=0,
                    part=api.ReasoningText(text=""),
                )

    def _close(self, status: api.ItemStatus) -> Iterator[api.Event]:
        item, text = self._item, "".join(self._pieces)
        if item is None:
            return
        item.status = status
        place = self._place
        if isinstance(item, api.OutputMessage):
            part = api.OutputText(text=text, logprobs=self._logprobs)
            item.content = [part]
            yield api.TextDoneEvent(
                type="response.output_text.done", **place(), content_index=0, text=text, logprobs=self._logprobs
            )
            yield api.PartEvent(type="response.content_part.done", **place(), content_index=0, part=part)
        elif isinstance(item, api.FunctionCallItem):
            item.arguments = text
            yield api.ArgumentsDoneEvent(
                type="response.function_call_arguments.done", **place(), name=item.name, arguments=text
            )
        elif self._summary:
            summary = api.SummaryText(text=text)
            item.summary = [summary]
            yield api.SummaryDoneEvent(
                type="response.reasoning_summary_text.done", **place(), summary_index=0, text=text
            )
            yield api.SummaryPartEvent(
                type="response.reasoning_summary_part.done", **place(), summary_index=0, part=summary
            )
        else:
            thought = api.ReasoningText(text=text)
            item.content = [thought]
            yield api.ReasoningDoneEvent(type="response.reasoning_text.done", **place(), content_index=0, text=text)
            yield api.PartEvent(type="response.content_part.done", **place(), content_index=0, part=thought)
        yield api.ItemEvent(
            type="response.output_item.done",
            sequence_number=self._next(),
            output_index=len(self.response.output) - 1,
            item=item,
        )
        self._item, self._pieces = None, []

    # --- numbers

    def _next(self) -> int:
        self._number += 1
        return self._number - 1

    def _place(self) -> dict[str, int | str]:
        """What all events about an item say."""
        assert self._item is not None
        return {
            "sequence_number": self._next(),
            "item_id": self._item.id,
            "output_index": len(self.response.output) - 1,
        }


def _new_id(kind: str) -> str:
    return f"{kind}_{uuid.uuid4().hex}"
