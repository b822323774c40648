// Fields that people set, and what they come to in a request.

import { el, unique } from "./dom.js";

// What a field says is wrong with what stands in it.
export class FieldError extends Error {
  constructor(field, message) {
    super(message);
    this.field = field;
  }
}

// A labelled control. read: gives its value, undefined where the server is to decide.
function field(name, label, control, read, { hint = null, more = [], wide = false } = {}) {
  const id = unique(name);
  const wrong = el("p", { class: "error", id: `${id}-wrong`, hidden: true });
  control.id = id;
  control.name = name;
  control.setAttribute("aria-describedby", `${id}-wrong`);
  const node = el("div", { class: wide ? "field wide" : "field" }, el("label", { for: id }, label), control, more, hint && el("p", { class: "hint" }, hint), wrong);
  const found = { name, node, control, wrong, read: () => read(found) };
  return found;
}

export function fail({ control, wrong }, message) {
  wrong.textContent = message ?? "";
  wrong.hidden = !message;
  if (message) control.setAttribute("aria-invalid", "true");
  else control.removeAttribute("aria-invalid");
}

export function numberField(name, label, attributes) {
  const control = el("input", { type: "number", inputmode: "decimal", step: "any", ...attributes });
  return field(name, label, control, (self) => {
    const { badInput, rangeUnderflow, rangeOverflow, stepMismatch } = control.validity;
    if (badInput || rangeUnderflow || rangeOverflow || (stepMismatch && attributes.step === 1)) {
      throw new FieldError(self, control.validationMessage);
    }
    return control.value === "" ? undefined : control.valueAsNumber;
  });
}

export function linesField(name, label, attributes) {
  const control = el("textarea", { rows: 1, spellcheck: "false", ...attributes });
  return field(name, label, control, () => {
    const found = control.value.split("\n").filter((line) => line !== "");
    return found.length ? found : undefined;
  }, { wide: true, hint: "one per line" });
}

export function textField(name, label, attributes) {
  const control = el("textarea", { rows: 2, ...attributes });
  return field(name, label, control, () => control.value.trim() || undefined, { wide: true });
}

// Methods that are ready on this model first, then slower ones, then those that need something, which their title says.
function grouped(methods) {
  const option = (method) => el("option", { value: method.name, title: method.requirements ?? "" }, method.lossless ? method.name : `${method.name} (changes the text)`);
  const groups = {
    "Ready on this model": methods.filter((method) => !method.requirements && !method.slower),
    "Slower here than plain decoding": methods.filter((method) => !method.requirements && method.slower),
    "Needs more": methods.filter((method) => method.requirements),
  };
  if (groups["Ready on this model"].length === methods.length) return methods.map(option);
  return Object.entries(groups).filter(([, members]) => members.length).map(([label, members]) => el("optgroup", { label }, members.map(option)));
}

// One of a family's methods, with its settings. first: choices before the methods, {value: label}.
export function methodField(name, label, methods, first, value = "") {
  const control = el("select", {},
    Object.entries(first).map(([each, text]) => el("option", { value: each }, text)),
    grouped(methods.filter((method) => !(method.name in first))));
  control.value = value;
  const own = el("input", { type: "text", class: "code", spellcheck: "false", autocomplete: "off", "aria-label": `Settings of the ${label.toLowerCase()}` });
  const summary = el("p", { class: "hint" });
  const tell = () => {
    const method = methods.find((each) => each.name === control.value);
    const defaults = Object.entries(method?.settings ?? {});
    own.hidden = !defaults.length;
    own.placeholder = defaults.filter(([, preset]) => preset !== null).map(([key, preset]) => `${key}=${preset}`).join(",") || defaults.map(([key]) => `${key}=…`).join(",");
    own.title = own.placeholder;
    summary.textContent = [method?.summary, method?.requirements && `Needs more here: ${method.requirements}`].filter(Boolean).join(" ");
    summary.hidden = !method;
  };
  control.addEventListener("change", () => {
    own.value = "";
    tell();
  });
  tell();
  return field(name, label, control, () => {
    const settings = own.hidden ? "" : own.value.trim();
    return control.value ? control.value + (settings && `:${settings}`) : undefined;
  }, { more: [own, summary] });
}

const FORMS = {
  "": "any text", json_object: "a JSON object", json_schema: "JSON under a schema",
  regex: "matches a regular expression", choice: "one of some texts", grammar: "follows a Lark grammar",
};
const WRITTEN = {
  regex: ["Regular expression", "[A-Z][a-z]+ [0-9]{4}"],
  choice: ["Texts, one per line", "yes\nno\nperhaps"],
  grammar: ["Lark grammar", "start: number (SIGN number)*\nSIGN: /[-+*]/\nnumber: /[0-9]{1,3}/"],
};

