// Searches on puzzles: accuracy against what was spent for it, by the quality of the reward model.
const SPENT = { tokens: ["Accuracy against tokens", "tokens sampled for a puzzle, those thrown away included"],
  scorer_calls: ["Accuracy against scorer calls", "texts and beginnings scored for a puzzle"],
  depth: ["Accuracy against depth", "passes that follow one another"] };

// A search without the settings that all of them have.
function brief(method) {
  return method.replace(/(scorer=\{scorer\}|delimiter=\{delimiter\}|pattern=\{pattern\}),?/g, "").replace(/,\)/, ")");
}

function searchTip(row) {
  return `${row.method}${row.reward ? `, ${row.reward}` : ""}, n = ${row.n}\n${(100 * row.accuracy).toFixed(1)} % (${(100 * row.low).toFixed(1)} to ${(100 * row.high).toFixed(1)})\n` +
    `${number(row.tokens, 0)} tokens, ${number(row.scorer_calls, 1)} scorer calls, depth ${number(row.depth, 0)}`;
}

function searchSections(reward, methods) {
  const shown = result.rows.filter((row) => (row.reward === reward || !row.reward) && row.method !== "greedy");
  return Object.entries(SPENT).map(([cost, [title, across]]) => {
    const rows = shown.filter((row) => row[cost] > 0), names = methods.filter((name) => rows.some((row) => row.method === name));
    if (!names.length) return null;
    const series = names.map((name) => ({ label: brief(name), index: methods.indexOf(name) + 1,
      points: rows.filter((row) => row.method === name).sort((a, b) => a[cost] - b[cost]).map((row) => [row[cost], row.accuracy, searchTip(row)]) }));
    return el("section", {}, el("h2", {}, title), legend(names.map(brief), names.map((name) => methods.indexOf(name) + 1)),
      loadPlot(series, { label: `${title}, reward ${reward}`, across }));
  }).filter((node) => node);
}

function searchTable() {
  const head = ["method", "reward", "n", "accuracy (95 %)", "over one sample (95 %)", "over best-of-n at equal tokens (95 %)", "tokens", "scorer calls", "depth", "puzzles"];
  const line = (row) => [row.method, row.reward || "–", row.n, `${row.accuracy.toFixed(3)} (${row.low.toFixed(3)}–${row.high.toFixed(3)})`,
    `${row.gain.toFixed(3)} (${row.gain_low.toFixed(3)} to ${row.gain_high.toFixed(3)})`,
    row.even === undefined ? "–" : `${row.even.toFixed(3)} (${row.even_low.toFixed(3)} to ${row.even_high.toFixed(3)})`, number(row.tokens, 0), number(row.scorer_calls, 1), number(row.depth, 0), row.puzzles];
  return el("div", { class: "table", tabindex: "0", role: "region", "aria-label": "All figures" }, el("table", {},
    el("thead", {}, el("tr", {}, head.map((name, place) => el("th", { scope: "col", class: place < 2 ? "left" : null }, name)))),
    el("tbody", {}, result.rows.map((row) => el("tr", {}, line(row).map((value, place) => el("td", { class: place < 2 ? "left" : null }, String(value))))))));
}

function searchPage() {
  const settings = result.settings, methods = [...new Set(result.rows.map((row) => row.method))].filter((name) => name !== "greedy");
  const rewards = [...new Set(result.rows.map((row) => row.reward))].filter((name) => name), greedy = result.rows.find((row) => row.method === "greedy");
  document.getElementById("page").replaceChildren(
    el("h1", {}, `Searches with ${result.model.name}`),
    el("p", { class: "soft" }, `${settings.puzzle}, ${count(Math.max(0, ...result.rows.map((row) => row.puzzles)), "puzzle")}, temperature ${settings.temperature}; ${result.created.slice(0, 10)}`),
    ...(result.complete ? [] : [el("p", { class: "warn" }, "This run was interrupted: the figures cover the puzzles that were done.")]),
    ...(greedy ? [el("p", { class: "lead" }, `Greedy decoding is right in ${(100 * greedy.accuracy).toFixed(1)} % of puzzles.`)] : []),
    ...(rewards.length ? rewards : [""]).flatMap((reward) => [el("h2", { class: "part" }, reward ? `Reward model: ${reward}` : "Without a reward model"),
      el("div", { class: "pair" }, searchSections(reward, methods))]),
    el("section", {}, el("h2", {}, "All figures"), searchTable()),
    el("div", { class: "pair" }, details("Machine", result.machine), details("Settings", settings)));
  drawAll();
}

PAGES.search = searchPage;
