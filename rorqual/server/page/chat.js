// The page: what was said, the settings, and one answer at a time.
"use strict";

const byId = (id) => document.getElementById(id);
const [log, prompt, notice, model] = ["log", "prompt", "notice", "model"].map(byId);
const SETTINGS = { system: "system", temperature: "temperature", maxTokens: "max-tokens" };
let messages = [];    // {role, content, reasoning?, facts?, error?}
let running = null;   // the AbortController of the answer that comes

// Storage may be forbidden or full; the page works without.
function remember(storage, name, value) {
  try { window[storage].setItem("rorqual." + name, JSON.stringify(value)); } catch { /* not kept */ }
}
function recall(storage, name, otherwise) {
  try { return JSON.parse(window[storage].getItem("rorqual." + name)) ?? otherwise; } catch { return otherwise; }
}

function make(tag, className, text) {
  const element = document.createElement(tag);
  if (className) element.className = className;
  if (text !== undefined) element.textContent = text;
  return element;
}

function button(label, action) {
  const made = make("button", "", label);
  made.type = "button";
  made.addEventListener("click", () => action(made));
  return made;
}

function copyButton(text) {
  return button("Copy", async (self) => {
    self.textContent = (await copy(text)) ? "Copied" : "Not allowed";
    setTimeout(() => { self.textContent = "Copy"; }, 1500);
  });
}

async function copy(text) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {  // the clipboard wants https or localhost; a selection does not
    const area = make("textarea", "hidden");
    area.value = text;
    document.body.append(area);
    area.select();
    const done = document.execCommand("copy");
    area.remove();
    return done;
  }
}

function say(text) {
  notice.textContent = text;
  notice.className = "error";
  notice.hidden = !text;
}

function address(path) {
  return new URL(path, document.baseURI);
}

function headers() {
  const key = byId("key").value.trim();
  return { "Content-Type": "application/json", ...(key && { Authorization: "Bearer " + key }) };
}

async function loadModels() {
  try {
    const answer = await fetch(address("v1/models"), { headers: headers() });
    if (answer.status === 401) byId("settings").open = true;
    if (!answer.ok) throw new Error(errorText(answer.status, await answer.text()));
    const names = (await answer.json()).data.map((each) => each.id);
    const chosen = recall("localStorage", "model", names[0]);
    model.replaceChildren(...names.map((name) => new Option(name, name, false, name === chosen)));
    model.disabled = false;
    say("");
  } catch (error) {
    model.replaceChildren(new Option("no model"));
    model.disabled = true;
    say(error instanceof TypeError ? "The server cannot be reached." : error.message);
  }
}

// --- messages on the page

function messageView(message) {
  const view = make("article", "message " + message.role);
  view.setAttribute("aria-label", message.role === "user" ? "You" : "Assistant");
  if (message.reasoning) view.append(reasoningView(message.reasoning));
  view.append(make("div", "text"));
  if (message.role === "user") view.lastChild.textContent = message.content;
  else view.lastChild.append(toDom(parseMarkdown(message.content), copyButton));
  if (message.error) {
    view.append(make("p", "error", message.error));
    view.lastChild.setAttribute("role", "alert");
  }
  if (message.role === "assistant") view.append(factsView(message));
  return view;
}

function reasoningView(text, open = false) {
  const fold = make("details", "reasoning");
  fold.open = open;
  fold.append(make("summary", "", "Reasoning"), make("div", "text"));
  fold.lastChild.append(toDom(parseMarkdown(text), copyButton));
  return fold;
}

function factsView(message) {
  const facts = make("div", "facts");
  if (message.facts) facts.append(make("span", "", message.facts));
  if (running) return facts;
  if (message.content) facts.append(copyButton(message.content));
  if (message === messages.at(-1)) facts.append(button(message.error ? "Try again" : "Regenerate", regenerate));
  return facts;
}

function showAll() {
  const views = messages.map(messageView);
  log.replaceChildren(...(views.length ? views : [empty]));
  log.scrollTop = log.scrollHeight;
}

function isAtEnd() {
  return log.scrollHeight - log.scrollTop - log.clientHeight < 60;
}

// Shows a message as it grows: at most once per frame, and so seldom that drawing takes a small part of the time.
class LiveView {
  #timer = null;
  #pause = 0;

  constructor(message) {
    this.message = message;
    this.view = messageView(message);
    this.view.classList.add("waiting");
    this.folded = null;
    log.append(this.view);
  }

  changed() {
    this.#timer ??= setTimeout(() => requestAnimationFrame(() => this.draw()), this.#pause);
  }

