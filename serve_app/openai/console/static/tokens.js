// One generated text: its tokens by origin, its drafts, and its times.

import { el, number, percent, replaceContent } from "./dom.js";

export const ORIGINS = {
  accepted: "drafted, and what the target would have produced",
  recovered: "the target's own token after a rejection",
  bonus: "the target's own token after a fully accepted draft",
  target: "decoded without a draft",
};
const MAX_STEPS = 400;

export class Generation {
  constructor(label) {
    this.label = label;
    this.requestId = `console-${crypto.getRandomValues(new BigUint64Array(1))[0].toString(16)}`;
    this.sent = performance.now();
    this.first = null;
    this.last = null;
    this.text = "";
    this.tokens = [];
    this.steps = [];
    this.numShown = 0; // of the steps
    this.counts = Object.fromEntries(Object.keys(ORIGINS).map((origin) => [origin, 0]));
    this.numDrafted = 0;
    this.numAccepted = 0;
    this.finish = null;
    this.usage = null;
    this.metrics = null;
    this.element = el("div", { class: "answer", "aria-label": label });
  }

  add(chunk) {
    this.usage ??= chunk.usage;
    this.metrics ??= chunk.metrics;
    const choice = chunk.choices[0];
    if (!choice?.token_origins) return;
    this.text += choice.delta?.content ?? choice.text ?? "";
    choice.token_origins.forEach((origin, i) => this.#token(choice.token_texts[i], origin));
    choice.per_step_drafted.forEach((drafted, i) => this.#step(drafted, choice.per_step_accepted[i]));
    this.finish = choice.finish_reason ?? this.finish;
  }

  #token(text, origin) {
    this.last = performance.now();
    this.first ??= this.last;
    this.tokens.push(text);
    this.counts[origin] += 1;
    const marks = text.includes("\n") ? " newline" : "";
    const title = `token ${this.tokens.length}: ${origin}, ${ORIGINS[origin]}`;
    this.element.append(el("span", { class: `token ${origin}${marks}`, title, "data-origin": origin }, text));
  }

  #step(drafted, accepted) {
    this.steps.push({ drafted, accepted });
    this.numDrafted += drafted;
    this.numAccepted += accepted;
  }

  // Tokens per second after the first, as this page received them.
  get speed() {
    const seconds = (this.last - this.first) / 1000;
    return seconds > 0 ? (this.tokens.length - 1) / seconds : null;
  }

  get firstTokenS() {
    return this.first === null ? null : (this.first - this.sent) / 1000;
  }
}

export function legend(generation) {
  return Object.entries(ORIGINS).map(([origin, meaning]) =>
    el(
      "li",
      { title: meaning },
      el("span", { class: `token ${origin}`, "aria-hidden": "true" }, "abc"),
      origin,
      el("b", { "data-count": origin }, number(generation?.counts[origin] ?? 0)),
    ),
  );
}

export function showFigures(target, generation) {
  const { numAccepted, numDrafted, steps } = generation;
  const facts = [
    ["accepted / drafted", `${number(numAccepted)} / ${number(numDrafted)}`, percent(numAccepted, numDrafted)],
    ["draft length", steps.length ? number(steps.at(-1).drafted) : "–", `mean ${number(numDrafted / steps.length, 2)}`],
    ["tokens", number(generation.tokens.length), generation.finish ? `ended: ${generation.finish}` : ""],
    ["tokens/s", number(generation.speed, 1), "after the first"],
    ["first token", generation.firstTokenS === null ? "–" : number(1000 * generation.firstTokenS), "ms"],
  ];
  replaceContent(
    target,
    facts.map(([name, value, more]) => el("div", {}, el("dt", {}, name), el("dd", {}, value, " ", el("small", {}, more)))),
  );
}

// One column for each draft: a filled cell is an accepted token, a hollow one a rejected one. They are added to those of
// the same generation.
export function showSteps(target, generation) {
  const { steps, numAccepted, numDrafted } = generation;
  if (target.shows !== generation) target.replaceChildren();
  target.shows = generation;
  for (const { drafted, accepted } of steps.slice(generation.numShown)) {
    const cells = Array.from({ length: drafted }, (_, i) => el("i", { class: i < accepted ? "accepted" : "rejected" }));
    target.append(el("span", { title: `drafted ${drafted}, accepted ${accepted}` }, cells));
  }
  generation.numShown = steps.length;
  while (target.childElementCount > MAX_STEPS) target.firstChild.remove();
  target.setAttribute("aria-label", `${steps.length} drafts, ${numAccepted} of ${numDrafted} drafted tokens accepted`);
  target.scrollLeft = target.scrollWidth;
}
