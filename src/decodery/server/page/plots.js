// Small plots. All take the width they have and plain numbers; x runs over passes or seconds.

import { drawing, number, sv } from "./dom.js";

const HEIGHT = 84;
const LEFT = 34;
const TOP = 6;
const BOTTOM = 16;

// The round number nearest above half of what has to be shown: the distance of lines.
function stepOf(high) {
  const raw = high / 2;
  const power = 10 ** Math.floor(Math.log10(raw));
  return [1, 2, 3, 4, 5, 6, 8, 10].map((factor) => factor * power).find((each) => each >= raw * 0.999);
}

const tickText = (value) => (value >= 10_000 ? `${number(value / 1000)}k` : String(+value.toPrecision(3)));

// Axes of a plot whose values run from 0 to `highest`; gives the scale of y as well.
function frame(width, height, highest, [from, to]) {
  const step = stepOf(highest);
  const high = 2 * step;
  const y = (value) => height - BOTTOM - (Math.min(value, high) / high) * (height - BOTTOM - TOP);
  const lines = [0, step, high].map((value) => [
    sv("line", { class: value ? "grid" : "axis", x1: LEFT, x2: width, y1: Math.round(y(value)) + 0.5, y2: Math.round(y(value)) + 0.5 }),
    from && sv("text", { class: "tick", x: LEFT - 6, y: y(value) + 3.5, "text-anchor": "end" }, tickText(value)),
  ]);
  const below = [
    sv("text", { class: "tick", x: LEFT, y: height - 3 }, from),
    sv("text", { class: "tick", x: width, y: height - 3, "text-anchor": "end" }, to),
  ];
  return { y, axes: [lines, below] };
}

const path = (points) => points.map(([x, y], index) => `${index ? "L" : "M"}${x.toFixed(1)},${y.toFixed(1)}`).join("");

// Bars of stacked parts, one bar per pass. parts: {class, values}; first: the number of the first one; marked: an index.
export function bars(width, label, parts, { first = 1, slots, marked = null }) {
  const length = parts[0].values.length;
  const sums = parts[0].values.map((_, index) => parts.reduce((sum, part) => sum + part.values[index], 0));
  // One slow pass does not flatten all others.
  const sorted = [...sums].sort((left, right) => left - right);
  const most = sorted.at(-1) ?? 1;
  const usual = sorted[Math.floor(sorted.length * 0.9)] ?? 1;
  const high = most > 4 * usual ? 1.5 * usual : most;
  const { y, axes } = frame(width, HEIGHT, high, [length ? `pass ${first}` : "", length === slots ? `${first + length - 1}` : ""]);
  const step = (width - LEFT) / slots;
  const bar = Math.max(step - (step > 4 ? 1 : 0), 0.5);
  const low = Array(length).fill(0);
  const drawn = parts.map(({ class: kind, values }) => {
    const d = values.map((value, index) => {
      const top = y(low[index] + value);
      const found = `M${(LEFT + index * step).toFixed(1)},${y(low[index]).toFixed(1)}V${top.toFixed(1)}h${bar.toFixed(1)}V${y(low[index]).toFixed(1)}Z`;
      low[index] += value;
      return value > 0 ? found : "";
    }).join("");
    return sv("path", { class: `fill ${kind}`, d });
  });
  const cursor = marked === null ? null : sv("rect", { class: "cursor", x: LEFT + marked * step - 1, y: TOP - 2, width: bar + 2, height: HEIGHT - BOTTOM - TOP + 2 });
  return drawing(width, HEIGHT, label, axes, drawn, cursor);
}

// Lines over a common x. lines: {class, points: [[x, y], ...]}; ends: what stands at the ends of the x axis.
export function lines(width, label, found, { to, from = 0, ends, height = HEIGHT, least = 1, filled = false, marked = null }) {
  const high = Math.max(least, ...found.flatMap(({ points }) => points.map(([, value]) => value)));
  const { y, axes } = frame(width, height, high, ends);
  const x = (value) => LEFT + ((value - from) / (to - from || 1)) * (width - LEFT - 3);
  const drawn = found.filter(({ points }) => points.length).map(({ class: kind, points }) => {
    const placed = points.map(([at, value]) => [x(at), y(value)]);
    const area = `${path(placed)}L${placed.at(-1)[0].toFixed(1)},${y(0)}L${placed[0][0].toFixed(1)},${y(0)}Z`;
    const end = placed.at(-1);
    return [
      filled && sv("path", { class: `area ${kind}`, d: area }),
      sv("path", { class: `line ${kind}`, d: path(placed) }),
      sv("circle", { class: `fill ${kind}`, cx: end[0], cy: end[1], r: 2.5 }),
    ];
  });
  const cursor = marked === null ? null : sv("line", { class: "cursor", x1: x(marked), x2: x(marked), y1: TOP - 2, y2: height - BOTTOM });
  return drawing(width, height, label, axes, drawn, cursor);
}

// One bar of a whole's parts. parts: {class, value}.
export function shares(width, label, parts) {
  const whole = parts.reduce((sum, { value }) => sum + value, 0) || 1;
  let left = 0;
  return drawing(width, 10, label, parts.map(({ class: kind, value }) => {
    const wide = (value / whole) * width;
    left += wide;
    return sv("rect", { class: `fill ${kind}`, x: left - wide, width: Math.max(wide - 1, 0), height: 10 });
  }));
}
