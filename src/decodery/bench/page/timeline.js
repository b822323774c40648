// One generation, pass by pass: a column each, with what became text at the bottom and what was thrown away above.
const MOST_LOST = 20;
const shown = (text) => JSON.stringify(text).slice(1, -1);

// The cells of a pass, bottom up: {kind, text}.
function cells(pass) {
  const accepted = new Set(pass.accepted);
  const kept = pass.accepted.map((node) => ({ kind: "kept", text: pass.tokens[node - 1] }));
  const bonus = pass.bonus === "" ? [] : [{ kind: "bonus", text: pass.bonus }];
  const lost = pass.tokens.map((text, place) => ({ kind: "lost", text, node: place + 1 })).filter((cell) => !accepted.has(cell.node));
  return [...kept, ...bonus, ...lost];
}

function timelineView(generation) {
  const passes = generation.timeline.passes, columns = passes.map(cells);
  const says = { kept: "drafted and accepted", bonus: "the model's own", lost: "drafted and rejected", first: "from reading the prompt" };
  const tip = (cell, place) => `${shown(cell.text)}\n${says[cell.kind]}, pass ${place + 1} of ${passes.length}`;
  const size = 12, gap = 2, tallest = Math.min(MOST_LOST, Math.max(1, ...columns.map((column) => column.length)));
  const height = tallest * (size + gap) + 22;
  const text = el("div", { class: "text", tabindex: "0", role: "region", "aria-label": "The text, with each token marked by where it came from" },
    el("span", { class: "first", "data-tip": `${shown(generation.timeline.first)}\n${says.first}` }, generation.timeline.first),
    columns.map((column, place) => column.filter((cell) => cell.kind !== "lost").map((cell) =>
      el("span", { class: cell.kind, "data-pass": place, "data-tip": tip(cell, place) }, cell.text))));
  const width = Math.max(40, columns.length * (size + gap) + 8);
  const drafted = passes.reduce((sum, pass) => sum + pass.tokens.length, 0), kept = passes.reduce((sum, pass) => sum + pass.accepted.length, 0);
  const label = `${passes.length} ${passes.length === 1 ? "pass" : "passes"}, ${count(drafted, "token")} drafted, ${kept} of them accepted`;
  const grid = drawing(width, height, label, columns.map((column, place) => column.slice(0, tallest).map((cell, depth) =>
    sv("rect", { class: `cell ${cell.kind}`, x: 4 + place * (size + gap), y: height - 20 - (depth + 1) * (size + gap), width: size,
      height: size, rx: 2, "data-pass": place, "data-tip": tip(cell, place) }))),
    columns.map((_, place) => (place + 1) % 10 ? null :
      sv("text", { class: "soft", x: 4 + place * (size + gap) + size / 2, y: height - 4, "text-anchor": "middle" }, String(place + 1))));
  const view = el("div", {}, el("p", { class: "note" }, `${label}.`),
    el("div", { class: "plot", tabindex: "0", role: "region", "aria-label": "Passes from left to right" }, grid), text);
  view.addEventListener("pointerover", (event) => {
    const pass = event.target.closest("[data-pass]")?.getAttribute("data-pass");
    for (const node of view.querySelectorAll("[data-pass]")) node.classList.toggle("lit", node.getAttribute("data-pass") === pass);
  });
  return view;
}

function timelineSection(generations) {
  const methods = [...new Set(generations.map((each) => each.method))];
  const name = (each) => `${each.workload}, ${words(each.category)}, ${each.question}`;
  const prompts = [...new Set(generations.map(name))];
  const place = el("div");
  const draw = () => {
    const found = generations.find((each) => name(each) === prompt.value && each.method === method.value);
    place.replaceChildren(found ? timelineView(found) : el("p", { class: "note" }, "Not recorded."));
  };
  const choice = (values, chosen) => {
    const node = el("select", {}, values.map((value) => el("option", { value, selected: value === chosen ? "" : null }, value)));
    node.addEventListener("change", draw);
    return node;
  };
  // Begin with a middling prompt, neither the best nor the worst that was recorded.
  const first = methods.find((each) => each !== "none") || methods[0];
  const gain = (each) => each.timeline.passes.reduce((sum, pass) => sum + pass.accepted.length, 0) / each.timeline.passes.length;
  const ranked = generations.filter((each) => each.method === first).sort((a, b) => gain(a) - gain(b));
  const method = choice(methods, first), prompt = choice(prompts, name(ranked[Math.floor(ranked.length / 2)]));
  const key = { kept: "drafted and accepted", bonus: "the model's own token", lost: "drafted and rejected" };
  draw();
  return el("section", {}, el("h2", {}, "One generation, pass by pass"),
    el("p", { class: "note" }, "Every column is one pass of the model; what it keeps becomes text. Point at a token to read it. " +
      "Recorded apart from what was timed, by methods that begin anew with the text: one that remembers earlier texts is shown cold."),
    el("div", { class: "controls" }, el("label", {}, "Method ", method), el("label", {}, "Prompt ", prompt)),
    el("ul", { class: "legend" }, Object.entries(key).map(([kind, name]) =>
      el("li", {}, sv("svg", { viewBox: "0 0 12 12", "aria-hidden": "true" }, sv("rect", { class: `sw ${kind}`, width: 12, height: 12, rx: 2 })), name))),
    place);
}
