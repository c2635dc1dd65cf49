// Markdown as a tree: text is a string, an element is [tag, attributes, ...children]. Nothing is ever read as HTML, and what
// `toDom` makes holds the model's text as text nodes only. Half a document (an answer that still comes) is a document.
"use strict";

const MAX_DEPTH = 8;      // of nested lists, quotes and emphasis
const LOOK_AHEAD = 4000;  // characters between the two ends of an emphasis, a code span, a link
const MAX_STEPS = 2e6;    // of looking for such ends in one document; what is left then is plain text
const LIST_ITEM = /^( *)([-*+]|\d{1,9}[.)])(?: +|$)/;
// The text behind "[", its end, and an address that may hold one pair of parentheses.
const LINK = /^((?:[^\[\]\\]|\\.)*)\]\( *<?([^\s<>()]*(?:\([^\s<>()]*\)[^\s<>()]*)*)>?(?: +"[^"]*")? *\)/;
const FENCE = /^ {0,3}(`{3,}|~{3,}) *([^`]*)$/;

let steps = 0;

function parseMarkdown(text) {
  steps = 0;
  return parseBlocks(text.replace(/\r\n?/g, "\n").replace(/\t/g, "    ").split("\n"), 0);
}

function parseBlocks(lines, depth) {
  const blocks = [];
  for (let i = 0; i < lines.length;) {
    if (!lines[i].trim()) { i += 1; continue; }
    const [block, next] = readBlock(lines, i, depth);
    blocks.push(block);
    i = next;
  }
  return blocks;
}

