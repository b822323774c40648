// What a search has grown, and what of a canvas is filled, as it comes.

import { count, el, number } from "./dom.js";
import { visible } from "./tree.js";

const SHOWN = 400; // parts of a tree

// The parts before one and itself, first to last.
function wayTo(parts, part) {
  const found = new Set();
  for (let each = part; each && !found.has(each); each = parts.get(each.parent)) found.add(each);
  return [...found].reverse();
}

// The parts on the way to the text that was returned, or until then to the part with the highest score.
function best(parts, text) {
  const ends = [...parts.values()].filter((part) => part.score !== null).sort((a, b) => b.score - a.score);
  const said = (part) => wayTo(parts, part).map((each) => each.text).join("").trim();
  const end = text === null ? ends[0] : ends.find((part) => part.finish_reason && said(part) === text.trim());
  return new Set(wayTo(parts, end).map((part) => part.id));
}

// text: what was returned, null until it is known.
export function branches(parts, text) {
  const below = new Map();
  for (const part of [...parts.values()].slice(0, SHOWN)) below.set(part.parent, [...(below.get(part.parent) ?? []), part]);
  const way = best(parts, text);
  const list = (parent, depth) => {
    const children = depth < 64 ? below.get(parent) ?? [] : [];
    return children.length ? el("ul", {}, children.map((part) => el("li", { class: way.has(part.id) ? "best" : null },
      el("span", { class: "score" }, part.score === null ? "" : number(part.score, 3)), " ",
      el("span", {}, part.text.trim() || visible(part.text)), part.finish_reason ? el("span", { class: "soft" }, " ■") : null, list(part.id, depth + 1)))) : null;
  };
  return el("details", { class: "branches", open: true },
    el("summary", { class: "soft" }, `${count(parts.size, "part")} of the search; ${text === null ? "the way to the highest score so far" : "the text that was returned"} is marked`),
    el("div", { class: "branch-list", tabindex: "0", role: "region", "aria-label": "Branches of the search" }, list(-1, 0)));
}

// cells: the text at each place, undefined where it is open.
export function canvas(cells) {
  const open = cells.filter((text) => text === undefined || text === null).length;
  return el("div", { class: "canvas", role: "img", "aria-label": `Canvas of ${count(cells.length, "token")}, ${number(open)} open` },
    Array.from(cells, (text) => (text === undefined || text === null ? el("span", { class: "open" }, "·") : el("span", {}, visible(text)))));
}
