// The second view: one prompt under two settings, and whether the texts are equal.

import { count, el, number, onWidth, paced } from "./dom.js";
import { lines } from "./plots.js";
import { request } from "./request.js";
import { Run } from "./run.js";
import { byFamily, DRAFTERS, Fields, methodField, numberField } from "./settings.js";
import { legend, Painter } from "./text.js";

const PROMPT = "Write a short poem about the sea, and then the same poem again.";

class Side {
  constructor(name, methods, drafter) {
    this.name = name;
    this.fields = new Fields([
      methodField("drafter", "Drafter", byFamily(methods, "drafter"), DRAFTERS, drafter),
      methodField("acceptance_rule", "Acceptance rule", byFamily(methods, "acceptance-rule"), { "": "default: coupled" }),
      numberField("temperature", "Temperature", { min: 0, max: 2, step: 0.1, value: 0.7, placeholder: "0" }),
      numberField("seed", "Seed", { step: 1, min: -Number.MAX_SAFE_INTEGER, max: Number.MAX_SAFE_INTEGER, value: 7, placeholder: "0" }),
    ]);
    this.error = el("p", { class: "error", role: "alert", hidden: true });
    this.text = el("div", { class: "outcome" });
    this.figures = Object.fromEntries(["tokens", "passes", "per pass", "per second", "seconds", "prompt cached"].map((each) => [each, el("dd", {}, "–")]));
    this.node = el("section", { class: `side panel ${name.toLowerCase()}`, "aria-label": `Setting ${name}` },
      el("h2", { class: "badge" }, name),
      el("div", { class: "fields" }, this.fields.fields.map((each) => each.node)),
      this.error,
      el("dl", { class: "numbers small" }, Object.entries(this.figures).map(([label, value]) => el("div", {}, el("dt", {}, label), value))),
      this.text);
  }

  clear() {
    this.run = null;
    this.error.hidden = true;
    this.painter = new Painter();
    this.text.replaceChildren(this.painter.node);
    this.tell();
  }

  say(error) {
    this.error.textContent = error.message;
    this.error.hidden = this.fields.tell(error);
  }

  tell() {
    const run = this.run;
    const shown = [run?.tokens.length, run?.passes.length, run?.tokensPerPass, run?.tokensPerSecond, run?.sums.seconds];
    shown.push(run?.usage?.prompt_tokens_details.cached_tokens);
    const digits = [0, 0, 2, 0, 2, 0];
    Object.values(this.figures).forEach((value, index) => { value.textContent = run ? number(shown[index], digits[index]) : "–"; });
  }
}

export class Compare {
  constructor(place, model, methods) {
    this.model = model;
    this.prompt = el("textarea", { id: "compare-prompt", rows: 2 }, PROMPT);
    this.shared = new Fields([numberField("max_tokens", "Max tokens", { min: 1, step: 1, value: 160 })]);
    const choice = (name, label, options) => {
      const control = el("select", { id: `compare-${name}`, name }, Object.entries(options).map(([value, text]) => el("option", { value }, text)));
      return [control, el("div", { class: "field" }, el("label", { for: control.id }, label), control)];
    };
    const [kind, kindField] = choice("kind", "Kind", { chat: "a message", plain: "a text to continue" });
    const [order, orderField] = choice("order", "Order", { turn: "in turn", once: "at once" });
    Object.assign(this, { kind, order });
    this.go = el("button", { type: "submit", class: "main" }, "Compare");
    this.stop = el("button", { type: "button", class: "main stop", hidden: true, onclick: () => this.halt() }, "Stop");
    this.error = el("p", { class: "error", role: "alert", hidden: true });
    this.verdict = el("p", { class: "verdict panel", role: "status" });
    this.sides = [new Side("A", methods, "none"), new Side("B", methods, "auto")];
    this.plot = el("div", { class: "plot" });
    this.width = 600;
    this.draw = paced(() => this.drawNow());
    place.append(
      el("form", { class: "panel asked", onsubmit: (event) => this.submit(event) },
        this.error,
        el("div", { class: "field wide" }, el("label", { for: "compare-prompt" }, "The prompt of both"), this.prompt),
        el("div", { class: "fields" }, this.shared.fields.map((each) => each.node), kindField, orderField),
        el("div", { class: "row" }, el("p", { class: "soft" }, "In turn, each has the machine to itself; at once, they share passes. Drafters of both begin without any memory of earlier texts. The KV cache of an earlier prompt is used again; “prompt cached” counts its tokens."), this.stop, this.go)),
      this.verdict,
      legend(),
      el("div", { class: "pair" }, this.sides.map((side) => side.node)),
      el("section", { class: "panel chart race" }, el("h3", {}, "Tokens over seconds of passes",
        el("ul", { class: "legend" }, el("li", {}, el("span", { class: "swatch line a" }), "A"), el("li", {}, el("span", { class: "swatch line b" }), "B"))), this.plot));
    place.addEventListener("keydown", (event) => { if (event.key === "Escape") this.halt(); });
    onWidth(this.plot, (width) => {
      this.width = width;
      this.draw();
    });
    for (const side of this.sides) side.clear();
    this.judge();
  }

