// Puts the page together: a benchmark of methods, the costs of passes, servers under load.
function details(title, values) {
  const show = (value) => (Array.isArray(value) ? value.join(", ") || "none" : value === null || value === "" ? "–" : String(value));
  return el("section", {}, el("h2", {}, title),
    el("dl", {}, Object.entries(values).filter(([, value]) => typeof value !== "object" || value === null || Array.isArray(value))
      .map(([name, value]) => [el("dt", {}, words(name)), el("dd", {}, show(value))])));
}

function table(rows) {
  // As few columns as fit a laptop's screen: what belongs together shares one.
  const told = rows.some((row) => row.right !== undefined);
  const right = (row) => (row.right === undefined ? "–" : `${row.right} of ${row.answered} (${number(100 * row.right_low, 0)} to ${number(100 * row.right_high, 0)} %)`);
  const head = ["category", "method", "speed-up (95 %)", "tokens/s", "tokens per pass", "rows per token", "propose / score / choose / commit, %",
    "prompts", "tokens", "identical (excused)", "precision", ...(told ? ["right (95 %)"] : []), "note"];
  const left = new Set(["category", "method", "precision"]);
  const shares = (row) => (row.share.score === null ? "–" : ["propose", "score", "choose", "commit"].map((part) => number(100 * row.share[part], 0)).join(" / "));
  const same = ({ checked, identical, excused }) => (checked ? `${identical} of ${checked}${excused ? ` (+ ${excused})` : ""}` : "–");
  const line = (row) => [words(row.category), row.label, interval(row), number(row.tokens_per_second, 1), number(row.tokens_per_pass, 2),
    number(row.rows_per_token, 2), shares(row), row.prompts, row.new_tokens ?? "–", same(row.lossless), row.dtype || "–", ...(told ? [right(row)] : []), row.note];
  return el("div", { class: "table", tabindex: "0", role: "region", "aria-label": "All figures" }, el("table", {},
    el("thead", {}, el("tr", {}, head.map((name) => el("th", { scope: "col", class: left.has(name) || name === "note" ? "left" : null }, name)))),
    el("tbody", {}, rows.map((row) => el("tr", { class: row.category === "all" ? "all" : null },
      line(row).map((value, place) => el("td", { class: head[place] === "note" ? "wide" : left.has(head[place]) ? "left" : null }, String(value))))))));
}

function verdict(rows) {
  const own = rows.filter((row) => row.share.score !== null && row.speedup !== null && row.method !== "none");
  const best = own.sort((a, b) => b.speedup - a.speedup)[0];
  if (!best) return el("p", { class: "lead" }, "Plain decoding alone was measured.");
  // Options of a request may well change the text; a drafter may not.
  const requests = result.settings.requests || [];
  const compared = rows.filter((row) => row.share.score !== null && !requests.includes(row.method.replace(" (cold)", "")));
  const [checked, same, excused] = ["checked", "identical", "excused"].map((name) => compared.reduce((sum, row) => sum + row.lossless[name], 0));
  const differ = checked - same - excused;
  const wrote = differ ? `${differ} of ${checked} outputs were not what plain decoding wrote.`
    : `All ${checked} outputs compared were what plain decoding wrote${excused ? `, ${excused} of them up to a rounded near-tie` : ""}.`;
  const range = spread(best) ? ` (95 % interval ${number(best.speedup_low, 2)} to ${number(best.speedup_high, 2)})` : "";
  return el("p", { class: "lead" }, `${best.label} decoded ${number(best.speedup, 2)} times as fast as plain decoding${range}. `, el("span", { class: differ ? "warn" : null }, wrote));
}

// A method is named with its precision where that is not the model's.
function labelled(rows) {
  const names = [...new Set(rows.map((row) => row.method))];
  return rows.map((row) => {
    const label = row.dtype && row.dtype !== result.model.dtype ? `${row.method} (${row.dtype})` : row.method;
    return { ...row, label, index: names.indexOf(row.method) };
  });
}

