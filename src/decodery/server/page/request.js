// From what people set to a request.

const OWN = ["drafter", "acceptance_rule", "draft_length", "logits_source", "sampler", "monitor", "max_draft_tokens", "fresh_memory", "search", "diffuse", "cache_policy"];

// A schema as a method's setting: signs that mean something there are spelled as JSON allows.
function spelled(schema) {
  const escaped = (sign) => `\\u${sign.charCodeAt(0).toString(16).padStart(4, "0")}`;
  const text = JSON.stringify(schema).replace(/"(?:[^"\\]|\\.)*"/g, (string) =>
    `"${string.slice(1, -1).replace(/\\.|[(),=]/g, (found) => (found === '\\"' ? escaped('"') : found.length === 1 ? escaped(found) : found))}"`);
  return `json-schema:schema="${text}"`;
}

// Path and body of a request. given: {messages} or {prompt}; values: as `Fields` reads them.
export function request(model, given, { response_format: schema, system: _, ...values }) {
  const own = { trace: "steps" };
  const body = { model, ...given, stream: true, stream_options: { include_usage: true } };
  for (const [name, value] of Object.entries(values)) (OWN.includes(name) ? own : body)[name] = value;
  const chat = "messages" in given;
  if (schema?.structured) body.structured_outputs = schema.structured;
  else if (schema && chat) body.response_format = { type: "json_schema", json_schema: { name: "answer", schema } };
  else if (schema) own.constraint = spelled(schema);
  body.decodery = own;
  return { path: chat ? "v1/chat/completions" : "v1/completions", body };
}
