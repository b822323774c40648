// The plots of a benchmark. Rows come in with `index`, the place of their method, and `label`, its name.
// A handful of questions has no interval, and plain decoding over itself neither.
const spread = (row) => row.speedup !== null && row.prompts >= 5 && row.speedup_low < row.speedup_high;
const interval = (row) => number(row.speedup, 2) + (spread(row) ? ` (${number(row.speedup_low, 2)} to ${number(row.speedup_high, 2)})` : "");

// Overall speed-ups as bars with their intervals.
function overallPlot(rows) {
  return plot((width) => {
    const step = narrow() ? 44 : 32, left = narrow() ? 0 : gutter(rows.map((row) => row.label), width), right = width - 150, lift = narrow() ? 18 : 0;
    const most = Math.max(1.2, ...rows.map((row) => row.speedup_high || row.speedup || 0)) * 1.02;
    const x = linear(0, most, left, right), height = rows.length * step + 24;
    const label = `Speed-up over plain decoding. ${rows.map((row) => `${row.label}: ${interval(row)}`).join("; ")}`;
    const bars = rows.map((row, place) => {
      const y = place * step + lift + 4, middle = y + 9;
      return [
        sv("text", { x: narrow() ? 0 : left - 10, y: narrow() ? y - 5 : middle + 4, "text-anchor": narrow() ? "start" : "end" }, row.label),
        sv("rect", { x: left, y, width: Math.max(0, x(row.speedup) - left), height: 18, rx: 3, fill: colour(row.index),
          "data-tip": `${row.label}\n${interval(row)} times plain\n${number(row.tokens_per_second, 1)} tokens/s, ${number(row.tokens_per_pass, 2)} tokens per pass` }),
        spread(row) && sv("line", { x1: x(row.speedup_low), x2: x(row.speedup_high), y1: middle, y2: middle, stroke: "var(--ink)", "stroke-width": 1.5 }),
        (spread(row) ? [row.speedup_low, row.speedup_high] : []).map((end) =>
          sv("line", { x1: x(end), x2: x(end), y1: middle - 4, y2: middle + 4, stroke: "var(--ink)", "stroke-width": 1.5 })),
        sv("text", { x: width, y: middle + 4, "text-anchor": "end" },
          `${number(row.speedup, 2)}×  ${number(row.tokens_per_second, 0)} tokens/s`),
      ];
    });
    const one = sv("line", { class: "base", x1: x(1), x2: x(1), y1: 0, y2: height - 22 });
    return drawing(width, height, label, one, bars,
      sv("text", { class: "soft", x: x(1), y: height - 6, "text-anchor": "middle" }, "plain decoding"));
  });
}

// Speed-up by category: one line of marks each.
function categoryPlot(rows) {
  const categories = [...new Set(rows.map((row) => row.category))];
  return plot((width) => {
    const left = narrow() ? 4 : 150, right = width - 12, methods = new Set(rows.map((row) => row.index)).size;
    const inner = 7 * methods + 8, step = inner + (narrow() ? 18 : 4), bottom = categories.length * step + 6;
    const ends = rows.flatMap((row) => [row.speedup_high, row.speedup_low, row.speedup]).filter((value) => value);
    const low = Math.max(0, Math.min(0.9, ...ends) - 0.1), high = Math.max(1.2, ...ends) + 0.05;
    const x = linear(low, high, left, right);
    const order = [...new Set(rows.map((row) => row.index))];
    const lines = categories.map((category, place) => {
      const top = place * step + (narrow() ? 18 : 4);
      return [
        sv("text", { x: narrow() ? 0 : left - 12, y: narrow() ? top - 4 : top + inner / 2 + 2, "text-anchor": narrow() ? "start" : "end" },
          words(category)),
        sv("line", { class: "grid", x1: left, x2: right, y1: top + inner, y2: top + inner }),
        rows.filter((row) => row.category === category && row.speedup !== null).map((row) => {
          const y = top + 7 * order.indexOf(row.index) + 7;
          return [
            spread(row) && sv("line", { x1: x(row.speedup_low), x2: x(row.speedup_high), y1: y, y2: y, stroke: colour(row.index), "stroke-width": 2, opacity: 0.55 }),
            mark(row.index, x(row.speedup), y, `${words(category)}: ${row.label}\n${interval(row)} times plain\n` +
              `${number(row.tokens_per_pass, 2)} tokens per pass, ${row.prompts} prompts`),
          ];
        }),
      ];
    });
    const label = "Speed-up over plain decoding by category; the same figures are in the table below";
    return drawing(width, bottom + 24, label, axisX(x, ticks(low, high, narrow() ? 4 : 8), 0, bottom, (value) => `${+value.toFixed(2)}×`),
      sv("line", { class: "base", x1: x(1), x2: x(1), y1: 0, y2: bottom }), lines);
  });
}

