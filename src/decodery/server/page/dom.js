// Elements and numbers. What a server or a model says only ever becomes text, never HTML.

function made(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes ?? {})) {
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (value === true) node.setAttribute(name, "");
    else if (value !== null && value !== undefined && value !== false) node.setAttribute(name, value);
  }
  node.append(...children.flat(Infinity).filter((child) => child !== null && child !== undefined && child !== false));
  return node;
}

export const el = (tag, attributes, ...children) => made(document.createElement(tag), attributes, children);
export const sv = (tag, attributes, ...children) =>
  made(document.createElementNS("http://www.w3.org/2000/svg", tag), attributes, children);

// A drawing with words for who cannot see it.
export const drawing = (width, height, label, ...children) =>
  sv("svg", { width, height, viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": label }, ...children);

let last = 0;
export const unique = (stem) => `${stem}-${(last += 1)}`;

export const number = (value, digits = 0) =>
  value === null || value === undefined || !Number.isFinite(value)
    ? "–"
    : value.toLocaleString("en", { minimumFractionDigits: digits, maximumFractionDigits: digits });
export const percent = (part, whole) => (whole > 0 ? `${number((100 * part) / whole)} %` : "–");
export const count = (value, thing) => `${number(value)} ${thing}${value === 1 ? "" : "s"}`;

export function bytes(value) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let unit = 0;
  while (value >= 1024 && unit < units.length - 1) {
    value /= 1024;
    unit += 1;
  }
  return `${number(value, unit && value < 100 ? 1 : 0)} ${units[unit]}`;
}

// Draws soon after it is asked to, and not more often than an eye wants; once a second where motion is unwelcome.
const calm = matchMedia("(prefers-reduced-motion: reduce)");
export function paced(draw) {
  let due = false;
  let before = 0;
  return () => {
    if (due) return;
    due = true;
    const gap = calm.matches ? 1000 : 80;
    setTimeout(() => requestAnimationFrame((now) => {
      due = false;
      before = now;
      draw();
    }), Math.max(0, before + gap - performance.now()));
  };
}

// Calls back with an element's width, now and whenever that changes.
export function onWidth(node, change) {
  let width = 0;
  new ResizeObserver(([entry]) => {
    const found = Math.floor(entry.contentRect.width);
    if (found && found !== width) change((width = found));
  }).observe(node);
}