  draw() {
    this.#timer = null;
    if (!this.view.isConnected) return;
    const before = performance.now();
    const follow = isAtEnd();
    const old = this.view.querySelector("details.reasoning");
    const next = messageView(this.message);
    const fold = next.querySelector("details.reasoning");
    // Reasoning is open until the answer begins, or as the person left it.
    if (old && old.open !== this.folded) this.byHand = old.open;
    if (fold) fold.open = this.folded = this.byHand ?? !this.message.content;
    next.classList.add("waiting");
    this.view.replaceWith(next);
    this.view = next;
    if (follow) log.scrollTop = log.scrollHeight;
    this.#pause = 4 * (performance.now() - before);
  }
}

// --- one answer

function requestBody() {
  const system = byId("system").value.trim();
  const [temperature, maxTokens] = [byId("temperature").value, byId("max-tokens").value];
  // A question whose answer failed is left out with it: templates want the two in turns.
  const said = messages.filter((each, n) => (each.role === "user" ? messages[n + 1]?.content !== "" : each.content));
  return {
    model: model.value,
    messages: [
      ...(system ? [{ role: "system", content: system }] : []),
      ...said.map(({ role, content }) => ({ role, content })),
    ],
    stream: true,
    stream_options: { include_usage: true },
    ...(temperature !== "" && { temperature: Number(temperature) }),
    ...(maxTokens !== "" && { max_tokens: Number(maxTokens) }),
  };
}

async function answer() {
  const body = JSON.stringify(requestBody());
  const message = { role: "assistant", content: "" };
  const reader = new AnswerReader(performance.now());
  running = new AbortController();
  setRunning(true);
  messages.push(message);
  showAll();
  log.lastChild.remove();
  const live = new LiveView(message);
  log.scrollTop = log.scrollHeight;
  const update = () => {
    [message.content, message.reasoning, message.facts] = [reader.text, reader.reasoning, reader.facts()];
  };
  try {
    const request = { method: "POST", headers: headers(), body, signal: running.signal };
    const got = await fetch(address("v1/chat/completions"), request);
    if (!got.ok) throw new Error(errorText(got.status, await got.text()));
    const splitter = new EventSplitter();
    const decoder = new TextDecoder();
    const pieces = got.body.getReader();
    for (let piece; !reader.done && !reader.error && !(piece = await pieces.read()).done;) {
      const text = decoder.decode(piece.value, { stream: true });
      for (const data of splitter.push(text)) reader.take(data, performance.now());
      update();
      live.changed();
    }
    pieces.cancel().catch(() => {});
    message.error = reader.problem();
  } catch (error) {
    if (error.name !== "AbortError") {
      message.error = error instanceof TypeError ? "The connection to the server was lost." : error.message;
    }
  }
  update();
  if (running.signal.aborted) message.facts = [message.facts, "stopped"].filter(Boolean).join(" · ");
  running = null;
  setRunning(false);
  const follow = isAtEnd();
  const top = log.scrollTop;
  showAll();
  if (!follow) log.scrollTop = top;
  remember("localStorage", "messages", messages);
}

function setRunning(on) {
  byId("send").hidden = on;
  byId("stop").hidden = !on;
  log.setAttribute("aria-busy", String(on));
}

function send() {
  const text = prompt.value.trim();
  if (!text || running) return;
  if (model.disabled) { loadModels(); return; }
  messages.push({ role: "user", content: text });
  prompt.value = "";
  grow();
  answer();
}

function regenerate() {
  if (running) return;
  messages.pop();
  answer();
}

function clear() {
  running?.abort();
  messages = [];
  remember("localStorage", "messages", messages);
  showAll();
  prompt.focus();
}

function grow() {
  prompt.style.height = "auto";
  prompt.style.height = prompt.scrollHeight + 2 + "px";
}

// --- start

const empty = byId("empty");
for (const [name, id] of Object.entries(SETTINGS)) {
  byId(id).value = recall("localStorage", name, "");
  byId(id).addEventListener("input", () => remember("localStorage", name, byId(id).value));
}
byId("key").value = recall("sessionStorage", "key", "");
byId("key").addEventListener("change", () => {
  remember("sessionStorage", "key", byId("key").value);
  loadModels();
});
model.addEventListener("change", () => remember("localStorage", "model", model.value));
byId("clear").addEventListener("click", clear);
byId("stop").addEventListener("click", () => running?.abort());
byId("composer").addEventListener("submit", (event) => { event.preventDefault(); send(); });
prompt.addEventListener("input", grow);
prompt.addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) { event.preventDefault(); send(); }
});
document.addEventListener("keydown", (event) => { if (event.key === "Escape") running?.abort(); });
window.addEventListener("pagehide", () => remember("localStorage", "messages", messages));
messages = recall("localStorage", "messages", []);
showAll();
loadModels();
prompt.focus();
