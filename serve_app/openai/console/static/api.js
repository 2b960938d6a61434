// The service's API, at the address that the page came from, with the key of this tab.

const KEY = "eesd-key";

export const key = {
  get: () => sessionStorage.getItem(KEY) ?? "",
  // Headers are bytes, and browsers take one character for each.
  utf8: () => String.fromCharCode(...new TextEncoder().encode(key.get())),
  set: (value) => (value ? sessionStorage.setItem(KEY, value) : sessionStorage.removeItem(KEY)),
};

export class ApiError extends Error {
  constructor({ message, code, param, status }) {
    super(message);
    Object.assign(this, { code, param, status });
  }
}

// `path` is relative: the service may be behind a prefix.
export async function call(path, { method = "GET", body, signal, requestId } = {}) {
  const headers = {};
  if (requestId) headers["X-Request-Id"] = requestId;
  if (key.get()) headers.Authorization = `Bearer ${key.utf8()}`;
  if (body !== undefined) headers["Content-Type"] = "application/json";
  let answer;
  try {
    answer = await fetch(path, { method, headers, signal, body: body && JSON.stringify(body) });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError({ message: `the service does not answer: ${error.message}` });
  }
  if (!answer.ok) throw await refusal(answer);
  return answer;
}

export const json = async (path, options) => (await call(path, options)).json();

async function refusal(answer) {
  const text = await answer.text();
  try {
    return new ApiError({ ...JSON.parse(text).error, status: answer.status });
  } catch {
    return new ApiError({ message: text || answer.statusText, status: answer.status });
  }
}

// Yields the chunks of a stream; an error in it is raised.
export async function* chunks(path, options) {
  const answer = await call(path, { method: "POST", ...options });
  let rest = "";
  for await (const part of texts(answer.body)) {
    const lines = (rest + part).split("\n");
    rest = lines.pop();
    for (const line of lines) {
      if (!line.startsWith("data: ")) continue;
      if (line === "data: [DONE]") return;
      const chunk = JSON.parse(line.slice(6));
      if (chunk.error) throw new ApiError(chunk.error);
      yield chunk;
    }
  }
  throw new ApiError({ message: "the stream broke off before its end" });
}

async function* texts(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  try {
    for (let part; !(part = await reader.read()).done; ) yield part.value;
  } finally {
    reader.cancel().catch(() => {});
  }
}