// What an answer follows: any text, JSON, or a language.
export function formatField() {
  const control = el("select", {}, Object.entries(FORMS).map(([value, text]) => el("option", { value }, text)));
  const schema = el("textarea", { class: "code", rows: 8, spellcheck: "false", hidden: true, "aria-label": "JSON schema" });
  schema.value = JSON.stringify(EXAMPLE, null, 1);
  const others = Object.fromEntries(Object.entries(WRITTEN).map(([kind, [label, example]]) => {
    const node = el("textarea", { class: "code", rows: 4, spellcheck: "false", hidden: true, "aria-label": label });
    node.value = example;
    return [kind, node];
  }));
  control.addEventListener("change", () => {
    schema.hidden = control.value !== "json_schema";
    for (const [kind, node] of Object.entries(others)) node.hidden = control.value !== kind;
  });
  return field("response_format", "Answer", control, (self) => {
    if (!control.value) return undefined;
    if (control.value === "json_object") return { type: "object" };
    if (control.value in others) {
      const text = others[control.value].value;
      return { structured: { [control.value]: control.value === "choice" ? text.split("\n").filter(Boolean) : text } };
    }
    try {
      return JSON.parse(schema.value);
    } catch (error) {
      throw new FieldError(self, `the schema is no JSON: ${error.message}`);
    }
  }, { more: [schema, ...Object.values(others)], wide: true });
}

const EXAMPLE = {
  type: "object",
  properties: {
    name: { type: "string", maxLength: 24 },
    age: { type: "integer", minimum: 0, maximum: 120 },
    languages: { type: "array", items: { type: "string", maxLength: 12 }, maxItems: 3 },
  },
  required: ["name", "age", "languages"],
  additionalProperties: false,
};

// Several fields as one form. Throws FieldError where one cannot be read.
export class Fields {
  constructor(fields) {
    this.fields = fields;
  }

  read() {
    for (const each of this.fields) fail(each, null);
    return Object.fromEntries(this.fields.map((each) => [each.name, each.read()]).filter(([, value]) => value !== undefined));
  }

  // Say at the field that an error is about what is wrong; false where there is none.
  tell(error) {
    const named = error.param?.split(".").find((part) => part !== "decodery");
    const about = error instanceof FieldError ? error.field : this.fields.find((each) => each.name === named);
    if (!about || !this.fields.includes(about)) return false;
    fail(about, error.message);
    about.control.closest("details")?.setAttribute("open", "");
    about.control.focus();
    return true;
  }
}

export const DRAFTERS = { auto: "auto", none: "none: one token per pass" };
export const byFamily = (methods, family) => methods.filter((method) => method.family === family);

export const sampling = () => [
  numberField("temperature", "Temperature", { min: 0, max: 2, step: 0.1, value: 0.7, placeholder: "0" }),
  numberField("seed", "Seed", { step: 1, min: -Number.MAX_SAFE_INTEGER, max: Number.MAX_SAFE_INTEGER, value: 7, placeholder: "0" }),
  numberField("max_tokens", "Max tokens", { min: 1, step: 1, value: 256, placeholder: "all that fit" }),
  numberField("top_p", "Top-p", { min: 0, max: 1, placeholder: "1" }),
];

export const further = (methods) => [
  numberField("top_k", "Top-k", { min: 0, step: 1, placeholder: "all" }),
  numberField("min_p", "Min-p", { min: 0, max: 1, placeholder: "0" }),
  numberField("repetition_penalty", "Repetition penalty", { min: 0, placeholder: "1" }),
  numberField("presence_penalty", "Presence penalty", { min: -2, max: 2, placeholder: "0" }),
  numberField("frequency_penalty", "Frequency penalty", { min: -2, max: 2, placeholder: "0" }),
  numberField("thinking_token_budget", "Max reasoning tokens", { min: 0, step: 1, placeholder: "no bound" }),
  numberField("max_draft_tokens", "Max draft tokens", { min: 1, max: 1024, step: 1, placeholder: "no bound" }),
  methodField("acceptance_rule", "Acceptance rule", byFamily(methods, "acceptance-rule"), { "": "default: coupled" }),
  methodField("draft_length", "Draft length", byFamily(methods, "draft-length"), { "": "default" }),
  methodField("logits_source", "Logits source", byFamily(methods, "logits-source"), { "": "the model itself" }),
  methodField("cache_policy", "KV cache policy", byFamily(methods, "cache-policy"), { "": "keeps everything" }),
  methodField("search", "Search", byFamily(methods, "search"), { "": "none: one text" }),
  // Of no use to a model that fills no masks.
  ...(byFamily(methods, "diffusion").some((each) => !each.requirements) ? [methodField("diffuse", "Diffusion", byFamily(methods, "diffusion"), { "": "none: token by token" })] : []),
  methodField("monitor", "Monitor", byFamily(methods, "monitor"), { "": "none" }),
  linesField("stop", "Stop at", { placeholder: "a text that ends the answer" }),
  linesField("sampler", "Sampler, in place of the above", { class: "code", placeholder: "temperature:t=0.7" }),
];
