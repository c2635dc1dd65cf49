// Server-sent events, and what they say about an answer. Nothing here knows the page.
"use strict";

// Cuts a stream of text into the data of its events, whatever the pieces it comes in.
class EventSplitter {
  #rest = "";
  #data = [];

  push(text) {
    const found = [];
    // A carriage return at the end may be half of a line's end.
    const lines = (this.#rest + text).split(/\r\n|\n|\r(?!$)/);
    this.#rest = lines.pop();
    for (const line of lines) {
      if (line === "") {
        if (this.#data.length) found.push(this.#data.join("\n"));
        this.#data = [];
      } else if (line.startsWith("data:")) {
        this.#data.push(line.slice(line[5] === " " ? 6 : 5));
      }
    }
    return found;
  }
}

// One answer as its chunks come. Times are milliseconds.
class AnswerReader {
  constructor(startedAt) {
    this.text = this.reasoning = "";
    this.finishReason = this.usage = this.error = null;
    this.done = false;
    this.startedAt = startedAt;
    this.firstAt = this.lastAt = null;
    this.pieces = 0;
  }

  take(data, now) {
    if (data === "[DONE]") { this.done = true; return; }
    let chunk;
    try {
      chunk = JSON.parse(data);
    } catch {
      this.error = "The server sent something that is not JSON: " + data.slice(0, 200);
      return;
    }
    if (chunk.error) { this.error = chunk.error.message || JSON.stringify(chunk.error); return; }
    if (chunk.usage) this.usage = chunk.usage;
    for (const choice of chunk.choices || []) {
      const delta = choice.delta || {};
      const reasoning = delta.reasoning_content || delta.reasoning || "";
      const text = delta.content || "";
      if (reasoning || text) {
        this.firstAt ??= now;
        this.lastAt = now;
        this.pieces += 1;
      }
      this.reasoning += reasoning;
      this.text += text;
      if (choice.finish_reason) this.finishReason = choice.finish_reason;
    }
  }

  // What went wrong, once nothing more comes; null if nothing did.
  problem() {
    if (this.error) return this.error;
    if (this.finishReason === "error") return "The server could not finish this answer.";
    return this.done || this.finishReason ? null : "The connection ended before the answer did.";
  }

  // "first token 120 ms · 35.2 tok/s · 64 tokens"; tokens are the server's count where it gives one.
  facts() {
    if (this.firstAt === null) return "";
    const tokens = this.usage?.completion_tokens ?? this.pieces;
    const parts = [`first token ${Math.round(this.firstAt - this.startedAt)} ms`];
    if (tokens > 1 && this.lastAt > this.firstAt) {
      parts.push(`${((1000 * (tokens - 1)) / (this.lastAt - this.firstAt)).toFixed(1)} tok/s`);
    }
    parts.push(`${tokens} ${tokens === 1 ? "token" : "tokens"}`);
    if (this.finishReason === "length") parts.push("cut at the limit");
    return parts.join(" · ");
  }
}

// What an answer that is not 200 says, for people.
function errorText(status, body) {
  let said = body.trim().slice(0, 300);
  try {
    const parsed = JSON.parse(body);
    said = parsed.error?.message || parsed.message || (typeof parsed.detail === "string" ? parsed.detail : "") || said;
  } catch { /* not JSON: shown as it is */ }
  return said ? `${said} (HTTP ${status})` : `HTTP ${status}`;
}