  halt() {
    this.halted = true;
    for (const side of this.sides) side.run?.stop();
  }

  async submit(event) {
    event.preventDefault();
    this.error.hidden = true;
    this.halted = false;
    for (const side of this.sides) side.clear();
    for (const side of this.sides) if (!this.prepare(side)) return this.judge();
    const begin = (side) => {
      if (this.halted) return null;
      side.run = new Run(side.asked.path, side.asked.body, (run) => {
        side.painter.paint(run);
        this.draw();
      });
      this.judge();
      return side.run.begin();
    };
    this.go.hidden = true;
    this.stop.hidden = false;
    if (document.activeElement === document.body) this.stop.focus();
    if (this.order.value === "once") await Promise.all(this.sides.map(begin));
    else for (const side of this.sides) await begin(side);
    const held = document.activeElement === this.stop || document.activeElement === document.body;
    this.go.hidden = false;
    this.stop.hidden = true;
    if (held) this.go.focus();
    for (const side of this.sides) if (side.run?.state === "failed") side.say(side.run.error);
    this.drawNow();
    this.judge();
  }

  prepare(side) {
    try {
      const shared = this.shared.read();
      const text = this.prompt.value;
      if (!text.trim()) throw new Error("there is no prompt yet: write one");
      const given = this.kind.value === "chat" ? { messages: [{ role: "user", content: text }] } : { prompt: text };
      try {
        side.asked = request(this.model, given, { ...shared, ...side.fields.read(), fresh_memory: true });
      } catch (error) {
        side.say(error);
        return false;
      }
    } catch (error) {
      this.error.textContent = error.message;
      this.error.hidden = this.shared.tell(error);
      return false;
    }
    return true;
  }

  drawNow() {
    const found = this.sides.map((side) => ({ class: side.name.toLowerCase(), points: progress(side.run) }));
    const to = Math.max(0.1, ...found.map(({ points }) => points.at(-1)?.[0] ?? 0));
    this.plot.replaceChildren(lines(this.width, "Tokens written over the seconds of the passes", found, { to, ends: ["0 s", `${number(to, 1)} s`], height: 120, least: 10 }));
    for (const side of this.sides) side.tell();
  }

  // The verdict, once both are over.
  judge() {
    const [a, b] = this.sides.map((side) => side.run);
    const over = a?.over && b?.over;
    this.verdict.classList.remove("equal", "differ");
    if (!over) {
      this.verdict.textContent = a || b ? "Writing…" : "The seed decides the text, never the drafter: with the same seed, both texts are the same.";
      return;
    }
    if (a.state !== "ended" || b.state !== "ended") {
      this.verdict.textContent = a.state === "failed" || b.state === "failed" ? "One of the texts failed." : "Stopped before both texts were over.";
      return;
    }
    const equal = a.content === b.content && a.reason === b.reason;
    this.verdict.classList.add(equal ? "equal" : "differ");
    this.verdict.replaceChildren(
      el("strong", {}, equal ? "Equal" : "Different"),
      equal ? ` — all ${number([...a.content].length)} characters, ${count(a.tokens.length, "token")}. ${faster(a, b)}` : ` — ${firstDifference(a, b)}`);
  }
}

// Points of tokens over seconds, prefill left out.
function progress(run) {
  let [seconds, tokens] = [0, 0];
  return (run?.passes ?? []).map((pass) => {
    if (!pass.prefill) seconds += pass.total;
    tokens += pass.tokens.length;
    return [seconds, tokens];
  });
}

function faster(a, b) {
  const [few, many] = a.passes.length <= b.passes.length ? ["A", "B"] : ["B", "A"];
  const [less, more] = [a.passes.length, b.passes.length].sort((x, y) => x - y);
  if (less === more) return `Both took ${number(less)} passes.`;
  return `${few} took ${number(less)} passes where ${many} took ${number(more)}.`;
}

function firstDifference(a, b) {
  const [left, right] = [[...a.content], [...b.content]];
  const at = left.findIndex((sign, index) => sign !== right[index]);
  if (at < 0 && left.length === right.length) return "the texts are the same, but they ended for different reasons.";
  const where = at < 0 ? Math.min(left.length, right.length) : at;
  return `from character ${number(where + 1)} on: “${left.slice(where, where + 16).join("")}…” in A, “${right.slice(where, where + 16).join("")}…” in B.`;
}
