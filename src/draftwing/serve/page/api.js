// Requests to the server: its state, costs, lessons, and streamed texts.

export class ApiError extends Error {
  constructor(kind, message, retryAfter = 0) {
    super(message);
    this.kind = kind; // "gone", "key", "busy", "refused" or "failed"
    this.retryAfter = retryAfter;
  }
}

const kept = (() => {
  try {
    return window.sessionStorage; // without storage, the key is kept until the page is closed
  } catch {
    const values = new Map();
    return { getItem: (name) => values.get(name) ?? null, setItem: (name, value) => values.set(name, value) };
  }
})();

export const apiKey = () => kept.getItem("draftwing-key") || "";
export const setApiKey = (key) => kept.setItem("draftwing-key", key.trim());

async function ask(path, body, signal) {
  const headers = { Accept: "application/json" };
  if (apiKey()) headers.Authorization = `Bearer ${apiKey()}`;
  if (body) headers["Content-Type"] = "application/json";
  let response;
  try {
    response = await fetch(path, { method: body ? "POST" : "GET", headers, body: body && JSON.stringify(body), signal });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError("gone", "The server does not answer. It may have stopped: start it again, then retry.");
  }
  if (response.ok) return response;
  let message = `The server answered with status ${response.status}.`;
  try {
    message = (await response.json()).error.message;
  } catch { /* not JSON: for instance an error page of a proxy */ }
  if (response.status === 401) throw new ApiError("key", "This server needs an API key. Enter it under Settings.");
  if (response.status === 429) {
    const wait = Number(response.headers.get("Retry-After")) || 1;
    throw new ApiError("busy", `The server is full: ${message}`, wait);
  }
  throw new ApiError(response.status < 500 ? "refused" : "failed", message);
}

export const getState = async () => (await ask("inspector/state")).json();
export const getCosts = async () => (await ask("inspector/costs")).json();
export const getLesson = async (body) => (await ask("inspector/lesson", body)).json();

// Yields the events of a stream as they arrive.
async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const lines = (rest + value).split("\n");
    rest = lines.pop();
    for (const line of lines) {
      if (!line.startsWith("data:")) continue;
      const data = line.slice(5).trim();
      if (data === "[DONE]") return;
      yield JSON.parse(data);
    }
  }
}

// Generates a text; calls onStep for every step, and returns the finish reason.
export async function write({ state, prompt, messages, options, trace, signal }, onStep) {
  const body = {
    model: state.model,
    stream: true,
    max_tokens: options.maxTokens,
    temperature: options.temperature,
    seed: options.seed,
    speculation: { draft: options.draft, trace },
  };
  if (options.draft !== "none" && options.tree !== "auto") body.speculation.tree = options.tree;
  if (state.is_chat) body.messages = messages;
  else body.prompt = prompt;
  const response = await ask(state.is_chat ? "v1/chat/completions" : "v1/completions", body, signal);
  let finish = null;
  try {
    for await (const event of events(response)) {
      if (event.error) throw new ApiError("failed", event.error.message);
      const choice = event.choices?.[0];
      const text = choice?.delta?.content ?? choice?.text ?? "";
      if (event.draftwing || text) onStep(text, event.draftwing);
      finish = choice?.finish_reason ?? finish;
    }
  } catch (error) {
    if (error.name === "AbortError" || error instanceof ApiError) throw error;
    throw new ApiError("gone", "The connection was lost before the text was finished.");
  }
  if (finish === null) throw new ApiError("gone", "The connection was lost before the text was finished.");
  return finish;
}
