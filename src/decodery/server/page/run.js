// One request and what comes of it: the text, how each token of it came, and the figures of every pass.

import { stream } from "./api.js";

export const PARTS = ["propose", "score", "choose", "commit"];

// The bytes of a token, of which those that are no text by themselves are spelled out.
function bytesOf(text) {
  const spelled = /^bytes:((?:\\x[0-9a-f]{2})+)$/.exec(text);
  if (!spelled) return new TextEncoder().encode(text);
  return Uint8Array.from(spelled[1].slice(2).split("\\x"), (pair) => parseInt(pair, 16));
}

export class Run {
  // changed: called with this run after everything that happens to it.
  constructor(path, body, changed) {
    Object.assign(this, { path, body, changed });
    this.state = "waiting"; // then "running", and "ended", "stopped" or "failed"
    this.reasoning = "";
    this.content = "";
    this.tokens = [];
    this.passes = [];
    this.branches = new Map(); // of a search, by id
    this.cells = []; // of a canvas, by place
    this.reading = 0;
    this.sums = { passes: 0, tokens: 0, drafted: 0, accepted: 0, kept: 0, seconds: 0, ...Object.fromEntries(PARTS.map((part) => [part, 0])) };
    this.abort = new AbortController();
    this.decoder = new TextDecoder();
  }

  get over() {
    return this.state !== "waiting" && this.state !== "running";
  }

  // Resolves when it is over, however it ends.
  async begin() {
    const began = performance.now();
    try {
      for await (const chunk of stream(this.path, this.body, this.abort.signal)) {
        if (!this.tokens.length) this.first = (performance.now() - began) / 1000;
        this.state = "running";
        this.take(chunk);
        this.changed(this);
      }
      this.state = "ended";
    } catch (error) {
      this.state = error.name === "AbortError" ? "stopped" : "failed";
      this.error = error;
    }
    this.changed(this);
  }

  stop() {
    this.abort.abort();
  }

  take(chunk) {
    if (chunk.usage) this.usage = chunk.usage;
    const choice = chunk.choices[0];
    if (!choice) return;
    this.reasoning += choice.delta?.reasoning_content ?? "";
    this.content += choice.delta?.content ?? choice.text ?? "";
    this.reason = choice.finish_reason ?? this.reason;
    this.seed = choice.decodery?.seed ?? this.seed;
    this.scores = choice.decodery?.monitor_scores ?? this.scores;
    for (const step of choice.decodery?.steps ?? []) this.step(step);
    for (const part of choice.decodery?.branches ?? []) this.branches.set(part.id, part);
    for (const [at, text] of choice.decodery?.canvas ?? []) this.cells[at] = text ?? undefined;
  }

  step(step) {
    const seconds = PARTS.reduce((sum, part) => sum + step.seconds[part], 0);
    for (const { text, how } of step.tokens) {
      const piece = this.decoder.decode(bytesOf(text), { stream: true });
      this.tokens.push({ piece, how, pass: this.passes.length });
    }
    const accepted = step.tree?.accepted.length ?? 0;
    this.sums.kept += accepted;
    if (step.prefill) this.reading += 1;
    else {
      this.sums.passes += 1;
      this.sums.tokens += step.tokens.length;
      this.sums.accepted += accepted;
      this.sums.drafted += step.tree ? step.tree.tokens.length - 1 : 0;
      this.sums.seconds += seconds;
      for (const part of PARTS) this.sums[part] += step.seconds[part];
    }
    // Passes that only read a prompt have nothing to show.
    if (step.tree) this.passes.push({ ...step, total: seconds, accepted });
  }

  get tokensPerPass() {
    return this.sums.passes ? this.sums.tokens / this.sums.passes : null;
  }

  get tokensPerSecond() {
    return this.sums.seconds ? this.sums.tokens / this.sums.seconds : null;
  }
}

// How a run ended, in words.
export const ENDS = { stop: "ended by itself", length: "ended by its length", tool_calls: "called a tool", cancelled: "cancelled", content_filter: "ended by its monitor" };
