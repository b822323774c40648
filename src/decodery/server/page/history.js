// What this browser keeps: conversations and prompts. Nothing of it goes to the server, and the key is not among it.

import { el } from "./dom.js";

const CONVERSATIONS = "decodery.conversations";
const PROMPTS = "decodery.prompts";
const MOST = 100;
const CHARACTERS = 2_000_000;

function kept(name) {
  try {
    const found = JSON.parse(localStorage.getItem(name) ?? "[]");
    return Array.isArray(found) ? found : [];
  } catch {
    return [];
  }
}

// False where the browser keeps nothing.
function keep(name, found) {
  try {
    localStorage.setItem(name, JSON.stringify(found));
    return true;
  } catch {
    return false;
  }
}

const sound = (each) => typeof each?.title === "string" && Array.isArray(each.entries)
  && each.entries.every((entry) => typeof entry?.text === "string" && typeof entry?.answer === "string");

export function download(name, text, type) {
  const address = URL.createObjectURL(new Blob([text], { type }));
  const anchor = el("a", { href: address, download: name });
  anchor.click();
  setTimeout(() => URL.revokeObjectURL(address), 10_000);
}

// Conversations, newest first. open: called with one that is chosen.
export class History {
  constructor(open) {
    this.open = open;
    this.list = el("ul", { class: "kept" });
    this.error = el("p", { class: "error", role: "alert", hidden: true });
    this.node = el("details", { class: "panel history" },
      el("summary", {}, el("h2", {}, "History")),
      el("p", { class: "hint" }, "Kept in this browser alone, until you clear it."), this.error, this.list,
      el("div", { class: "row" },
        el("button", { type: "button", onclick: () => this.export() }, "Export"),
        el("button", { type: "button", onclick: () => this.clear() }, "Clear")));
    this.show();
  }

  get conversations() {
    return kept(CONVERSATIONS).filter(sound);
  }

  // Keep a conversation as it is now, in the place of what was kept under its id.
  put(conversation) {
    const found = [conversation, ...this.conversations.filter((each) => each.id !== conversation.id)].slice(0, MOST);
    while (found.length > 1 && JSON.stringify(found).length > CHARACTERS) found.pop();
    this.error.hidden = keep(CONVERSATIONS, found);
    this.error.textContent = "This browser keeps no more: clear the history, or export this conversation.";
    this.show();
  }

  remove(id) {
    keep(CONVERSATIONS, this.conversations.filter((each) => each.id !== id));
    this.show();
  }

  clear() {
    localStorage.removeItem(CONVERSATIONS);
    this.show();
  }

  export() {
    download("decodery-conversations.json", JSON.stringify(this.conversations, null, 1), "application/json");
  }

  show() {
    const found = this.conversations;
    this.list.replaceChildren(...(found.length ? found.map((each) => el("li", {},
      el("button", { type: "button", class: "quiet", title: each.title, onclick: () => this.open(each) }, each.title),
      el("button", { type: "button", class: "quiet small", "aria-label": `Delete ${each.title}`, onclick: () => this.remove(each.id) }, "×")))
      : [el("li", { class: "soft" }, "nothing yet")]));
  }
}

// Prompts to begin with: examples, and those that are kept here. chosen: called with a text.
export class Prompts {
  constructor(chosen, text) {
    this.select = el("select", { "aria-label": "Prompt library", onchange: () => this.choose(chosen) });
    this.drop = el("button", { type: "button", class: "quiet", hidden: true, onclick: () => this.remove() }, "Remove");
    this.save = el("button", { type: "button", class: "quiet", onclick: () => this.add(text()) }, "Save prompt");
    this.node = el("div", { class: "row library" }, this.select, this.save, this.drop);
    this.examples = [];
    this.show();
  }

  show(examples = this.examples) {
    this.examples = examples;
    const own = kept(PROMPTS).filter((each) => typeof each === "string");
    const option = (group) => (text, at) => el("option", { value: `${group}${at}` }, typeof text === "string" ? text.slice(0, 60) : text[0]);
    this.select.replaceChildren(el("option", { value: "" }, "Prompts"),
      el("optgroup", { label: "Examples" }, examples.map(option("e"))),
      own.length ? el("optgroup", { label: "Saved" }, own.map(option("o"))) : "");
    this.drop.hidden = true;
  }

  choose(chosen) {
    const [group, at] = [this.select.value[0], Number(this.select.value.slice(1))];
    this.drop.hidden = group !== "o";
    if (group) chosen(group === "e" ? this.examples[at][1] : kept(PROMPTS)[at]);
  }

  add(text) {
    if (!text.trim()) return;
    keep(PROMPTS, [text, ...kept(PROMPTS).filter((each) => each !== text)].slice(0, MOST));
    this.show();
  }

  remove() {
    const at = Number(this.select.value.slice(1));
    keep(PROMPTS, kept(PROMPTS).filter((_, number) => number !== at));
    this.show();
  }
}
