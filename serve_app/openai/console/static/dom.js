// Elements from data. Strings become text nodes, never markup.

export function el(name, properties = {}, ...children) {
  return filled(document.createElement(name), properties, children);
}

export function svg(name, properties = {}, ...children) {
  return filled(document.createElementNS("http://www.w3.org/2000/svg", name), properties, children);
}

function filled(element, properties, children) {
  for (const [key, value] of Object.entries(properties)) {
    if (key.startsWith("on")) element.addEventListener(key.slice(2), value);
    else if (value === true) element.setAttribute(key, "");
    else if (value !== false && value != null) element.setAttribute(key, String(value));
  }
  element.append(...children.flat().filter((child) => child != null));
  return element;
}

export const byId = (id) => document.getElementById(id);

// Replaces the content, and keeps the focus on the element of the same id.
export function replaceContent(parent, ...children) {
  const focused = parent.contains(document.activeElement) ? document.activeElement.id : "";
  parent.replaceChildren(...children.flat().filter((child) => child != null));
  if (focused) byId(focused)?.focus({ preventScroll: true });
}

// The same error is not announced twice.
export function showError(target, error) {
  if (target.shows === error?.message) return;
  target.shows = error?.message;
  if (!error) return replaceContent(target);
  const facts = [error.status && `HTTP ${error.status}`, error.code, error.param].filter(Boolean);
  replaceContent(
    target,
    el("p", { class: "error" }, el("strong", {}, error.message), facts.length ? el("code", {}, facts.join(" · ")) : null),
  );
}

const NUMBERS = new Map();

export function number(value, digits = 0) {
  if (value == null || !Number.isFinite(value)) return "–";
  if (!NUMBERS.has(digits)) {
    const options = { minimumFractionDigits: digits, maximumFractionDigits: digits };
    NUMBERS.set(digits, new Intl.NumberFormat("en", options));
  }
  return NUMBERS.get(digits).format(value);
}

export const percent = (part, whole) => (whole ? `${number((100 * part) / whole, 1)} %` : "–");
export const ms = (seconds) => (seconds == null ? "–" : `${number(1000 * seconds, seconds < 0.1 ? 1 : 0)} ms`);
export const mib = (bytes) => (bytes == null ? "–" : `${number(bytes / 2 ** 20)} MiB`);
