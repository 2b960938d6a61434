// Pipelines, their processes and nodes, and what the controllers believe; draining.

import { json } from "./api.js";
import { byId, el, mib, number, percent, replaceContent, showError } from "./dom.js";

const changing = new Map(); // pipeline -> what is asked of it now
let refusal = null; // why the last change failed

export function showOperations({ state, error, changed }) {
  showError(byId("operations-error"), error ?? refusal);
  if (error?.status === 401) replaceContent(byId("operations-view"));
  if (error) return;
  if (byId("operations-view").querySelector(":active")) return; // a press must find its button again
  if (!state.controllers) return replaceContent(byId("operations-view"), forOperators(state));
  const pipelines = state.pipelines ?? [];
  replaceContent(
    byId("operations-view"),
    overview(state),
    pipelines.map((pipeline) => card(pipeline, state, changed)),
    (state.starting ?? []).map(({ pipeline, reason }) =>
      el("section", { class: "panel" }, el("h2", {}, pipeline, pill("starting")), el("p", {}, reason)),
    ),
    nodes(pipelines),
    controllers(state.controllers),
  );
}

const pill = (status) => el("span", { class: "pill", "data-status": status }, status);

function table(caption, head, rows, of = "") {
  return el(
    "div",
    { class: "scrolls", tabindex: "0", role: "region", "aria-label": `${caption} ${of}` },
    el(
      "table",
      {},
      el("caption", {}, caption),
      el("thead", {}, el("tr", {}, head.map((name) => el("th", { scope: "col" }, name)))),
      el("tbody", {}, rows.map(([first, ...rest]) =>
        el("tr", {}, el("th", { scope: "row" }, first), rest.map((cell) => el("td", {}, cell ?? "–"))),
      )),
    ),
  );
}

const forOperators = ({ health }) =>
  el(
    "section",
    { class: "panel" },
    el("h2", {}, "Service", pill(health.status)),
    health.reason && el("p", {}, health.reason),
    el("p", { class: "hint" }, "Pipelines and controllers are shown with an operator's key, which this one is not."),
  );

const facts = (pairs) =>
  el("dl", { class: "figures" }, pairs.map(([name, value, more]) =>
    el("div", {}, el("dt", {}, name), el("dd", {}, value, " ", more ? el("small", {}, more) : null)),
  ));

function overview({ health, pipelines = [], fleet, refused_settings: refused, error }) {
  const workers = pipelines.flatMap((pipeline) => pipeline.workers);
  return el(
    "section",
    { class: "panel" },
    el("h2", {}, "Service", pill(health.status)),
    health.reason && el("p", {}, health.reason),
    error && el("p", { class: "error" }, error),
    facts([
      ["pipelines ready", `${pipelines.filter((each) => each.is_ready).length} / ${pipelines.length}`],
      ["live requests", number(pipelines.reduce((sum, each) => sum + each.num_live, 0))],
      ["ranks", number(workers.length)],
      ["nodes", number(new Set(workers.map((worker) => worker.node_id)).size)],
      ...(fleet ? [["wanted", `${fleet.wanted} of ${fleet.min_count} to ${fleet.max_count}`]] : []),
    ]),
    fleet && el("p", { class: "hint" }, fleet.reason),
    refused && el("p", { class: "error" }, `not applied: ${refused}`),
  );
}

function card(pipeline, state, changed) {
  const name = pipeline.pipeline;
  const stage = (title, workers) => table(
    title,
    ["rank", "node", "pid", "weights", "peak"],
    workers.map((worker) => [worker.name, where(worker), String(worker.pid), mib(worker.loaded_bytes), mib(worker.peak_memory_bytes)]),
    name,
  );
  const part = (state.controllers.pipelines ?? []).find((each) => each.pipeline === name);
  const isVerify = (worker) => worker.name.startsWith("verify");
  return el(
    "section",
    { class: "panel pipeline", "data-pipeline": name },
    el("h2", {}, name, pill(statusOf(pipeline)), button(pipeline, changed)),
    (pipeline.unavailable || pipeline.draining) &&
      el("p", { class: "reason" }, [pipeline.unavailable, pipeline.draining].filter(Boolean).join("; ")),
    facts([
      ["live requests", number(pipeline.num_live)],
      ["epoch", number(pipeline.epoch)],
      ["KV tokens", number(pipeline.kv_cache?.num_tokens)],
      ["plain rounds/s", number(pipeline.weight, 1), "weight"],
      ["interruptions", number(pipeline.num_interruptions), pipeline.last_trouble],
    ]),
    el(
      "div",
      { class: "stages" },
      stage("Draft stage", pipeline.workers.filter((worker) => !isVerify(worker))),
      stage("Verify stage", pipeline.workers.filter(isVerify)),
      pipeline.spares.length ? stage("Spares", pipeline.spares) : null,
      acceptance(part),
    ),
    part && el("p", { class: "hint" }, headOf(part)),
  );
}

