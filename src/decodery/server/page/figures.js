// What a run did: its figures, the draft of one pass, and how all passes went.

import { count, el, number, onWidth, paced, percent } from "./dom.js";
import { bars, lines, shares } from "./plots.js";
import { PARTS } from "./run.js";
import { tree } from "./tree.js";

const SHOWN = 120; // passes of a plot
const WINDOW = 8; // passes that a speed is taken over

const plot = (title, ...more) => {
  const place = el("div", { class: "plot" });
  const value = el("span", { class: "value" });
  return { place, value, node: el("section", { class: "chart" }, el("h3", {}, title, value), place, more) };
};

export class Figures {
  // chosen: called with the number of the pass that is looked at, or null.
  constructor(chosen) {
    this.chosen = chosen;
    this.run = null;
    this.at = null; // the pass that is looked at; null for the last one
    this.width = 360;
    this.draw = paced(() => this.drawNow());
    this.numbers = Object.fromEntries(["tokens per pass", "tokens per second", "drafts accepted"].map((name) => [name, el("dd", {}, "–")]));
    this.tree = el("div", { class: "tree", tabindex: "0", role: "region", "aria-label": "Draft tree" });
    this.where = el("output", { class: "value" });
    this.slider = el("input", { type: "range", min: 1, max: 1, value: 1, disabled: true, "aria-label": "Pass to look at", oninput: () => this.look() });
    this.perPass = plot("Tokens per pass");
    this.speed = plot("Tokens per second");
    this.bar = el("div", { class: "plot" });
    this.parts = Object.fromEntries(PARTS.map((part) => [part, el("span", { class: "value" })]));
    this.times = plot("Milliseconds per pass",
      this.bar,
      el("ul", { class: "legend parts" }, PARTS.map((part) => el("li", {}, el("span", { class: `swatch ${part}` }), part, this.parts[part]))));
    this.node = el("aside", { class: "figures panel", "aria-label": "How the text came" },
      el("dl", { class: "numbers" }, Object.entries(this.numbers).map(([name, value]) => el("div", {}, el("dt", {}, name), value))),
      el("section", { class: "chart" },
        el("h3", {}, "Last draft", this.where), this.tree, this.slider,
        el("ul", { class: "legend" },
          el("li", {}, el("span", { class: "swatch box drafted" }), "accepted"),
          el("li", {}, el("span", { class: "swatch box lost" }), "rejected"),
          el("li", {}, el("span", { class: "swatch box chosen" }), "chosen"))),
      this.perPass.node, this.speed.node, this.times.node);
    onWidth(this.bar, (width) => {
      this.width = width;
      this.draw();
    });
    this.drawNow();
  }

  show(run, at = null) {
    this.run = run;
    this.at = at;
    this.draw();
  }

  look() {
    const last = Number(this.slider.max);
    const at = Number(this.slider.value);
    this.at = at === last ? null : at - 1;
    this.chosen(this.at);
    this.draw();
  }

  drawNow() {
    const { run, width } = this;
    const passes = run?.passes ?? [];
    const sums = run?.sums;
    this.numbers["tokens per pass"].textContent = number(run?.tokensPerPass, 2);
    this.numbers["tokens per second"].textContent = number(run?.tokensPerSecond);
    this.numbers["drafts accepted"].textContent = sums ? percent(sums.accepted, sums.drafted) : "–";
    this.drawTree(passes, width);
    const decoding = passes.filter((pass) => !pass.prefill);
    const from = Math.max(0, decoding.length - SHOWN);
    const seen = decoding.slice(from);
    const marked = this.at === null ? null : seen.indexOf(passes[this.at]);
    const options = { first: from + 1, slots: Math.min(SHOWN, Math.max(30, decoding.length)), marked: marked < 0 ? null : marked };
    const mean = run?.tokensPerPass;
    this.perPass.value.textContent = mean ? `mean ${number(mean, 2)}` : "";
    this.perPass.place.replaceChildren(bars(width, `Tokens of each pass, ${number(mean, 2)} on average`, [
      { class: "chosen", values: seen.map((pass) => pass.tokens.length - Math.min(pass.accepted, pass.tokens.length)) },
      { class: "drafted", values: seen.map((pass) => Math.min(pass.accepted, pass.tokens.length)) },
    ], options));
    const rates = speeds(decoding).slice(from);
    this.speed.value.textContent = rates.length ? `now ${number(rates.at(-1)[1])}` : "";
    this.speed.place.replaceChildren(lines(width, `Tokens per second over ${WINDOW} passes each`, [{ class: "ink", points: rates }], {
      from: from + 1, to: from + options.slots, ends: rates.length ? [`pass ${from + 1}`, ""] : ["", ""], filled: true,
      marked: options.marked === null ? null : from + options.marked + 1,
    }));
    this.times.value.textContent = sums?.passes ? `mean ${number((1000 * sums.seconds) / sums.passes, 1)}` : "";
    this.times.place.replaceChildren(bars(width, "Milliseconds of each pass, by step",
      [...PARTS].sort((a, b) => (b === "score") - (a === "score")).map((part) => ({ class: part, values: seen.map((pass) => 1000 * pass.seconds[part]) })), options));
    this.bar.replaceChildren(shares(width, `Share of the four steps: ${PARTS.map((part) => `${part} ${percent(sums?.[part] ?? 0, sums?.seconds ?? 0)}`).join(", ")}`,
      PARTS.map((part) => ({ class: part, value: sums?.[part] ?? 0 }))));
    for (const part of PARTS) this.parts[part].textContent = sums?.seconds ? percent(sums[part], sums.seconds) : "";
  }

  drawTree(passes, width) {
    const at = Math.min(this.at ?? passes.length - 1, passes.length - 1);
    this.slider.disabled = passes.length < 2;
    this.slider.max = Math.max(1, passes.length);
    this.slider.value = at + 1;
    if (at < 0) {
      this.where.textContent = "";
      this.tree.replaceChildren(el("p", { class: "soft" }, "The draft of every pass is drawn here, with what of it became text."));
      return;
    }
    const pass = passes[at];
    const drafted = pass.tree.tokens.length - 1;
    this.where.textContent = `pass ${at + 1} of ${passes.length}`;
    this.slider.setAttribute("aria-valuetext", `pass ${at + 1}, ${count(drafted, "token")} drafted, ${pass.accepted} accepted`);
    this.tree.replaceChildren(tree(pass, width - 2));
  }
}

// Tokens per second after each pass, over a few passes before it.
function speeds(passes) {
  let tokens = 0;
  let seconds = 0;
  return passes.map((pass, index) => {
    tokens += pass.tokens.length;
    seconds += pass.total;
    if (index >= WINDOW) {
      tokens -= passes[index - WINDOW].tokens.length;
      seconds -= passes[index - WINDOW].total;
    }
    return [index + 1, seconds ? tokens / seconds : 0];
  });
}