function readBlock(lines, i, depth) {
  const line = lines[i];
  const fence = FENCE.exec(line);
  if (fence) return readCode(lines, i, fence);
  const heading = /^ {0,3}(#{1,6}) +(?=\S)/.exec(line);
  if (heading) {
    const title = line.slice(heading[0].length).trimEnd().replace(/ #+$/, "");
    return [["h" + heading[1].length, {}, ...parseInline(title)], i + 1];
  }
  if (isRule(line)) return [["hr", {}], i + 1];
  if (isTable(lines, i)) return readTable(lines, i);
  if (depth < MAX_DEPTH) {
    if (/^ {0,3}>/.test(line)) return readQuote(lines, i, depth);
    if (LIST_ITEM.test(line)) return readList(lines, i, depth);
  }
  let end = i + 1;
  while (end < lines.length && lines[end].trim() && !startsBlock(lines, end)) end += 1;
  const text = lines.slice(i, end).map((each) => each.trim()).join("\n");
  return [["p", {}, ...parseInline(text)], end];
}

function startsBlock(lines, i) {
  const line = lines[i];
  return FENCE.test(line) || /^ {0,3}(#{1,6} +\S|>)/.test(line) || isRule(line) || LIST_ITEM.test(line) || isTable(lines, i);
}

function isRule(line) {
  const marks = line.replace(/ /g, "");
  return marks.length >= 3 && "-*_".includes(marks[0]) && [...marks].every((mark) => mark === marks[0]);
}

function readCode(lines, i, fence) {
  let end = i + 1;
  const closes = (line) => {
    const bare = line.trim();
    return bare.length >= fence[1].length && [...bare].every((mark) => mark === fence[1][0]);
  };
  while (end < lines.length && !closes(lines[end])) end += 1;
  const indent = /^ */.exec(lines[i])[0].length;
  const text = lines.slice(i + 1, end).map((line) => line.slice(Math.min(indent, line.length - line.trimStart().length)));
  return [["codeblock", { language: fence[2].trim().split(" ")[0] }, text.join("\n")], end + 1];
}

function readQuote(lines, i, depth) {
  let end = i;
  while (end < lines.length && /^ {0,3}>/.test(lines[end])) end += 1;
  const inner = lines.slice(i, end).map((line) => line.replace(/^ {0,3}> ?/, ""));
  return [["blockquote", {}, ...parseBlocks(inner, depth + 1)], end];
}

function readList(lines, i, depth) {
  const [, indent, marker] = LIST_ITEM.exec(lines[i]);
  const ordered = marker.length > 1;
  const attributes = ordered && parseInt(marker, 10) !== 1 ? { start: parseInt(marker, 10) } : {};
  const list = [ordered ? "ol" : "ul", attributes];
  while (i < lines.length) {
    const item = LIST_ITEM.exec(lines[i]);
    if (!item || isRule(lines[i]) || (item[2].length > 1) !== ordered || item[1].length > indent.length + 1) break;
    if (item[1].length < indent.length) break;
    const inside = item[1].length + 2;  // lines indented so far belong to the item
    let end = i + 1;
    while (end < lines.length) {
      const spaces = lines[end].length - lines[end].trimStart().length;
      const blank = !lines[end].trim();
      const lazy = lines[end - 1].trim() && !startsBlock(lines, end);
      if (!blank && spaces < inside && !lazy) break;
      end += 1;
    }
    const content = Math.min(item[0].length, item[1].length + item[2].length + 1);
    const inner = lines.slice(i + 1, end).map((line) => {
      return line.slice(Math.min(content, line.length - line.trimStart().length));
    });
    const children = parseBlocks([lines[i].slice(item[0].length), ...inner], depth + 1);
    const plain = children.length && children[0][0] === "p" ? [...children[0].slice(2), ...children.slice(1)] : children;
    list.push(["li", {}, ...plain]);
    i = end;
  }
  return [list, i];
}

function cellsOf(line) {
  const cells = [""];
  const inner = line.trim().replace(/^\|/, "").replace(/\|$/, "");
  for (let i = 0; i < inner.length; i += 1) {
    if (inner[i] === "\\" && inner[i + 1] === "|") { cells[cells.length - 1] += "|"; i += 1; }
    else if (inner[i] === "|") cells.push("");
    else cells[cells.length - 1] += inner[i];
  }
  return cells.map((cell) => cell.trim());
}

function isTable(lines, i) {
  if (!lines[i].includes("|") || i + 1 >= lines.length || !/^[ |:-]+$/.test(lines[i + 1])) return false;
  const below = cellsOf(lines[i + 1]);
  return below.every((cell) => /^:?-+:?$/.test(cell)) && below.length === cellsOf(lines[i]).length;
}

function readTable(lines, i) {
  const sides = cellsOf(lines[i + 1]).map((cell) => {
    if (!cell.endsWith(":")) return {};
    return { class: cell.startsWith(":") ? "to-center" : "to-right" };
  });
  const row = (line, tag) => {
    const cells = cellsOf(line);
    return ["tr", {}, ...sides.map((side, n) => [tag, side, ...parseInline(cells[n] || "")])];
  };
  let end = i + 2;
  const body = ["tbody", {}];
  for (; end < lines.length && lines[end].includes("|"); end += 1) body.push(row(lines[end], "td"));
  const table = ["table", {}, ["thead", {}, row(lines[i], "th")], body];
  return [["div", { class: "table" }, table], end];
}

const EMPHASIS = [["**", "strong"], ["__", "strong"], ["~~", "del"], ["*", "em"], ["_", "em"]];
const WORD = /[\p{L}\p{N}]/u;

function parseInline(text, depth = 0, inLink = false) {
  const out = [];
  let plain = "";
  const flush = () => { if (plain) out.push(plain); plain = ""; };
  const add = (node) => { flush(); out.push(node); };
  for (let i = 0; i < text.length;) {
    const char = text[i];
    let found = null;
    if (steps > MAX_STEPS) { plain += text.slice(i); break; }
    if (char === "\\" && /[!-/:-@[-`{-~]/.test(text[i + 1] || "")) { plain += text[i + 1]; i += 2; continue; }
    if (char === "\n") found = [["br", {}], i + 1];
    else if (char === "`") found = readCodeSpan(text, i);
    else if (char === "[" || (char === "!" && text[i + 1] === "[")) found = readLink(text, i, depth);
    else if (char === "h" && !inLink && !WORD.test(text[i - 1] || "")) found = readAddress(text, i);
    else if ("*_~".includes(char) && depth < MAX_DEPTH) found = readEmphasis(text, i, depth);
    if (found && found[0]) { add(found[0]); i = found[1]; }
    else if (found) { plain += text.slice(i, found[1]); i = found[1]; }
    else { plain += char; i += 1; }
  }
  flush();
  return out;
}

function readCodeSpan(text, i) {
  let ticks = 1;
  while (text[i + ticks] === "`") ticks += 1;
  const window = text.slice(i, i + LOOK_AHEAD);
  for (let at = ticks; (at = window.indexOf("`", at)) !== -1;) {
    let run = 1;
    while (window[at + run] === "`") run += 1;
    steps += run;
    if (run === ticks) {
      let inner = window.slice(ticks, at).replace(/\n/g, " ");
      if (inner.startsWith(" ") && inner.endsWith(" ") && inner.trim()) inner = inner.slice(1, -1);
      return [["code", {}, inner], i + at + run];
    }
    at += run;
  }
  return [null, i + ticks];
}

function readEmphasis(text, i, depth) {
  const [mark, tag] = EMPHASIS.find(([each]) => text.startsWith(each, i)) || [];
  if (!mark) return null;
  const next = text[i + mark.length] || " ";
  if (/\s/.test(next)) return [null, i + mark.length];
  if (mark[0] === "_" && WORD.test(text[i - 1] || "")) return [null, i + mark.length];
  const limit = Math.min(text.length, i + LOOK_AHEAD);
  for (let at = i + mark.length; at < limit; at += 1) {
    steps += 1;
    if (steps > MAX_STEPS) break;
    if (text[at] === "\\") { at += 1; continue; }
    if (text[at] === "`") { at = readCodeSpan(text, at)[1] - 1; continue; }
    if (!text.startsWith(mark, at)) continue;
    if (mark.length === 1 && text[at + 1] === mark) { at += 1; continue; }  // a ** within * *
    const closes = at > i + mark.length && !/\s/.test(text[at - 1]);
    if (!closes || (mark[0] === "_" && WORD.test(text[at + mark.length] || ""))) continue;
    // "**a *b***" ends with the inner mark first.
    const end = mark.length === 2 && text[at + 2] === mark[0] && text[at + 3] !== mark[0] ? at + 1 : at;
    return [[tag, {}, ...parseInline(text.slice(i + mark.length, end), depth + 1)], end + mark.length];
  }
  return [null, i + mark.length];
}

function readLink(text, i, depth) {
  const start = text[i] === "!" ? i + 2 : i + 1;  // a picture would be an outside resource: it is shown as a link
  const window = text.slice(start, start + LOOK_AHEAD);
  const found = depth < MAX_DEPTH && LINK.exec(window);
  steps += found ? found[0].length : 100;
  if (!found) return null;
  const end = start + found[0].length;
  const address = safeAddress(found[2]);
  if (!address) return [null, end];
  return [["a", { href: address }, ...parseInline(found[1] || found[2], depth + 1, true)], end];
}

function readAddress(text, i) {
  const found = /^https?:\/\/[^\s<>"'`|\\^{}]+/.exec(text.slice(i, i + LOOK_AHEAD));
  if (!found) return null;
  let address = found[0].replace(/[.,:;!?*_~]+$/, "");
  while (address.endsWith(")") && address.split(")").length > address.split("(").length) address = address.slice(0, -1);
  return safeAddress(address) ? [["a", { href: address }, address], i + address.length] : null;
}

function safeAddress(address) {
  return /^(https?:\/\/[^\s]|mailto:[^\s])/i.test(address) ? address : null;
}

// The tree as DOM nodes. `copyButton(text)` makes the button of a code block.
function toDom(tree, copyButton) {
  const fragment = document.createDocumentFragment();
  for (const node of tree) fragment.append(typeof node === "string" ? node : elementOf(node, copyButton));
  return fragment;
}

function elementOf([tag, attributes, ...children], copyButton) {
  if (tag === "codeblock") return codeBlock(attributes.language, children[0], copyButton);
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  if (tag === "a") { element.target = "_blank"; element.rel = "noopener noreferrer nofollow"; }
  element.append(toDom(children, copyButton));
  return element;
}

function codeBlock(language, text, copyButton) {
  const block = document.createElement("div");
  const bar = document.createElement("div");
  const pre = document.createElement("pre");
  const code = document.createElement("code");
  const name = document.createElement("span");
  block.className = "code";
  name.textContent = language || "text";
  code.textContent = text;
  pre.tabIndex = 0;
  pre.append(code);
  bar.append(name, copyButton(text));
  block.append(bar, pre);
  return block;
}
