// The third view: what the server has to do, for all its users.

import { get } from "./api.js";
import { bytes, el, number, onWidth, paced, percent } from "./dom.js";
import { lines } from "./plots.js";

const EVERY = 1000;
const KEPT = 120; // measurements

export class Load {
  // pulse: where the shortest version stands, in every view.
  constructor(place, pulse) {
    this.pulse = pulse;
    this.history = [];
    this.width = 400;
    this.draw = paced(() => this.drawNow());
    this.error = el("p", { class: "error", role: "alert", hidden: true });
    this.numbers = Object.fromEntries(
      ["running", "waiting", "rows per pass", "tokens per second", "passes per second", "cache", "prefix hits", "preemptions"].map((name) => [name, [el("dd", {}, "–"), el("dd", { class: "soft" })]]));
    this.plots = Object.fromEntries(["Texts running and waiting", "Rows per pass", "Tokens per second", "Cache"].map((title) => [title, el("div", { class: "plot" })]));
    const keys = { "Texts running and waiting": ["running", "waiting"], Cache: ["held", "kept for prefixes"] };
    place.append(
      el("div", { class: "row bar" }, el("h2", {}, "Load of the server"), el("p", { class: "soft" }, "measured every second; the last two minutes")),
      this.error,
      el("dl", { class: "numbers tiles" }, Object.entries(this.numbers).map(([name, values]) => el("div", { class: "panel" }, el("dt", {}, name), values))),
      el("div", { class: "pair" }, Object.entries(this.plots).map(([title, plot]) =>
        el("section", { class: "panel chart" }, el("h3", {}, title,
          keys[title] && el("ul", { class: "legend" }, keys[title].map((key, index) => el("li", {}, el("span", { class: `swatch line ${"ab"[index]}` }), key)))), plot))));
    onWidth(Object.values(this.plots)[0], (width) => {
      this.width = width;
      this.draw();
    });
    document.addEventListener("visibilitychange", () => this.measure());
    this.measure();
  }

  async measure() {
    clearTimeout(this.timer);
    if (document.hidden) return;
    try {
      this.take(await get("decodery/load"));
      this.error.hidden = true;
    } catch (error) {
      this.error.textContent = error.message;
      this.error.hidden = false;
      this.pulse.textContent = "no answer";
      this.pulse.classList.add("lost");
    }
    clearTimeout(this.timer);
    this.timer = setTimeout(() => this.measure(), EVERY);
  }

  take(load) {
    const at = performance.now() / 1000;
    const before = this.history.at(-1);
    const passes = before ? load.passes - before.load.passes : 0;
    const seconds = before ? at - before.at : 1;
    this.history.push({
      load, at,
      rows: passes ? (load.rows_read - before.load.rows_read) / passes : 0,
      passes: passes / seconds,
      tokens: before ? (load.tokens - before.load.tokens) / seconds : 0,
    });
    this.history.splice(0, this.history.length - KEPT);
    this.pulse.classList.remove("lost");
    this.pulse.classList.toggle("busy", load.running > 0);
    this.pulse.textContent = load.draining ? "stopping" : load.running + load.waiting ? `${load.running} running${load.waiting ? `, ${load.waiting} waiting` : ""}` : "idle";
    this.draw();
  }

  drawNow() {
    const now = this.history.at(-1);
    if (!now) return;
    const { load } = now;
    this.set("running", number(load.running), `of ${number(load.max_running)}`);
    this.set("waiting", number(load.waiting), `of ${number(load.max_queue)}`);
    this.set("rows per pass", number(now.rows, now.rows && now.rows < 10 ? 1 : 0), `last pass ${number(load.rows)}`);
    this.set("tokens per second", number(now.tokens), `${number(load.tokens)} in all`);
    this.set("passes per second", number(now.passes), `${number(load.passes)} in all`);
    this.set("cache", percent(load.cache_bytes, load.cache_limit), `${bytes(load.cache_bytes)} of ${bytes(load.cache_limit)}`);
    this.set("prefix hits", percent(load.prefix_found, load.prefix_asked), `${number(load.prefix_found)} of ${number(load.prefix_asked)} tokens`);
    this.set("preemptions", number(load.preemptions), "to free memory");
    const line = (kind, value) => ({ class: kind, points: this.history.map((each) => [each.at, value(each)]) });
    const mebi = 1 << 20;
    const series = [
      [[line("a", (each) => each.load.running), line("b", (each) => each.load.waiting)], 4],
      [[line("ink", (each) => each.rows)], 8],
      [[line("ink", (each) => each.tokens)], 20],
      [[line("a", (each) => each.load.cache_bytes / mebi), line("b", (each) => each.load.prefix_bytes / mebi)], 1],
    ];
    Object.entries(this.plots).forEach(([title, plot], index) => {
      const [found, least] = series[index];
      const options = { from: now.at - KEPT, to: now.at, ends: ["2 minutes ago", title === "Cache" ? "MiB, now" : "now"], height: this.width > 500 ? 170 : 120, least, filled: found.length === 1 };
      plot.replaceChildren(lines(this.width, title, found, options));
    });
  }

  set(name, value, more) {
    const [main, soft] = this.numbers[name];
    main.textContent = value;
    soft.textContent = more;
  }
}
