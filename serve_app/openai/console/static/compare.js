// The same seed with speculation off and on: where the texts differ, if they do, and how fast each was.

import { el, number, percent } from "./dom.js";

export function comparison(off, on) {
  const at = firstDifference(off.tokens, on.tokens);
  for (const each of [off, on]) each.element.children[at ?? -1]?.classList.add("differs");
  const rows = [
    ["tokens/s", (g) => number(g.metrics?.tokens_per_second, 1)],
    ["first token", (g) => `${number(g.metrics?.time_to_first_token_ms, 1)} ms`],
    ["tokens", (g) => number(g.tokens.length)],
    ["prompt tokens in cache", (g) => number(g.usage?.prompt_tokens_details?.cached_tokens)],
    ["accepted / drafted", (g) => `${g.numAccepted} / ${g.numDrafted} (${percent(g.numAccepted, g.numDrafted)})`],
  ];
  return el(
    "section",
    { class: "comparison", "data-equal": String(at === null) },
    el("p", { class: "verdict" }, at === null ? equal(off) : different(off, on, at), gain(off, on)),
    el(
      "table",
      {},
      el("thead", {}, el("tr", {}, ["measured by the service", off.label, on.label].map((name) => el("th", { scope: "col" }, name)))),
      el(
        "tbody",
        {},
        rows.map(([name, value]) =>
          el("tr", {}, el("th", { scope: "row" }, name), el("td", {}, value(off)), el("td", {}, value(on))),
        ),
      ),
    ),
  );
}

function firstDifference(one, other) {
  const length = Math.max(one.length, other.length);
  for (let i = 0; i < length; i++) if (one[i] !== other[i]) return i;
  return null;
}

const equal = (g) => `The texts are equal: ${number(g.tokens.length)} tokens, ${number(g.text.length)} characters. `;

function different(off, on, at) {
  const shown = (g) => (at < g.tokens.length ? JSON.stringify(g.tokens[at]) : "the end");
  return `The texts differ from token ${at + 1}: ${shown(off)} without speculation, ${shown(on)} with it. `;
}

function gain(off, on) {
  const ratio = on.metrics?.tokens_per_second / off.metrics?.tokens_per_second;
  return Number.isFinite(ratio) ? `Speculation: ${number(ratio, 2)} times the tokens/s.` : "";
}
