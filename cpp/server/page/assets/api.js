// The server: its routes as functions. Knows HTTP and JSON, nothing of conversations.

const KEY = "pypcd.key"; // for this tab alone

/** An error that the server told, with its HTTP status; 0: it was not reached. */
class ServerError extends Error {
  constructor(message, status) {
    super(message);
    this.status = status;
  }
}

export const key = {
  get: () => sessionStorage.getItem(KEY) ?? "",
  set: value => value ? sessionStorage.setItem(KEY, value) : sessionStorage.removeItem(KEY),
};

async function ask(path, body, signal) {
  const headers = new Headers({"Content-Type": "application/json"});
  try {
    if (key.get()) headers.set("Authorization", "Bearer " + key.get());
  } catch {
    throw new ServerError("The API key under Settings has characters that no key has.", 401);
  }
  let response;
  try {
    response = await fetch(path, {method: body ? "POST" : "GET", headers, body: body && JSON.stringify(body), signal});
  } catch (error) {
    if (signal?.aborted) throw error;
    throw new ServerError("The server does not answer. Is it still running?", 0);
  }
  if (response.ok) return response;
  const text = await response.text().catch(() => "");
  let message;
  try {
    message = JSON.parse(text).error.message;
  } catch {
    message = text.slice(0, 300);
  }
  if (response.status === 401)
    message = key.get() ? "The API key under Settings is not the server's." : "This server wants an API key: give it under Settings.";
  throw new ServerError(message || `The server answered ${response.status}.`, response.status);
}

const json = async (path, body) => (await ask(path, body)).json();

export const models = async () => (await json("v1/models")).data;
export const props = model => json("props?model=" + encodeURIComponent(model));
export const tokenCount = async (model, content) => (await json("tokenize", {model, content})).tokens.length;
export const template = async (model, messages, replay) => (await json("apply-template", {model, messages, replay})).prompt;

/** What the server reads in a file: {name, text, n_tokens}. */
export const document = (model, filename, file_data) => json("documents", {model, filename, file_data});

/** As completion(), of a chat: the server itself puts what its messages hold into a prompt. */
export async function* chat(body, signal) {
  for await (const {choices: [choice] = [], prompt_progress, timings} of parts("v1/chat/completions", body, signal, ({choices}) => choices?.[0]?.finish_reason)) {
    const {delta, finish_reason, logprobs} = choice ?? {};
    const entries = (logprobs?.content ?? []).map(entry => ({...entry, token: delta.content ?? ""})); // of what was held back too
    if (!entries.length && delta?.content) entries.push({id: -1, token: delta.content});
    yield {
      prompt_progress, timings, completion_probabilities: entries, tokens_predicted: timings?.predicted_n,
      stop: Boolean(finish_reason), stop_type: finish_reason === "length" ? "limit" : "eos",
    };
  }
}

export const completion = (body, signal) => parts("completion", body, signal, part => part.stop);

/** The parts of a streamed completion, as they come. A stream that ends without its last part is an error. */
async function* parts(path, body, signal, isLast) {
  const response = await ask(path, {...body, stream: true}, signal);
  try {
    for await (const data of events(response.body)) {
      const part = JSON.parse(data);
      if (part.error) throw new ServerError(part.error.message ?? "The server ended this answer.", part.error.code ?? 500);
      yield part;
      if (isLast(part)) return;
    }
  } catch (error) {
    if (signal.aborted || error instanceof ServerError) throw error;
  }
  throw new ServerError("The server's answer broke off. Is it still running?", 0);
}

/** The data of server-sent events, whose bytes may be cut anywhere. */
async function* events(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  try {
    for (let rest = ""; ;) {
      const {value, done} = await reader.read();
      if (done) return;
      const lines = (rest + value).split(/\r?\n/);
      rest = lines.pop();
      for (const line of lines) {
        const data = /^data: ?([^]*)$/.exec(line)?.[1];
        if (data && data !== "[DONE]") yield data;
      }
    }
  } finally {
    reader.cancel().catch(() => {}); // nobody reads on: the server may stop
  }
}
