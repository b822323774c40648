// Text files that go along with a message.

import { bytes, el } from "./dom.js";

const MOST = 256 * 1024;

export class Attachments {
  // told: called with what is wrong with a file, or null.
  constructor(told) {
    this.told = told;
    this.files = [];
    this.input = el("input", { type: "file", multiple: true, class: "hidden", tabindex: "-1", "aria-label": "Text files", onchange: () => this.read() });
    this.button = el("button", { type: "button", class: "quiet", onclick: () => this.input.click() }, "Attach");
    this.list = el("ul", { class: "attached", hidden: true });
  }

  async read() {
    this.told(null);
    for (const file of this.input.files) {
      const text = file.size > MOST ? null : await file.text();
      if (text === null) this.told(new Error(`${file.name} has ${bytes(file.size)}, and a file may have ${bytes(MOST)}`));
      else if (text.includes("\0") || text.includes("\ufffd")) this.told(new Error(`${file.name} is no text file in UTF-8`));
      else this.files.push({ name: file.name, text });
    }
    this.input.value = "";
    this.show();
  }

  show() {
    this.list.hidden = !this.files.length;
    this.list.replaceChildren(...this.files.map((file) => el("li", {}, `${file.name} `,
      el("button", { type: "button", class: "quiet small", "aria-label": `Remove ${file.name}`, onclick: () => {
        this.files = this.files.filter((each) => each !== file);
        this.show();
      } }, "×"))));
  }

  // The message with its files as blocks of code, fenced by more marks than any of them holds.
  joined(message) {
    const blocks = this.files.map(({ name, text }) => {
      const longest = Math.max(2, ...(text.match(/`+/g) ?? []).map((each) => each.length));
      const fence = "`".repeat(longest + 1);
      return `${name}:\n${fence}\n${text.replace(/\n$/, "")}\n${fence}`;
    });
    return [message, ...blocks].filter(Boolean).join("\n\n");
  }

  clear() {
    this.files = [];
    this.show();
  }
}
