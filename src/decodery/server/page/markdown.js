// Markdown as elements. What a model writes only ever becomes text and a fixed set of elements, never HTML.

import { el } from "./dom.js";

const FENCE = /^ {0,3}(`{3,}|~{3,})\s*([\w+#.-]*)[^`]*$/;
const HEADING = /^ {0,3}(#{1,6})\s+(.*)$/;
const ITEM = /^(\s*)([-*+]|\d{1,9}[.)])\s+(.*)$/;
const RULE = /^ {0,3}([-*_])(?:\s*\1){2,}\s*$/;
const QUOTE = /^ {0,3}> ?(.*)$/;
const DIVIDER = /^ {0,3}\|?\s*:?-+:?\s*(\|\s*:?-+:?\s*)*\|?\s*$/;
const DEEPEST = 8;
const INLINE = /(`+)([^`]|[^`][\s\S]*?[^`])\1(?!`)|\*\*(?=\S)([\s\S]*?\S)\*\*|__(?=\S)([\s\S]*?\S)__(?!\w)|\*(?=[^\s*])([^*]*[^\s*])\*|(?<!\w)_(?=[^\s_])([^_]*[^\s_])_(?!\w)|~~(?=\S)([\s\S]*?\S)~~|\[([^\][]*)\]\(([^\s()]*)\)|\\([\\`*_~[\]()#>.!+-])/;

// Only addresses that leave the page on a click, and run nothing.
function link(address) {
  try {
    return ["http:", "https:", "mailto:"].includes(new URL(address).protocol);
  } catch {
    return false;
  }
}

function inline(text, depth = 0) {
  const found = [];
  let rest = text;
  while (rest) {
    const match = depth < DEEPEST ? INLINE.exec(rest) : null;
    if (!match) {
      found.push(rest);
      break;
    }
    if (match.index) found.push(rest.slice(0, match.index));
    const [all, tick, code, strong, strong2, em, em2, gone, label, address, escaped] = match;
    const inner = (part) => inline(part, depth + 1);
    if (tick) found.push(el("code", {}, code.replace(/^ (.*) $/, "$1")));
    else if (strong ?? strong2) found.push(el("strong", {}, inner(strong ?? strong2)));
    else if (em ?? em2) found.push(el("em", {}, inner(em ?? em2)));
    else if (gone) found.push(el("s", {}, inner(gone)));
    else if (escaped) found.push(escaped);
    else if (link(address)) found.push(el("a", { href: address, rel: "noopener noreferrer", target: "_blank" }, inner(label)));
    else found.push(all);
    rest = rest.slice(match.index + all.length);
  }
  return found;
}

const broken = (lines) => lines.flatMap((line, at) => [at ? el("br", {}) : null, ...inline(line.trim())]);

// A block of code, with a button that copies it.
function fenced(language, lines) {
  const text = lines.join("\n");
  return el("figure", { class: "code-block" },
    el("figcaption", {}, el("span", {}, language || "text"), copyButton(() => text)),
    el("pre", { tabindex: "0", "aria-label": `Code, ${language || "text"}` }, el("code", {}, text)));
}

export function copyButton(text, label = "Copy") {
  const button = el("button", { type: "button", class: "quiet small" }, label);
  button.addEventListener("click", async (event) => {
    event.stopPropagation();
    const done = await navigator.clipboard?.writeText(text()).then(() => true, () => false);
    button.textContent = done ? "Copied" : "Not allowed";
    setTimeout(() => { button.textContent = label; }, 1500);
  });
  return button;
}

const cells = (line) => line.trim().replace(/^\||\|$/g, "").split(/(?<!\\)\|/).map((cell) => cell.trim().replaceAll("\\|", "|"));

function table(lines) {
  const [head, , ...rows] = lines;
  const columns = cells(head);
  const row = (kind, line) => el("tr", {}, columns.map((_, at) => el(kind, {}, inline(cells(line)[at] ?? ""))));
  return el("div", { class: "wide-table", tabindex: "0", role: "region", "aria-label": "Table" },
    el("table", {}, el("thead", {}, row("th", head)), el("tbody", {}, rows.map((line) => row("td", line)))));
}

// Items of a list, those that are indented further inside them.
function list(lines, depth) {
  const [, indent, first] = ITEM.exec(lines[0]);
  const items = [];
  for (const line of lines) {
    const match = ITEM.exec(line);
    if (match && match[1].length <= indent.length) items.push([match[3]]);
    else items.at(-1).push(line.slice(Math.min(indent.length + 2, line.length - line.trimStart().length)));
  }
  const ordered = /\d/.test(first);
  return el(ordered ? "ol" : "ul", ordered ? { start: parseInt(first, 10) } : {}, items.map(([text, ...more]) =>
    el("li", {}, inline(text), more.some((line) => line.trim()) ? blocks(more, depth + 1) : null)));
}

function blocks(lines, depth = 0) {
  const found = [];
  let at = 0;
  const take = (goes) => {
    const from = at;
    while (at < lines.length && goes(lines[at], at - from)) at += 1;
    return lines.slice(from, at);
  };
  while (at < lines.length) {
    const line = lines[at];
    const fence = FENCE.exec(line);
    if (!line.trim()) at += 1;
    else if (fence) {
      at += 1;
      const end = new RegExp(`^ {0,3}${fence[1][0] === "`" ? "`" : "~"}{${fence[1].length},}\\s*$`);
      found.push(fenced(fence[2], take((each) => !end.test(each))));
      at += 1;
    } else if (HEADING.test(line)) {
      const [, signs, text] = HEADING.exec(line);
      found.push(el(`h${Math.min(signs.length + 3, 6)}`, {}, inline(text.trimEnd().replace(/#+$/, "").trimEnd())));
      at += 1;
    } else if (RULE.test(line)) {
      found.push(el("hr", {}));
      at += 1;
    } else if (QUOTE.test(line)) {
      const inner = take((each) => QUOTE.test(each)).map((each) => QUOTE.exec(each)[1]);
      found.push(el("blockquote", {}, depth < DEEPEST ? blocks(inner, depth + 1) : inner.join("\n")));
    } else if (ITEM.test(line)) {
      const inner = take((each, number) => !number || ITEM.test(each) || /^\s+\S/.test(each) || (!each.trim() && ITEM.test(lines[at + 1] ?? "")));
      found.push(depth < DEEPEST ? list(inner.filter((each, number) => number === 0 || each.trim()), depth) : el("p", {}, inner.join("\n")));
    } else if (line.includes("|") && DIVIDER.test(lines[at + 1] ?? "")) found.push(table(take((each) => each.includes("|"))));
    else {
      const starts = (each) => FENCE.test(each) || HEADING.test(each) || QUOTE.test(each) || ITEM.test(each) || RULE.test(each);
      found.push(el("p", {}, broken(take((each, number) => each.trim() && (!number || !starts(each))))));
    }
  }
  return found;
}

export const markdown = (text) => blocks(text.replace(/\r\n?/g, "\n").split("\n"));
