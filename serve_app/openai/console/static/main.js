// The frame of the console: views, key, theme, health.

import { call, json, key } from "./api.js";
import { byId } from "./dom.js";
import { showOperations } from "./operations.js";
import { startPlayground } from "./playground.js";

const THEMES = ["auto", "light", "dark"];
const POLL_MS = { operations: 1000, playground: 5000 };

let view = "playground";
let timer = 0;
let isLearnt = false;
let isOperator = true; // whether this key opens the operators' pages, as far as is known
const playground = startPlayground();

function showView() {
  view = location.hash === "#operations" ? "operations" : "playground";
  for (const name of ["playground", "operations"]) {
    byId(name).hidden = name !== view;
    byId(`to-${name}`).toggleAttribute("aria-current", name === view);
  }
  poll();
}

// The state of the service, again and again while this page is seen.
async function poll() {
  clearTimeout(timer);
  if (document.hidden) return;
  try {
    const state = await read();
    await learn(state);
    showHealth(state.health.status, state.health.reason);
    if (view === "operations") showOperations({ state, changed: poll });
  } catch (error) {
    showHealth(error.status === 401 ? "locked" : "unknown", error.message);
    if (view === "operations") showOperations({ error });
  }
  clearTimeout(timer);
  timer = setTimeout(poll, POLL_MS[view]);
}

// What there is to show; of a key that is not an operator's, the health alone.
async function read() {
  if (isOperator) {
    const asked = key.get();
    try {
      return await json("debug/state");
    } catch (error) {
      if (error.code !== "operator_key_needed" || key.get() !== asked) throw error;
      isOperator = false;
    }
  }
  return { health: await health() };
}

async function health() {
  try {
    const reason = await (await call("health")).text();
    return { status: reason ? "degraded" : "ready", reason };
  } catch (error) {
    if (error.status !== 503) throw error;
    return { status: "unavailable", reason: error.message };
  }
}

function showHealth(status, reason) {
  const health = byId("health");
  const words = { locked: "key needed", unknown: "no answer" };
  if (health.dataset.status !== status) health.textContent = words[status] ?? status;
  health.dataset.status = status;
  health.title = reason || "text can be generated";
}

// What the service offers, from its own description; asked for once, when the key is right.
async function learn(state) {
  if (isLearnt) return;
  const asked = key.get();
  const [models, api] = await Promise.all([json("v1/models"), json("openapi.json")]);
  if (key.get() !== asked) return;
  byId("model").textContent = models.data[0].id;
  playground.offer(api, { byDefault: state.controllers?.default?.controller, isOperator });
  isLearnt = true;
}

function applyTheme(theme) {
  document.documentElement.dataset.theme = theme;
  byId("theme").textContent = `Theme: ${theme}`;
  localStorage.setItem("eesd-theme", theme);
}

byId("theme").addEventListener("click", () => {
  const now = document.documentElement.dataset.theme;
  applyTheme(THEMES[(THEMES.indexOf(now) + 1) % THEMES.length]);
});
byId("key").value = key.get();
byId("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  key.set(byId("key").value.trim());
  isLearnt = false;
  isOperator = true;
  poll();
});
addEventListener("hashchange", showView);
document.addEventListener("visibilitychange", poll);
byId("settings").open = !matchMedia("(max-width: 40rem)").matches;
applyTheme(THEMES.find((theme) => theme === localStorage.getItem("eesd-theme")) ?? "auto");
showView();
