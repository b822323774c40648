// The first view: a conversation, or texts to continue, beside how they come to be written.

import { Attachments } from "./attach.js";
import { count, el, number, paced } from "./dom.js";
import { Figures } from "./figures.js";
import { download, History, Prompts } from "./history.js";
import { copyButton, markdown } from "./markdown.js";
import { request } from "./request.js";
import { ENDS, Run } from "./run.js";
import { scoresOf } from "./scores.js";
import { byFamily, DRAFTERS, Fields, formatField, further, methodField, sampling, textField } from "./settings.js";
import { legend, Painter } from "./text.js";
import { branches, canvas } from "./unfold.js";

const EXAMPLES = {
  chat: [
    ["Explain", "Explain in three short paragraphs why there are two tides a day."],
    ["Edit a text", "Repeat this sentence three times, and number the lines: The quick brown fox jumps over the lazy dog while the seed decides the text."],
    ["Fill a form", "Describe a fictional sailor as JSON."],
  ],
  plain: [["Continue a story", "The lighthouse had been dark for eleven years when, one evening in March,"], ["Continue code", "def fibonacci(n):\n    "]],
};
const wide = matchMedia("(min-width: 1180px)");

export class Write {
  constructor(place, model, methods) {
    this.model = model;
    this.entries = []; // of the conversation: {text, answer, turns}
    this.sent = new Set(); // prompts, of which drafters may remember the answers
    this.shown = null;
    this.fields = new Fields([
      methodField("drafter", "Drafter", byFamily(methods, "drafter"), DRAFTERS, "auto"),
      ...sampling(), formatField(),
      textField("system", "System message", { placeholder: "as the model has it" }),
      ...further(methods),
    ]);
    const [often, seldom] = [this.fields.fields.slice(0, 7), this.fields.fields.slice(7)];
    const mode = (value, label) => el("label", {}, el("input", { type: "radio", name: "mode", value, checked: value === "chat", onchange: () => this.restart() }), label);
    this.settings = el("details", { class: "settings panel" },
      el("summary", {}, el("h2", {}, "Settings")),
      el("div", { class: "fields" }, often.map((each) => each.node)),
      el("details", { class: "seldom" }, el("summary", {}, "More settings"), el("div", { class: "fields" }, seldom.map((each) => each.node))));
    const fold = () => { this.settings.open = wide.matches; };
    wide.addEventListener("change", fold);
    fold();
    this.log = el("div", { class: "log", role: "log", "aria-label": "Texts", tabindex: "0", onclick: (event) => this.pick(event), onscroll: () => this.scrolled() });
    this.prompt = el("textarea", { rows: 3, "aria-describedby": "write-error", onkeydown: (event) => this.key(event) });
    this.label = el("label", { for: "prompt" });
    this.prompt.id = "prompt";
    this.error = el("p", { id: "write-error", class: "error", role: "alert", hidden: true });
    this.status = el("p", { class: "soft", role: "status" });
    this.files = new Attachments((error) => this.say(error));
    const fill = (text) => {
      this.prompt.value = text;
      this.prompt.focus();
    };
    this.prompts = new Prompts(fill, () => this.prompt.value);
    this.history = new History((each) => this.reopen(each));
    this.send = el("button", { type: "submit", class: "main" }, "Send");
    this.stop = el("button", { type: "button", class: "main stop", hidden: true, onclick: () => this.run.stop() }, "Stop");
    this.composer = el("form", { class: "composer panel", onsubmit: (event) => this.submit(event) },
      this.error, this.label, this.prompt, this.files.list, this.files.input,
      el("div", { class: "row" }, this.prompts.node, this.files.button, this.status, this.stop, this.send));
    this.figures = new Figures((at) => this.shown?.painter.light(at));
    const shown = (value, label) => el("label", {}, el("input", { type: "radio", name: "shown", value, checked: value === "tokens", onchange: () => { place.dataset.shown = value; } }), label);
    place.dataset.shown = "tokens";
    place.append(el("div", { class: "side-column" }, this.settings, this.history.node),
      el("div", { class: "column" },
        el("div", { class: "row bar" },
          el("fieldset", { class: "switch" }, el("legend", { class: "hidden" }, "Kind of text"), mode("chat", "Chat"), mode("plain", "Completion")),
          el("fieldset", { class: "switch" }, el("legend", { class: "hidden" }, "Shown as"), shown("tokens", "Tokens"), shown("formatted", "Formatted")),
          legend(),
          el("div", { class: "row" },
            el("button", { type: "button", class: "quiet", onclick: () => this.export() }, "Export"),
            el("button", { type: "button", class: "quiet", onclick: () => this.restart() }, "New"))),
        this.log, this.composer),
      this.figures.node);
    place.addEventListener("keydown", (event) => {
      if (event.key === "Escape" && this.run && !this.run.over) this.run.stop();
    });
    addEventListener("scroll", () => this.scrolled());
    addEventListener("hashchange", () => this.follow());
    this.place = place;
    this.restart();
  }