const where = ({ host, node_id: id }) => el("span", { title: id }, `${host} `, el("code", {}, id.slice(0, 8)));

function statusOf({ is_ready: isReady, is_degraded: isDegraded, draining }) {
  if (draining) return "draining";
  if (!isReady) return "unavailable";
  return isDegraded ? "degraded" : "ready";
}

function button({ pipeline, draining, num_live: numLive }, changed) {
  const asked = changing.get(pipeline);
  if (asked) return el("button", { id: `change-${pipeline}`, "aria-disabled": "true" }, `${asked}s … ${numLive} live`);
  const change = draining ? "undrain" : "drain";
  const onclick = () => confirmed(change, pipeline).then((yes) => yes && apply(change, pipeline, changed));
  return el("button", { id: `change-${pipeline}`, onclick }, draining ? "Undrain…" : "Drain…");
}

async function confirmed(change, pipeline) {
  const dialog = byId("confirm");
  byId("confirm-title").textContent = `${change === "drain" ? "Drain" : "Undrain"} ${pipeline}?`;
  byId("confirm-text").textContent =
    change === "drain"
      ? "It takes no more requests, and its live streams continue in other pipelines with the same tokens."
      : "It takes requests again.";
  byId("confirm-yes").textContent = change === "drain" ? "Drain" : "Undrain";
  dialog.returnValue = "cancel";
  dialog.showModal();
  await new Promise((resolve) => dialog.addEventListener("close", resolve, { once: true }));
  byId(`change-${pipeline}`)?.focus();
  return dialog.returnValue === "yes";
}

// The view is refreshed while the service drains, which may take long.
async function apply(change, pipeline, changed) {
  changing.set(pipeline, change);
  refusal = null;
  changed();
  try {
    await json(`debug/pipelines/${encodeURIComponent(pipeline)}/${change}`, { method: "POST" });
  } catch (error) {
    refusal = error;
  } finally {
    changing.delete(pipeline);
    changed();
  }
}

function nodes(pipelines) {
  const found = new Map();
  for (const { pipeline, workers, spares } of pipelines) {
    for (const worker of [...workers, ...spares]) {
      const node = found.get(worker.node_id) ?? { worker, ranks: [] };
      node.ranks.push(`${worker.name} of ${pipeline}`);
      found.set(worker.node_id, node);
    }
  }
  if (!found.size) return null;
  const rows = [...found.values()].map(({ worker, ranks }) => [where(worker), String(ranks.length), ranks.join(", ")]);
  return el("section", { class: "panel" }, el("h2", {}, "Nodes"), table("Nodes with ranks", ["node", "processes", "of"], rows));
}

function meter(rate, label) {
  if (rate == null) return "–";
  const bar = el("i", {});
  bar.style.inlineSize = `${100 * rate}%`;
  return el("span", { class: "meter", title: label }, el("span", { class: "track" }, bar), percent(rate, 1));
}

function headOf({ head, cost }) {
  if (!head) return "No exit head: nothing is drafted.";
  const milliseconds = (seconds) => `${number(1000 * seconds, 2)} ms`;
  const costs = cost ? `: ${milliseconds(cost.draft_step_s)} a drafted token, ${milliseconds(cost.verify_s[0])} to verify one row` : "";
  return `Exit head ${head.sha256.slice(0, 12)} (${head.kind}) after layer ${head.exit_layer}${costs}.`;
}

function acceptance(part) {
  if (!part?.acceptance_by_position.length) return null;
  return table(
    "Acceptance by position in the draft, lately",
    ["position", "accepted / drafted", "rate"],
    part.acceptance_by_position.map((at) => [String(at.position), `${at.num_accepted} / ${at.num_drafted}`, meter(at.rate)]),
    part.pipeline,
  );
}

function controllers(state) {
  if (state.error) return el("section", { class: "panel" }, el("h2", {}, "Controllers"), el("p", { class: "error" }, state.error));
  const parameters = Object.entries(state.default.parameters).map(([name, value]) => [name, el("code", {}, JSON.stringify(value))]);
  const rows = Object.entries(state.workloads).map(([name, pool]) => [
    name,
    pool.weight ? meter(pool.mean) : "unknown",
    number(pool.weight),
    number(pool.num_rounds),
    number(pool.num_live),
  ]);
  return el(
    "section",
    { class: "panel" },
    el("h2", {}, "Controllers", pill(state.pinned ? "pinned" : "learning")),
    el("p", {}, "Default: ", el("b", {}, state.default.controller), `, ${state.num_live} live requests.`),
    table("Believed acceptance, by workload class", ["workload", "accepted", "judged tokens", "rounds", "live"], rows),
    el("details", { id: "parameters", open: byId("parameters")?.open },
      el("summary", { id: "parameters-summary" }, "Parameters"), table("Parameters of the default controller", ["parameter", "value"], parameters)),
  );
}
