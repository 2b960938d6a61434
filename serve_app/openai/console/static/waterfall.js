// Where the time of one request went: its spans, or what this page has measured.

import { json } from "./api.js";
import { el, ms, replaceContent } from "./dom.js";

const MAX_ROWS = 160;
const LATEST = 4;
const TRIES = 4;
const PAUSE_MS = 500;

// `hasTraces`: whether the service has GET /debug/traces.
export async function showWaterfall(target, generation, { hasTraces }) {
  target.shows = generation;
  draw(target, measured(generation), "as this page measured it");
  const trace = hasTraces ? await traceOf(generation.requestId) : null;
  if (trace?.spans.length && target.shows === generation) draw(target, ordered(trace.spans), `trace of ${trace.request_id}`);
}

// A trace is kept a moment after its request has ended; a busy service keeps some requests only.
async function traceOf(requestId) {
  try {
    for (let i = 0; i < TRIES; i++) {
      const { traces } = await json(`debug/traces?limit=${LATEST}`);
      const found = traces.find((trace) => trace.request_id === requestId);
      if (found) return found;
      await new Promise((resolve) => setTimeout(resolve, PAUSE_MS));
    }
  } catch {
    // what the page has measured stays
  }
  return null;
}

function measured({ sent, first, last }) {
  const span = (name, start, end, depth) => ({ name, start: start / 1000, end: end / 1000, depth, process: "browser" });
  const end = last ?? performance.now();
  const spans = [span("request", sent, end, 0), span("until the first token", sent, first ?? end, 1)];
  return first === null ? spans : [...spans, span("first token to last", first, end, 1)];
}

// Children follow their parent, by their start.
function ordered(spans) {
  const children = Map.groupBy(spans, (span) => span.parent_id);
  const known = new Set(spans.map((span) => span.span_id));
  const rows = [];
  const visit = (span, depth) => {
    rows.push({ ...span, depth });
    below(children.get(span.span_id) ?? [], depth + 1);
  };
  const below = (some, depth) => some.sort((a, b) => a.start - b.start).forEach((span) => visit(span, depth));
  below(spans.filter((span) => !known.has(span.parent_id)), 0);
  return rows;
}

function draw(target, rows, source) {
  const start = Math.min(...rows.map((row) => row.start));
  const length = Math.max(...rows.map((row) => row.end)) - start || 1;
  const processes = [...new Set(rows.map((row) => row.process))];
  const line = (row) => {
    const bar = el("i", { class: `bar process-${processes.indexOf(row.process) % 4}` });
    bar.style.insetInlineStart = `${(100 * (row.start - start)) / length}%`;
    bar.style.inlineSize = `${(100 * (row.end - row.start)) / length}%`;
    const name = el("span", { class: "name" }, row.name);
    name.style.paddingInlineStart = `${Math.min(row.depth, 6) * 0.75}rem`;
    const facts = Object.entries(row.attributes ?? {}).map(([key, value]) => `${key} ${value}`);
    return el(
      "li",
      { title: [row.process, ...facts].join("\n") },
      name,
      el("span", { class: "track" }, bar),
      el("span", { class: "time" }, ms(row.end - row.start)),
    );
  };
  const more = rows.length > MAX_ROWS ? `, the first ${MAX_ROWS} of ${rows.length} spans` : "";
  replaceContent(
    target,
    el("p", { class: "hint" }, source + more),
    el("ol", { class: "waterfall", tabindex: "0", "aria-label": "Spans, by their start" }, rows.slice(0, MAX_ROWS).map(line)),
  );
}
