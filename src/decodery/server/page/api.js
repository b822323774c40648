// The server: requests, streams and refusals. The key stays in this module's memory.

let key = "";
export const setKey = (text) => { key = text; };

export class ApiError extends Error {
  constructor(message, { status = 0, param = null, code = null } = {}) {
    super(message);
    Object.assign(this, { status, param, code });
  }
}

async function refusal(response) {
  const body = await response.json().catch(() => null);
  const { message, param, code } = body?.error ?? {};
  const wait = response.headers.get("retry-after");
  const again = wait ? ` (again in ${wait} s)` : "";
  return new ApiError((message ?? `the server answered ${response.status}`) + again, { status: response.status, param, code });
}

async function send(path, options = {}) {
  const headers = { ...options.headers, ...(key && { Authorization: `Bearer ${key}` }) };
  let response;
  try {
    response = await fetch(path, { ...options, headers, credentials: "omit", cache: "no-store" });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError("the server cannot be reached: is it still running?");
  }
  if (response.ok) return response;
  const error = await refusal(response);
  if (error.status === 401) dispatchEvent(new CustomEvent("key-wanted", { detail: { wrong: key !== "" } }));
  throw error;
}

export const get = async (path) => (await send(path)).json();

// The chunks of a streamed answer. Throws ApiError where it ends by an error or breaks off, AbortError where it is stopped.
export async function* stream(path, body, signal) {
  const response = await send(path, {
    method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify(body), signal,
  });
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  let ended = false;
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done && ended) return;
      if (done) throw new ApiError("the answer broke off before its end");
      const events = (rest + value).split("\n\n");
      rest = events.pop();
      for (const event of events) {
        const data = event.replace(/^data: /, "");
        ended = data === "[DONE]";
        if (ended) continue;
        const chunk = JSON.parse(data);
        if (chunk.error) throw new ApiError(chunk.error.message, chunk.error);
        yield chunk;
      }
    }
  } catch (error) {
    if (error instanceof ApiError || error.name === "AbortError") throw error;
    throw new ApiError("the connection broke before the answer's end");
  } finally {
    reader.cancel().catch(() => {});
  }
}