  get chat() {
    return this.place.querySelector("[name=mode]:checked").value === "chat";
  }

  get messages() {
    return this.entries.flatMap(({ text, answer }) => [{ role: "user", content: text }, { role: "assistant", content: answer }]);
  }

  restart() {
    this.run?.stop();
    this.entries = [];
    this.id = crypto.getRandomValues(new Uint32Array(2)).join("-");
    this.files.clear();
    this.shown = this.run = null;
    this.busy(false);
    this.figures.show(null);
    this.say(null);
    this.label.textContent = this.chat ? "Message" : "Text to continue";
    this.prompt.placeholder = this.chat ? "Ask something" : "Once upon a time";
    const fill = (text) => () => {
      this.prompt.value = text;
      this.prompt.focus();
    };
    this.prompts.show(EXAMPLES[this.chat ? "chat" : "plain"]);
    this.log.replaceChildren(el("div", { class: "empty" },
      el("p", {}, "Every token shows how it came: ", el("span", { class: "drafted" }, "drafted ahead and accepted"), " by the model, or ", el("span", { class: "chosen" }, "chosen"), " by it. The seed decides the text, never the drafter."),
      el("div", { class: "row" }, EXAMPLES[this.chat ? "chat" : "plain"].map(([name, text]) => el("button", { type: "button", onclick: fill(text) }, name)))));
  }

  // Turns of a text and its answer. painter: shows its tokens, null for an answer of which only the text is known.
  turns(text, painter, note, watched = "") {
    const formatted = el("div", { class: "formatted" });
    const answered = painter ? [painter.node, formatted] : [formatted];
    const entry = { text, answer: "", formatted };
    const actions = el("div", { class: "actions" },
      copyButton(() => entry.answer),
      el("button", { type: "button", class: "quiet small", onclick: () => this.regenerate(entry) }, "Regenerate"));
    const edit = el("button", { type: "button", class: "quiet small", onclick: () => this.edit(entry) }, "Edit");
    const said = el("p", { class: "said" }, text);
    const answer = [...answered, watched, note, actions];
    entry.turns = this.chat
      ? [el("article", { class: "turn user" }, el("h3", {}, "You", edit), said), el("article", { class: "turn" }, el("h3", {}, this.model), answer)]
      : [el("article", { class: "turn plain" }, el("h3", {}, "Completion", edit), said, answer)];
    entry.turns.at(-1).classList.toggle("bare", !painter);
    return entry;
  }

  answered(entry, answer) {
    entry.answer = answer;
    entry.formatted.replaceChildren(...markdown(answer));
  }

  // Leave out an entry and all after it, and give back what was said there.
  cut(entry) {
    const at = this.entries.indexOf(entry);
    const gone = at < 0 ? [entry] : this.entries.splice(at);
    for (const each of gone) for (const turn of each.turns) turn.remove();
    this.shown?.painter.light(null);
    this.shown = null;
    this.figures.show(null);
    return entry.text;
  }

