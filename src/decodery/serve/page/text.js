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
    const fresh = document.createDocumentFragment();
    while (this.next < tokens.length) {
      const { piece, how, pass } = tokens[this.next];
      const left = content.length - this.cursor;
      const said = content.startsWith(piece, this.cursor);
      if (!said && !run.over && piece.startsWith(content.slice(this.cursor))) break;
      // Marks such as the end of a turn are tokens without being text.
      const shown = !said && MARK.test(piece) ? 0 : Math.min(piece.length, left);
      if (shown) {
        const span = el("span", { class: how, "data-pass": pass }, content.slice(this.cursor, this.cursor + shown));
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
