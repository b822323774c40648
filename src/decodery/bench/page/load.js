// Servers under load: what arrives, what is answered in time, and how long readers wait.
const UNITS = { concurrency: "clients at once", rate: "arrivals per second", speed: "times the trace's own speed" };

// Curves over the load: series are [{label, index, dashed, points: [[load, value, tip]]}]; log: of the vertical axis.
function loadPlot(series, { label, across, log, same }) {
  return plot((width) => {
    const left = 52, right = width - 14, top = 12, bottom = 240;
    const points = series.flatMap((each) => each.points), loads = [...new Set(points.map(([load]) => load))].sort((a, b) => a - b);
    const most = Math.max(...points.map(([, value]) => value)) * 1.08 || 1, least = Math.min(...points.map(([, value]) => value).filter((value) => value > 0), most);
    const turn = log ? (value) => Math.log10(Math.max(value, least)) : (value) => value;
    const x = linear(Math.log2(loads[0]), Math.log2(loads[loads.length - 1]), left + 8, right - 8);
    const y = linear(log ? Math.log10(least / 1.2) : 0, turn(most), bottom, top), place = (load) => x(Math.log2(load));
    const decades = log ? ticksOfDecades(least / 1.2, most) : ticks(0, most, 5);
    const shown = loads.reduce((found, load) => (found.length && place(load) - place(found[found.length - 1]) < 44 ? found : [...found, load]), []);
    const lines = series.map((each) => [
      sv("path", { d: each.points.map(([load, value], i) => `${i ? "L" : "M"}${place(load)},${y(turn(value))}`).join(""), fill: "none",
        stroke: colour(each.index), "stroke-width": 2, "stroke-dasharray": each.dashed ? "5 4" : null }),
      each.points.map(([load, value, tip]) => mark(each.index, place(load), y(turn(value)), tip, each.dashed ? 0.8 : 1)),
    ]);
    const asked = same ? sv("path", { class: "base", fill: "none",
      d: loads.filter((load) => load <= most).map((load, i) => `${i ? "L" : "M"}${place(load)},${y(load)}`).join("") }) : null;
    const told = `${label}. ${series.map((each) => `${each.label}: ${each.points.map(([load, value]) => `${+load.toFixed(2)}: ${+value.toPrecision(3)}`).join(", ")}`).join("; ")}`;
    return drawing(width, bottom + 40, told, axisY((value) => y(turn(value)), decades, left, right, (value) => String(+value.toPrecision(3))),
      shown.map((load) => sv("text", { class: "soft", x: place(load), y: bottom + 16, "text-anchor": "middle" }, String(+load.toPrecision(3)))),
      sv("text", { class: "soft", x: (left + right) / 2, y: bottom + 34, "text-anchor": "middle" }, across), asked, lines);
  });
}

// 1, 2 and 5 of every power of ten in between.
function ticksOfDecades(low, high) {
  const found = [];
  for (let power = Math.floor(Math.log10(low)); power <= Math.log10(high); power += 1) {
    found.push(...[1, 2, 5].map((factor) => factor * 10 ** power));
  }
  return found.filter((value) => value >= low && value <= high);
}

const seconds = (found, digits, unit = 1) => (found ? ["p50", "p90", "p99"].map((name) => number(unit * found[name], digits)).join(" / ") : "–");

function loadTip(row) {
  return `${row.server}, ${+row.load.toFixed(2)} ${UNITS[row.mode]}\n${row.good} of ${row.requests} good${row.errors ? `, ${row.errors} failed` : ""}\n` +
    `${number(row.tokens_per_second, 0)} tokens/s\nfirst token ${seconds(row.first_token, 2)} s\nbetween pieces ${seconds(row.gap, 0, 1000)} ms`;
}

// Solid: the middle one; dashed: the 99th percentile.
function spreadSeries(servers, rows, name, unit) {
  return servers.flatMap((server, index) => ["p50", "p99"].map((percentile) => ({
    label: `${server}, ${percentile}`, index: index + 1, dashed: percentile === "p99",
    points: rows.filter((row) => row.server === server && row[name]).map((row) => [row.load, unit * row[name][percentile], loadTip(row)]),
  }))).filter((each) => each.points.length);
}

