// Monitors: how well each tells what is to be flagged, with intervals, and what acting on it did.
const between = (row) => `${number(row.auroc, 2)} (${number(row.low, 2)} to ${number(row.high, 2)})`;
const isBaseline = (row) => !/^(sae|los|factcheckmate|truthprint|sequential|program-probe|context-awareness|neurofeedback|codebook)/.test(row.monitor) || /shuffled/.test(row.monitor);

// From the lowest to the highest that the first seed's interval and all seeds reach.
const reach = (row) => [Math.min(row.low, ...row.by_seed), Math.max(row.high, ...row.by_seed)];

// The area under the curve of every monitor of a testbed: a mark for the mean over seeds, a line for their reach.
function detectionPlot(rows) {
  return plot((width) => {
    const step = narrow() ? 38 : 26, left = narrow() ? 14 : gutter(rows.map((row) => row.monitor), width), right = width - 64, lift = narrow() ? 14 : 0;
    const low = Math.min(0.4, ...rows.map((row) => reach(row)[0])), x = linear(low, 1, left, right), bottom = rows.length * step + 4;
    const lines = rows.map((row, place) => {
      const middle = place * step + lift + 14, index = isBaseline(row) ? 0 : 1, [from, to] = reach(row);
      return [
        sv("text", { x: narrow() ? 0 : left - 10, y: narrow() ? middle - 10 : middle + 4, "text-anchor": narrow() ? "start" : "end" }, row.monitor),
        sv("line", { x1: x(from), x2: x(to), y1: middle, y2: middle, stroke: colour(index), "stroke-width": 2, opacity: 0.55 }),
        mark(index, x(row.auroc), middle, `${row.monitor}\n${between(row)}\nwithin strata ${number(row.within, 2)}`),
        sv("text", { x: width, y: middle + 4, "text-anchor": "end" }, number(row.auroc, 2)),
      ];
    });
    return drawing(width, bottom + 24, `Area under the curve. ${rows.map((row) => `${row.monitor}: ${between(row)}`).join("; ")}`,
      axisX(x, ticks(low, 1, narrow() ? 4 : 7), 0, bottom, (value) => `${+value.toFixed(2)}`),
      sv("line", { class: "base", x1: x(0.5), x2: x(0.5), y1: 0, y2: bottom }), lines);
  });
}

function plainTable(label, head, lines, left) {
  return el("div", { class: "table", tabindex: "0", role: "region", "aria-label": label }, el("table", {},
    el("thead", {}, el("tr", {}, head.map((name, place) => el("th", { scope: "col", class: place < left ? "left" : null }, name)))),
    el("tbody", {}, lines.map((line) => el("tr", {}, line.map((value, place) => el("td", { class: place < left ? "left" : null }, value === null || value === undefined ? "–" : String(value))))))));
}

function monitorsPage() {
  const beds = [...new Set([...result.rows, ...result.acts].map((row) => row.testbed))];
  const head = ["monitor", "AUROC (first seed's 95 %)", "within strata", "average precision", "caught at 5 % false", "calibration error", "base rate", "flagged of harmless", "of wanted"];
  const figure = (value) => (value === null || value === undefined ? "–" : number(value, 3));
  const line = (row) => [row.monitor, between(row), ...[row.within, row.precision, row.caught, row.error, row.base, row.false, row.flagged].map(figure)];
  const sections = beds.flatMap((bed) => {
    const rows = result.rows.filter((row) => row.testbed === bed), acts = result.acts.filter((act) => act.testbed === bed);
    const columns = acts.length ? Object.keys(acts[0]).filter((name) => name !== "testbed") : [];
    return [
      el("h2", { class: "part" }, words(bed)),
      rows.length ? el("section", {}, el("h2", {}, "How well it is told (AUROC)"), detectionPlot(rows.filter((row) => row.auroc !== null)), plainTable(`Detection, ${bed}`, head, rows.map(line), 1)) : null,
      acts.length ? el("section", {}, el("h2", {}, "What acting does"), plainTable(`Acting, ${bed}`, columns, acts.map((act) => columns.map((name) => act[name])), 1)) : null,
    ];
  }).filter((node) => node);
  document.getElementById("page").replaceChildren(
    el("h1", {}, `Monitors of ${result.model.name}`),
    el("p", { class: "soft" }, `${count(result.settings.rounds, "seed")} of split and training, tested on what nothing was learned from; ${result.created.slice(0, 10)}`),
    ...(result.complete ? [] : [el("p", { class: "warn" }, "This run was interrupted: the testbeds that were done are shown.")]),
    ...sections,
    ...result.notes.map((note) => el("p", { class: "note" }, note)),
    el("div", { class: "pair" }, details("Machine", result.machine), details("Settings", result.settings)));
  drawAll();
}

PAGES.monitors = monitorsPage;
