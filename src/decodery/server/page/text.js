// A text as it grows, each token coloured by how it came.

import { el } from "./dom.js";

const MARK = /^<[^<>]+>$/;

export class Painter {
  constructor() {
    this.node = el("div", { class: "text" });
    this.next = 0;
    this.cursor = 0;
  }

  // Tokens are known a little earlier than text is said: a stop string may begin in them. Only what is said is shown.
  paint(run) {
    const { content, tokens } = run;
    // What is reasoned stands elsewhere.
    if (run.reasoning && !content) this.next = tokens.length;
    const fresh = document.createDocumentFragment();
    while (this.next < tokens.length) {
      const { piece, how, pass } = tokens[this.next];
      const left = content.length - this.cursor;
      const said = content.startsWith(piece, this.cursor);
      if (!said && !run.over && piece.startsWith(content.slice(this.cursor))) break;
      // Marks such as the end of a turn are tokens without being text, and so is space around them.
      const shown = !said && (MARK.test(piece) || !piece.trim()) ? 0 : Math.min(piece.length, left);
      if (shown) {
        const span = el("span", { class: how, "data-pass": pass, "data-token": this.next }, content.slice(this.cursor, this.cursor + shown));
        fresh.append(span);
      }
      this.cursor += shown;
      this.next += 1;
    }
    if (run.over && this.cursor < content.length) {
      fresh.append(content.slice(this.cursor));
      this.cursor = content.length;
    }
    this.node.append(fresh);
  }

  // Shade tokens by what a monitor said after each of them; those above its limit are underlined.
  shade({ name, scores, limit }) {
    const known = scores.filter((score) => score !== null);
    const [low, high] = [Math.min(...known), Math.max(...known)];
    for (const each of this.node.querySelectorAll("[data-token]")) {
      const score = scores[each.dataset.token] ?? null;
      if (score === null) continue;
      each.classList.add(`shade-${Math.round((4 * (score - low)) / (high - low || 1))}`);
      if (limit !== null && score > limit) each.classList.add("flagged");
      each.title = `${name} ${+score.toPrecision(3)}`;
    }
  }

  // Mark the tokens of one pass.
  light(pass) {
    for (const each of this.node.querySelectorAll(".lit")) each.classList.remove("lit");
    if (pass === null) return;
    for (const each of this.node.querySelectorAll(`[data-pass="${pass}"]`)) each.classList.add("lit");
  }
}

export const legend = () =>
  el("ul", { class: "legend" },
    el("li", {}, el("span", { class: "swatch drafted" }), "drafted and accepted"),
    el("li", {}, el("span", { class: "swatch chosen" }), "chosen by the model"));