function loadSections(servers, mode) {
  const rows = result.rows.filter((row) => row.mode === mode);
  if (!rows.length) return [];
  const key = () => legend(servers, servers.map((_, index) => index + 1)), across = UNITS[mode];
  const series = (name) => servers.map((server, index) => ({ label: server, index: index + 1,
    points: rows.filter((row) => row.server === server).map((row) => [row.load, row[name], loadTip(row)]) })).filter((each) => each.points.length);
  const section = (title, note, drawn) => el("section", {}, el("h2", {}, title), el("p", { class: "note" }, note), key(), drawn);
  const waits = [
    section("Seconds to the first token", "Solid: the middle one. Dashed: the 99th percentile.",
      loadPlot(spreadSeries(servers, rows, "first_token", 1), { label: "Seconds to the first token", across, log: true })),
    section("Between pieces of text, ms", "Solid: the middle one. Dashed: the 99th percentile.",
      loadPlot(spreadSeries(servers, rows, "gap", 1000), { label: "Milliseconds between pieces of text", across, log: true })),
  ];
  const rates = mode === "rate"
    ? section("Good answers per second", `Within ${result.settings.first_token_limit} s to the first token and ${result.settings.gap_limit} s per token; dotted: as many as arrive.`,
      loadPlot(series("goodput"), { label: "Good answers per second", across, same: true }))
    : section("Good answers, share of all", "Within the limits for the first token and for every token.", loadPlot(series("good_share"), { label: "Share of good answers", across }));
  return [el("h2", { class: "part" }, `By ${across}`),
    el("div", { class: "pair" }, rates,
      section("Tokens per second", "Of all answers together.", loadPlot(series("tokens_per_second"), { label: "Tokens per second", across }))),
    el("div", { class: "pair" }, waits)];
}

function loadTable() {
  const head = ["server", "load", "good", "failed", "requests/s", "good/s", "tokens/s", "first token, s (50/90/99 %)", "between pieces, ms", "per token, ms", "whole, s"];
  const line = (row) => [row.server, `${+row.load.toFixed(3)} ${UNITS[row.mode]}`, `${row.good} of ${row.requests}`, row.errors, number(row.requests_per_second, 2),
    number(row.goodput, 2), number(row.tokens_per_second, 0), seconds(row.first_token, 2), seconds(row.gap, 0, 1000), seconds(row.per_token, 0, 1000), seconds(row.whole, 1)];
  return el("div", { class: "table", tabindex: "0", role: "region", "aria-label": "All figures" }, el("table", {},
    el("thead", {}, el("tr", {}, head.map((name, place) => el("th", { scope: "col", class: place < 2 ? "left" : null }, name)))),
    el("tbody", {}, result.rows.map((row) => el("tr", {}, line(row).map((value, place) => el("td", { class: place < 2 ? "left" : null }, String(value))))))));
}

function loadVerdict(servers) {
  return servers.map((server) => {
    const rows = result.rows.filter((row) => row.server === server);
    const kept = rows.filter((row) => row.mode !== "concurrency" && row.good_share >= 0.9).map((row) => row.load);
    const fast = rows.filter((row) => row.mode === "concurrency").sort((a, b) => a.load - b.load);
    const said = [];
    if (kept.length) said.push(`kept nine answers of ten within the limits up to ${+Math.max(...kept).toFixed(2)} ${UNITS[rows.find((row) => row.mode !== "concurrency").mode]}`);
    if (fast.length > 1) {
      const [one, many] = [fast[0], fast[fast.length - 1]];
      said.push(`wrote ${number(many.tokens_per_second, 0)} tokens/s for ${many.load} clients, ${number(many.tokens_per_second / one.tokens_per_second, 2)} times as many as for ${one.load}`);
    }
    return said.length ? el("p", { class: "lead" }, `${server} ${said.join("; it ")}.`) : null;
  });
}

function loadPage() {
  const servers = [...new Set(result.rows.map((row) => row.server))], settings = result.settings;
  const notes = [...(result.complete ? [] : ["This run was interrupted: the figures cover the stages that were done."]), ...result.notes];
  document.getElementById("page").replaceChildren(
    el("h1", {}, `Serving ${result.model.name}`),
    el("p", { class: "soft" }, `${settings.trace || settings.workload}, ${count(Math.max(0, ...result.rows.map((row) => row.requests)), "request")} per stage, at most ${settings.max_new_tokens} tokens; ` +
      `clients on ${result.machine.processor}; ${result.created.slice(0, 10)}`),
    ...notes.map((note) => el("p", { class: "warn" }, note)),
    ...loadVerdict(servers).filter((node) => node),
    ...["rate", "speed", "concurrency"].flatMap((mode) => loadSections(servers, mode)),
    el("section", {}, el("h2", {}, "All figures"), loadTable()),
    el("div", { class: "pair" }, details("Machine", result.machine), details("Settings", settings)));
  drawAll();
}