function workloadView(rows) {
  const all = rows.filter((row) => row.category === "all"), measured = all.filter((row) => row.speedup !== null);
  const categories = rows.filter((row) => row.category !== "all" && row.speedup !== null);
  const drafting = measured.filter((row) => (row.acceptance || []).length), own = measured.filter((row) => row.share.score !== null);
  const curve = result.cost_curve.rows.map((count, place) => [count, 1e3 * result.cost_curve.seconds[place]]);
  const dots = own.filter((row) => row.rows_per_token !== null).map((row) => {
    const rowsPerPass = row.rows_per_token * row.tokens_per_pass, seconds = (row.tokens_per_pass / row.tokens_per_second) * row.share.score;
    return { ...row, rows: rowsPerPass, ms: 1e3 * seconds, tip: `${row.label}: ${rowsPerPass.toFixed(1)} rows in a pass\n` +
      `${(1e3 * seconds).toFixed(2)} ms scoring, ${number(row.tokens_per_pass, 2)} tokens` };
  });
  const others = measured.filter((row) => row.method !== "none");
  const key = (list) => legend(list.map((row) => row.label), list.map((row) => row.index));
  return [
    verdict(all),
    el("section", {}, el("h2", {}, "Speed-up over plain decoding"),
      el("p", { class: "note" }, "Decoding alone, the prompt's pass left out, on the same prompts in the same run; lines are 95 % intervals, drawn from five prompts on."),
      overallPlot(measured)),
    categories.length > 1 ? el("section", {}, el("h2", {}, "Speed-up by category"), key(others),
      categoryPlot(categories.filter((row) => row.method !== "none"))) : null,
    el("div", { class: "pair" },
      drafting.length ? el("section", {}, el("h2", {}, "Acceptance by depth, %"),
        el("p", { class: "note" }, "Of the passes that got as far, the share that kept one more token."), key(drafting), acceptancePlot(drafting)) : null,
      el("section", {}, el("h2", {}, "What a pass costs, ms"),
        el("p", { class: "note" }, `The line is the shortest time of single passes after ${result.cost_curve.context || 128} tokens. Marks are the methods, at their mean ` +
          "rows and time: they lie above it by longer texts, and by whatever else the machine had to do."), key(own),
        costPlot([{ label: "pass", index: null, points: curve }], dots))),
    own.length ? el("section", {}, el("h2", {}, "Where the time goes"), partLegend(), sharePlot(own)) : null,
  ];
}

function benchmarkPage() {
  const sets = [...new Set(result.rows.map((row) => `${row.workload}, ${row.split}`))];
  const rows = labelled(result.rows), of = (set) => rows.filter((row) => `${row.workload}, ${row.split}` === set);
  const view = el("div"), figures = el("div");
  const chosen = el("select", { "aria-label": "Workload" }, sets.map((set) => el("option", { value: set }, set)));
  const draw = () => {
    plots.length = 0;
    view.replaceChildren(...workloadView(of(chosen.value)).filter((node) => node));
    figures.replaceChildren(table(of(chosen.value)));
    drawAll();
  };
  chosen.addEventListener("change", draw);
  const recorded = result.generations.filter((each) => each.timeline);
  const notes = [...(result.complete ? [] : ["This run was interrupted: the figures cover what was measured until then."]), ...result.notes];
  document.getElementById("page").replaceChildren(
    el("h1", {}, `Decoding ${result.model.name}`),
    el("p", { class: "soft" }, `${result.model.precision}, ${result.machine.processor}, ${count(result.machine.threads, "thread")}; ` +
      `temperature ${result.settings.temperature}, at most ${result.settings.max_new_tokens} tokens, ${count(result.settings.rounds, "round")}; ${result.created.slice(0, 10)}`),
    ...notes.map((note) => el("p", { class: "warn" }, note)),
    sets.length > 1 ? el("div", { class: "controls" }, el("label", {}, "Workload ", chosen)) : "",
    view,
    recorded.length ? timelineSection(recorded) : "",
    el("section", {}, el("h2", {}, "All figures"), figures),
    el("div", { class: "pair" }, details("Machine", result.machine), details("Settings", result.settings)));
  draw();
}

function passesPage() {
  const kinds = [...new Set(result.rows.map((row) => row.precision))];
  const curves = kinds.map((kind, place) => ({ label: kind, index: place + 1,
    points: result.rows.filter((row) => row.precision === kind).map((row) => [row.rows, row.ms]) }));
  const head = ["precision", "rows", "ms", "GB/s", "of the read bandwidth", "times one row"];
  document.getElementById("page").replaceChildren(
    el("h1", {}, `A forward pass of ${result.model.name}`),
    el("p", { class: "soft" }, `${result.machine.processor}, ${count(result.machine.threads, "thread")}; memory is read at ` +
      `${number(result.read_gb_per_s, 1)} GB/s; ${result.context} tokens in the cache; ${result.created.slice(0, 10)}`),
    el("section", {}, el("h2", {}, "Time of a pass, ms"), legend(kinds, curves.map((curve) => curve.index)), costPlot(curves, [])),
    el("section", {}, el("h2", {}, "All figures"), el("div", { class: "table" }, el("table", {},
      el("thead", {}, el("tr", {}, head.map((name) => el("th", { scope: "col" }, name)))),
      el("tbody", {}, result.rows.map((row) => el("tr", {}, [row.precision, row.rows, number(row.ms, 2), number(row.gb_per_s, 1),
        percent(row.bandwidth_share), number(row.ratio_to_one, 2)].map((value) => el("td", {}, String(value))))))))),
    details("Machine", result.machine));
  drawAll();
}

PAGES.passes = passesPage;
PAGES.load = loadPage;
(PAGES[result.kind] || benchmarkPage)();