  edit(entry) {
    if (this.run && !this.run.over) return;
    this.prompt.value = this.cut(entry);
    this.prompt.focus();
  }

  // Another answer: the seed decides the text, so it is the next seed's.
  regenerate(entry) {
    if (this.run && !this.run.over) return;
    const seed = this.fields.fields.find((each) => each.name === "seed").control;
    seed.value = (Number(seed.value) || 0) + 1;
    this.ask(this.cut(entry));
  }

  reopen({ id, chat, entries }) {
    this.place.querySelector(`[name=mode][value=${chat ? "chat" : "plain"}]`).checked = true;
    this.restart();
    this.id = id;
    this.log.replaceChildren();
    for (const { text, answer } of entries) {
      const entry = this.turns(text, null, el("footer", { class: "soft" }, "kept in this browser"));
      this.answered(entry, answer);
      this.entries.push(entry);
      this.log.append(...entry.turns);
    }
    this.prompt.focus();
  }

  // The conversation as Markdown.
  export() {
    const said = this.entries.map(({ text, answer }) => (this.chat ? `## You\n\n${text}\n\n## ${this.model}\n\n${answer}` : `${text}${answer}`));
    download("conversation.md", `${said.join("\n\n")}\n`, "text/markdown");
  }

  key(event) {
    if (event.key === "ArrowUp" && !this.prompt.value && this.entries.length) {
      event.preventDefault();
      this.edit(this.entries.at(-1));
      return;
    }
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    this.composer.requestSubmit();
  }

  // Whether the end of the text is in sight; where the window is narrow, it scrolls as a whole.
  scrolled() {
    const { scrollHeight, scrollTop, clientHeight } = this.log;
    if (!clientHeight) return;
    const end = this.log.lastElementChild.getBoundingClientRect().bottom;
    this.follows = wide.matches ? scrollHeight - scrollTop - clientHeight < 60 : end > 0 && end < innerHeight + 80;
  }

  // Keep it in sight, unless the reader has scrolled away.
  follow() {
    if (!this.follows) return;
    if (wide.matches) this.log.scrollTop = this.log.scrollHeight;
    else this.log.querySelector(".turn:last-child footer")?.scrollIntoView({ block: "nearest" });
  }

  say(error) {
    this.error.textContent = error?.message ?? "";
    this.error.hidden = !error;
  }

  submit(event) {
    event.preventDefault();
    if (this.run && !this.run.over) return;
    this.ask(this.files.joined(this.prompt.value));
  }

  ask(text) {
    this.say(null);
    let asked;
    try {
      const values = this.fields.read();
      if (!text.trim()) throw new Error("there is nothing to send yet: write something");
      const system = values.system ? [{ role: "system", content: values.system }] : [];
      asked = request(this.model, this.chat ? { messages: [...system, ...this.messages, { role: "user", content: text }] } : { prompt: text }, values);
    } catch (error) {
      if (!this.fields.tell(error)) this.say(error);
      return;
    }
    this.begin(text, asked);
  }