// Of the passes that got as far as depth i, how many went one token further.
function acceptancePlot(rows) {
  return plot((width) => {
    const left = 40, right = width - 14, top = 12, bottom = 240;
    // A place that hardly any pass reached says nothing about the method.
    const reach = (row) => row.acceptance.map((_, depth) =>
      Object.entries(row.emitted).reduce((sum, [tokens, times]) => sum + (tokens > depth ? times : 0), 0));
    const places = (row) => Math.min(16, reach(row).filter((times, depth) => depth === 0 || times >= 5).length);
    const deepest = Math.max(2, ...rows.map(places));
    const x = linear(1, deepest, left + 10, right - 6), y = linear(0, 1, bottom, top);
    const curves = rows.map((row) => {
      const values = row.acceptance.slice(0, places(row)), reached = reach(row);
      return [
        sv("path", { d: values.map((value, depth) => `${depth ? "L" : "M"}${x(depth + 1)},${y(value)}`).join(""), fill: "none",
          stroke: colour(row.index), "stroke-width": 2, opacity: 0.7 }),
        values.map((value, depth) => mark(row.index, x(depth + 1), y(value), `${row.label}, drafted token ${depth + 1}\naccepted in ` +
          `${percent(value)} of the ${reached[depth]} passes that got there`, 0.8 + 0.5 * Math.sqrt(reached[depth] / reached[0]))),
      ];
    });
    const label = "Share of drafted tokens accepted, by depth. " +
      rows.map((row) => `${row.label}: ${row.acceptance.slice(0, 4).map(percent).join(", ")}`).join("; ");
    return drawing(width, bottom + 40, label, axisY(y, [0, 0.25, 0.5, 0.75, 1], left, right, (value) => `${100 * value}`),
      ticks(1, deepest, 8).filter(Number.isInteger).map((depth) =>
        sv("text", { class: "soft", x: x(depth), y: bottom + 16, "text-anchor": "middle" }, String(depth))),
      sv("text", { class: "soft", x: (left + right) / 2, y: bottom + 34, "text-anchor": "middle" }, "place in the draft"), curves);
  });
}

// Milliseconds by rows: curves are [{label, index, points: [[rows, ms]]}], dots [{label, index, rows, ms, tip}].
function costPlot(curves, dots) {
  return plot((width) => {
    const left = 44, right = width - 14, top = 12, bottom = 240;
    const all = curves.flatMap((curve) => curve.points);
    const most = Math.max(...all.map(([rows]) => rows)), high = Math.max(...all.map(([, ms]) => ms), ...dots.map((dot) => dot.ms)) * 1.06;
    // Rows double from tick to tick: most passes have few.
    const x = linear(0, Math.log2(most), left + 8, right - 6), y = linear(0, high, bottom, top);
    const place = (rows) => x(Math.log2(Math.max(1, rows)));
    const powers = [1, 2, 4, 8, 16, 32, 64, 128].filter((rows) => rows <= most);
    const lines = curves.map((curve) => [
      sv("path", { d: curve.points.map(([rows, ms], i) => `${i ? "L" : "M"}${place(rows)},${y(ms)}`).join(""), fill: "none",
        stroke: curve.index === null ? "var(--soft)" : colour(curve.index), "stroke-width": 2 }),
      curve.points.map(([rows, ms]) => sv("circle", { cx: place(rows), cy: y(ms), r: 3,
        fill: curve.index === null ? "var(--soft)" : colour(curve.index),
        "data-tip": `${curve.label}: ${rows} rows\n${ms.toFixed(2)} ms, ${(ms / curve.points[0][1]).toFixed(2)} times one row` })),
    ]);
    const label = `Time of a pass by its number of rows. ${curves.map((curve) =>
      `${curve.label}: ${curve.points.map(([rows, ms]) => `${rows} rows ${ms.toFixed(1)} ms`).join(", ")}`).join("; ")}`;
    return drawing(width, bottom + 40, label, axisY(y, ticks(0, high, 5), left, right, (value) => String(value)),
      powers.map((rows) => sv("text", { class: "soft", x: place(rows), y: bottom + 16, "text-anchor": "middle" }, String(rows))),
      sv("text", { class: "soft", x: (left + right) / 2, y: bottom + 34, "text-anchor": "middle" }, "rows in a pass"), lines,
      dots.map((dot) => mark(dot.index, place(dot.rows), y(dot.ms), dot.tip, 1.5)));
  });
}

// Where the time of decoding goes.
const PARTS = { propose: "--m2", score: "--m1", choose: "--m4", commit: "--m3" };
function sharePlot(rows) {
  return plot((width) => {
    const step = narrow() ? 42 : 30, left = narrow() ? 0 : gutter(rows.map((row) => row.label), width), lift = narrow() ? 18 : 0, x = linear(0, 1, left, width - 4);
    const bars = rows.map((row, place) => {
      const y = place * step + lift;
      let from = 0;
      return [
        sv("text", { x: narrow() ? 0 : left - 10, y: narrow() ? y - 5 : y + 13, "text-anchor": narrow() ? "start" : "end" }, row.label),
        Object.entries(PARTS).map(([part, paint]) => {
          const share = row.share[part], bar = sv("rect", { x: x(from), y, width: Math.max(0, x(from + share) - x(from) - 0.5), height: 18,
            fill: `var(${paint})`, "data-tip": `${row.label}: ${part} ${percent(share)}` });
          from += share;
          return bar;
        }),
      ];
    });
    const label = `Share of decoding time. ${rows.map((row) => `${row.label}: ${Object.keys(PARTS).map((part) =>
      `${part} ${percent(row.share[part])}`).join(", ")}`).join("; ")}`;
    return drawing(width, rows.length * step + lift, label, bars);
  });
}
const partLegend = () => el("ul", { class: "legend" }, Object.entries(PARTS).map(([part, paint]) =>
  el("li", {}, sv("svg", { viewBox: "0 0 12 12", "aria-hidden": "true" }, sv("rect", { width: 12, height: 12, rx: 2, fill: `var(${paint})` })), part)));
