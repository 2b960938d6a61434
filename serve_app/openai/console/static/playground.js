// Sends prompts and shows what comes back, token by token.

import { chunks } from "./api.js";
import { comparison } from "./compare.js";
import { byId, el, replaceContent, showError } from "./dom.js";
import { Generation, legend, showFigures, showSteps } from "./tokens.js";
import { showWaterfall } from "./waterfall.js";

const GRAMMARS = {
  json: { name: "JSON schema", example: '{"type": "object", "properties": {"answer": {"type": "integer"}}, "required": ["answer"]}' },
  regex: { name: "Regular expression", example: "(yes|no)" },
};

export function startPlayground() {
  const form = byId("composer");
  const transcript = byId("transcript");
  let messages = [];
  let running = null;
  let hasTraces = false;

  const chosen = (name) => form.elements[name].value;

  function body(prompt, speculation) {
    const structure = chosen("structure");
    return {
      ...(chosen("kind") === "chat" ? { messages: [...messages, { role: "user", content: prompt }] } : { prompt }),
      temperature: Number(chosen("temperature")),
      max_tokens: Number(chosen("max_tokens")),
      seed: Number(chosen("seed")),
      speculation,
      ...(structure && { structured_outputs: { [structure]: chosen("grammar") } }),
      stream: true,
      stream_options: { include_usage: true },
      return_token_origins: true,
    };
  }

  const speculating = () => ({ mode: "auto", ...(chosen("controller") && { controller: chosen("controller") }) });

  // Streams one answer into `column`.
  async function generate(prompt, { label, speculation, column, signal }) {
    const generation = new Generation(label);
    column.append(generation.element);
    const path = chosen("kind") === "chat" ? "v1/chat/completions" : "v1/completions";
    let shown = 0;
    const show = () => {
      shown = 0;
      replaceContent(byId("legend"), legend(generation));
      showFigures(byId("figures"), generation);
      showSteps(byId("steps"), generation);
      transcript.scrollTop = transcript.scrollHeight;
    };
    try {
      for await (const chunk of chunks(path, { body: body(prompt, speculation), signal, requestId: generation.requestId })) {
        generation.add(chunk);
        shown ||= requestAnimationFrame(show);
      }
    } finally {
      cancelAnimationFrame(shown);
      show();
      showWaterfall(byId("waterfall"), generation, { hasTraces });
    }
    return generation;
  }

  // Runs one or two generations; `work` gets a signal, and a row for the answers.
  async function run(prompt, work) {
    if (!form.checkValidity()) byId("settings").open = true;
    if (running || !form.reportValidity()) return;
    running = new AbortController();
    const seed = form.elements.seed;
    const isDrawn = seed.value === "";
    if (isDrawn) seed.value = crypto.getRandomValues(new Uint32Array(1))[0];
    if (chosen("kind") === "completion") clear();
    const answers = el("div", { class: "answers" });
    const turn = el("article", { class: "turn" }, el("p", { class: "asked" }, prompt), answers);
    transcript.append(turn);
    byId("output").scrollIntoView({ block: "nearest" });
    setRunning(true, `Streaming with seed ${seed.value}.`);
    showError(byId("error"));
    let said = "";
    try {
      const generation = await work(running.signal, answers, turn);
      said = `Ended: ${generation.finish}, ${generation.tokens.length} tokens, seed ${seed.value}.`;
      remember(prompt, generation);
    } catch (error) {
      said = error.name === "AbortError" ? "Stopped." : "Failed.";
      if (error.name !== "AbortError") showError(byId("error"), error);
    } finally {
      running = null;
      if (isDrawn) seed.value = "";
      setRunning(false, said);
    }
  }

  function remember(prompt, generation) {
    if (chosen("kind") !== "chat") return;
    messages.push({ role: "user", content: prompt }, { role: "assistant", content: generation.text });
    form.elements.prompt.value = "";
  }

  function setRunning(is, status) {
    byId("stop").disabled = !is;
    byId("send").disabled = byId("compare").disabled = byId("clear").disabled = is;
    for (const radio of form.elements.kind) radio.disabled = is;
    transcript.setAttribute("aria-busy", is);
    byId("status").textContent = status;
    if (!is && document.activeElement === document.body) form.elements.prompt.focus({ preventScroll: true });
  }

  function send() {
    const prompt = chosen("prompt");
    const isOff = chosen("mode") === "off";
    run(prompt, (signal, column) =>
      generate(prompt, { label: "answer", speculation: isOff ? { mode: "off" } : speculating(), column, signal }),
    );
  }

  function compare() {
    const prompt = chosen("prompt");
    run(prompt, async (signal, answers, turn) => {
      const [left, right] = ["speculation off", "speculation on"].map((label) => {
        const column = el("div", { class: "column" }, el("h3", {}, label));
        answers.append(column);
        return { label, column, signal };
      });
      answers.classList.add("two");
      const off = await generate(prompt, { ...left, speculation: { mode: "off" } });
      const on = await generate(prompt, { ...right, speculation: speculating() });
      turn.append(comparison(off, on));
      transcript.scrollTop = transcript.scrollHeight;
      return on;
    });
  }

  function clear() {
    messages = [];
    replaceContent(transcript);
    showError(byId("error"));
    byId("status").textContent = "";
  }

  function chooseStructure() {
    const grammar = GRAMMARS[chosen("structure")];
    byId("grammar-field").hidden = !grammar;
    if (!grammar) return;
    byId("grammar-name").textContent = grammar.name;
    const isExample = Object.values(GRAMMARS).some(({ example }) => example === byId("grammar").value);
    if (isExample || !byId("grammar").value) byId("grammar").value = grammar.example;
  }

  form.addEventListener("submit", (event) => {
    event.preventDefault();
    send();
  });
  form.addEventListener("keydown", (event) => {
    if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) {
      event.preventDefault();
      send();
    }
  });
  document.addEventListener("keydown", (event) => {
    if (event.key === "Escape" && !byId("confirm").open) running?.abort();
  });
  form.addEventListener("change", (event) => {
    if (event.target.name === "kind") clear();
    if (event.target.name === "structure") chooseStructure();
  });
  byId("compare").addEventListener("click", compare);
  byId("stop").addEventListener("click", () => running?.abort());
  byId("clear").addEventListener("click", clear);
  replaceContent(byId("legend"), legend(null));
  chooseStructure();

  return {
    // What the service's description of its API offers; traces are for operators.
    offer(api, { byDefault, isOperator }) {
      hasTraces = isOperator && "/debug/traces" in api.paths;
      const { controller } = api.components.schemas.SpeculationFields.properties;
      const names = controller.anyOf.find((type) => type.enum).enum;
      const select = form.elements.controller;
      const before = select.value;
      replaceContent(select, el("option", { value: "" }, byDefault ? `default: ${byDefault}` : "default"), names.map((name) => el("option", { value: name }, name)));
      select.value = before;
    },
  };
}