  async begin(text, { path, body }) {
    const { chat } = this;
    const painter = new Painter();
    const note = el("footer", { class: "soft" }, "waiting");
    const watched = el("div", {});
    const entry = this.turns(text, painter, note, watched);
    const { turns } = entry;
    const unfolded = el("div", {});
    const thought = el("p", { class: "soft" });
    const reasoning = el("details", { class: "reasoning", hidden: true, open: true }, el("summary", {}, "Reasoning"), thought);
    turns.at(-1).insertBefore(unfolded, painter.node);
    turns.at(-1).insertBefore(reasoning, painter.node);
    const format = paced(() => {
      this.answered(entry, entry.answer);
      if (run.branches.size) unfolded.replaceChildren(branches(run.branches, run.state === "ended" ? run.content : null));
      else if (run.cells.length && !run.over) unfolded.replaceChildren(canvas(run.cells));
      else unfolded.replaceChildren();
      this.follow();
    });
    let answering = false;
    const run = new Run(path, body, () => {
      painter.paint(run);
      entry.answer = run.content;
      if (run.reasoning !== thought.textContent) thought.textContent = run.reasoning;
      reasoning.hidden = !run.reasoning;
      // It closes where the answer begins, once.
      if (run.content && !answering) reasoning.open = false;
      answering = Boolean(run.content);
      format();
      if (run.over && run.scores) {
        painter.shade(run.scores[0]);
        watched.replaceChildren(...scoresOf(run.scores));
      }
      note.replaceChildren(...told(run));
      if (this.shown?.run === run) this.figures.draw();
      this.follow();
    });
    const prompt = JSON.stringify(body.messages ?? body.prompt);
    run.again = this.sent.has(prompt);
    this.sent.add(prompt);
    for (const turn of turns) turn.run = { run, painter };
    this.log.querySelector(".empty")?.remove();
    this.log.append(...turns);
    this.follows = true;
    this.follow();
    this.shown?.painter.light(null);
    const before = this.shown;
    this.shown = { run, painter };
    this.run = run;
    this.figures.show(run);
    this.prompt.value = "";
    this.files.clear();
    this.busy(true);
    await run.begin();
    if (this.run !== run) return;
    this.busy(false);
    if (run.content) {
      this.entries.push(entry);
      this.history.put({
        id: this.id, at: new Date().toISOString(), chat, model: this.model, title: this.entries[0].text.trim().slice(0, 60),
        entries: this.entries.map(({ text: said, answer }) => ({ text: said, answer })),
      });
      return;
    }
    if (run.state === "ended") return;
    // Nothing came of it: the text goes back to where it was written, and the reason beside it.
    for (const turn of turns) turn.remove();
    if (this.shown.run === run) {
      this.shown = before;
      this.figures.show(before?.run ?? null);
    }
    this.prompt.value ||= text;
    if (run.state === "failed" && !this.fields.tell(run.error)) this.say(run.error);
  }

  busy(on) {
    const held = document.activeElement === (on ? this.send : this.stop);
    this.send.hidden = on;
    this.stop.hidden = !on;
    this.log.setAttribute("aria-busy", on);
    this.status.textContent = on ? "Esc stops" : "Enter sends, Shift+Enter begins a line";
    if (held) (on ? this.stop : this.prompt).focus();
  }

  // A click on a token shows its pass.
  pick(event) {
    const turn = event.target.closest(".turn");
    if (!turn?.run || getSelection().toString()) return;
    const pass = event.target.dataset.pass;
    this.shown?.painter.light(null);
    this.shown = turn.run;
    const at = pass === undefined ? null : Number(pass);
    this.shown.painter.light(at);
    this.figures.show(this.shown.run, at);
  }
}

// What there is to say of a run, under its text.
function told(run) {
  if (run.state === "failed") return [el("span", { class: "error", role: "alert" }, run.error.message)];
  const cached = run.usage?.prompt_tokens_details.cached_tokens;
  const parts = [
    run.state === "ended" ? ENDS[run.reason] ?? run.reason : { waiting: "waiting", running: "writing", stopped: "stopped" }[run.state],
    run.tokens.length ? count(run.tokens.length, "token") : null,
    run.sums.passes ? `${number(run.tokensPerPass, 2)} per pass` : null,
    run.sums.passes ? `${number(run.tokensPerSecond)} per second` : null,
    run.first === undefined ? null : `first after ${number(run.first, 2)} s`,
    run.usage ? `prompt ${number(run.usage.prompt_tokens)}${cached ? `, ${number(cached)} of it cached` : ""}` : null,
    run.seed === undefined ? null : `seed ${run.seed}`,
    run.again ? "prompt seen before" : null,
  ];
  return [parts.filter((part) => part !== null).join(" · ")];
}
