// Small helpers: elements, numbers, scales, marks and the tip that follows the pointer.
const result = JSON.parse(document.getElementById("data").textContent);
const PAGES = {};  // By kind of result: the function that draws its page.
const narrow = () => window.innerWidth < 640;

function element(space, tag, attributes, children) {
  const node = space ? document.createElementNS(space, tag) : document.createElement(tag);
  for (const [name, value] of Object.entries(attributes || {})) {
    if (value !== null && value !== undefined && value !== false) node.setAttribute(name, value);
  }
  node.append(...(children || []).flat(Infinity).filter((child) => child !== null && child !== undefined && child !== false));
  return node;
}
const el = (tag, attributes, ...children) => element(null, tag, attributes, children);
const sv = (tag, attributes, ...children) => element("http://www.w3.org/2000/svg", tag, attributes, children);

const number = (value, digits) => (value === null || value === undefined ? "–" : value.toFixed(digits));
const percent = (value) => (value === null || value === undefined ? "–" : `${(100 * value).toFixed(value < 0.1 ? 1 : 0)} %`);
const count = (value, thing) => `${value} ${thing}${value === 1 ? "" : "s"}`;
const words = (name) => name.replaceAll("_", " ");

const linear = (from, to, low, high) => (value) => low + ((value - from) / (to - from || 1)) * (high - low);

function ticks(low, high, count) {
  const raw = (high - low) / count;
  const power = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 2.5, 5, 10].map((factor) => factor * power).find((each) => each >= raw);
  const found = [];
  for (let value = Math.ceil(low / step) * step; value <= high + step * 1e-6; value += step) found.push(+value.toFixed(10));
  return found;
}

// A method's colour and shape go together, so that neither has to be told apart alone.
const SHAPES = [
  "M-4,0a4,4 0 1,0 8,0a4,4 0 1,0 -8,0Z", "M-3.7,-3.7h7.4v7.4h-7.4Z", "M0,-4.8L4.6,3.4H-4.6Z", "M0,-5L5,0L0,5L-5,0Z",
  "M0,4.8L4.6,-3.4H-4.6Z", "M-5,-1.6h3.4v-3.4h3.2v3.4h3.4v3.2h-3.4v3.4h-3.2v-3.4h-3.4Z",
];
const colour = (index) => `var(--m${index % 9})`;
const mark = (index, x, y, tip, size) =>
  sv("path", { d: SHAPES[index % SHAPES.length], transform: `translate(${x},${y}) scale(${size || 1})`, fill: colour(index),
    stroke: "var(--card)", "stroke-width": 1, "data-tip": tip });

const legend = (names, indices) =>
  el("ul", { class: "legend" }, names.map((name, place) =>
    el("li", {}, sv("svg", { viewBox: "-6 -6 12 12", "aria-hidden": "true" }, mark(indices[place], 0, 0)), name)));

function drawing(width, height, label, ...children) {
  return sv("svg", { width, height, viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": label }, children);
}

// Room for the names left of bars: that of the longest one, and never more than half of the width.
const ruler = document.createElement("canvas").getContext("2d");
function gutter(names, width) {
  ruler.font = `12px ${getComputedStyle(document.body).fontFamily}`;
  return Math.min(width / 2, Math.max(...names.map((name) => ruler.measureText(name).width)) + 16);
}

const plots = [];
// A plot is drawn to the width it has, and again when that changes.
function plot(draw) {
  const place = el("div", { class: "plot" });
  let last = 0;
  plots.push(() => {
    const width = Math.floor(place.clientWidth);
    if (width && width !== last) {
      last = width;
      place.replaceChildren(draw(width));
    }
  });
  return place;
}
const drawAll = () => plots.forEach((draw) => draw());
window.addEventListener("resize", drawAll);

function axisX(scale, values, top, bottom, format) {
  return values.map((value) => [
    sv("line", { class: "grid", x1: scale(value), x2: scale(value), y1: top, y2: bottom }),
    sv("text", { class: "soft", x: scale(value), y: bottom + 16, "text-anchor": "middle" }, format(value)),
  ]);
}
function axisY(scale, values, left, right, format) {
  return values.map((value) => [
    sv("line", { class: "grid", x1: left, x2: right, y1: scale(value), y2: scale(value) }),
    sv("text", { class: "soft", x: left - 6, y: scale(value) + 4, "text-anchor": "end" }, format(value)),
  ]);
}

const tip = document.getElementById("tip");
document.addEventListener("pointerover", (event) => {
  const target = event.target.closest("[data-tip]");
  tip.hidden = !target;
  if (target) tip.textContent = target.getAttribute("data-tip");
});
document.addEventListener("pointermove", (event) => {
  if (tip.hidden) return;
  const box = tip.getBoundingClientRect();
  tip.style.left = `${Math.max(6, Math.min(event.clientX + 12, window.innerWidth - box.width - 6))}px`;
  tip.style.top = `${event.clientY + 18 + box.height > window.innerHeight ? event.clientY - box.height - 10 : event.clientY + 18}px`;
});
