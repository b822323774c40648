// A draft as a tree: from the last token on the left to what it became on the right.

import { count, drawing, sv } from "./dom.js";

const ROW = 22;
const GAP = 15;
const CHARACTER = 6.7;
const LONGEST = 14;
const MOST = 160;

// What a token looks like where spaces would not be seen.
export function visible(text) {
  const shown = text.replaceAll("\n", "⏎").replaceAll("\t", "⇥").replace(/^ | $/g, "␣");
  const signs = [...(shown || "∅")];
  return signs.length > LONGEST ? `${signs.slice(0, LONGEST - 1).join("")}…` : signs.join("");
}

// Nodes with what the rule chose after the accepted ones, each with its depth, its row and how it fared.
function laidOut({ texts, parents, accepted }, chosen) {
  const kept = new Set([0, ...accepted]);
  const nodes = texts.map((text, id) => ({ id, text, parent: parents[id], kind: id === 0 ? "root" : kept.has(id) ? "drafted" : "lost" }))
    .filter((node) => node.id < MOST || kept.has(node.id));
  if (chosen) nodes.push({ id: texts.length, text: chosen.text, parent: accepted.at(-1) ?? 0, kind: "chosen" });
  const byId = new Map(nodes.map((node) => [node.id, node]));
  const below = new Map();
  for (const node of nodes) {
    node.depth = node.parent < 0 ? 0 : byId.get(node.parent).depth + 1;
    if (node.parent >= 0) below.set(node.parent, [...(below.get(node.parent) ?? []), node]);
  }
  // What became text runs straight along the top.
  const rank = { drafted: 0, chosen: 1, lost: 2 };
  let row = 0;
  const stack = [byId.get(0)];
  while (stack.length) {
    const node = stack.pop();
    const children = (below.get(node.id) ?? []).sort((a, b) => rank[a.kind] - rank[b.kind] || a.id - b.id);
    node.row ??= 0;
    children.forEach((child, place) => { child.first = place === 0; });
    if (node.id !== 0 && !node.first) row += 1;
    node.row = row;
    stack.push(...children.reverse());
  }
  return { nodes, byId, rows: row + 1 };
}

export function tree(pass, width) {
  const chosen = pass.tokens.find((token) => token.how === "chosen");
  const { nodes, byId, rows } = laidOut(pass.tree, chosen);
  const widths = [];
  for (const node of nodes) {
    node.label = visible(node.text);
    node.width = [...node.label].length * CHARACTER + 11;
    widths[node.depth] = Math.max(widths[node.depth] ?? 0, node.width);
  }
  const lefts = [1];
  widths.forEach((each, depth) => { lefts[depth + 1] = lefts[depth] + each + GAP; });
  const x = (node) => lefts[node.depth];
  const y = (node) => node.row * ROW + ROW / 2 + 2;
  const edges = nodes.filter((node) => node.parent >= 0).map((node) => {
    const from = byId.get(node.parent);
    const [x1, y1, x2, y2] = [x(from) + from.width, y(from), x(node), y(node)];
    const bend = lefts[from.depth + 1] - GAP / 2;
    return sv("path", { class: `edge ${node.kind}`, d: `M${x1},${y1}H${bend - 5}Q${bend},${y1} ${bend},${y1 + Math.sign(y2 - y1) * 5}V${y2 - Math.sign(y2 - y1) * 5}Q${bend},${y2} ${bend + 5},${y2}H${x2}` });
  });
  const boxes = nodes.map((node) =>
    sv("g", { class: `node ${node.kind}`, transform: `translate(${x(node)},${y(node)})` },
      sv("rect", { y: -9, width: node.width, height: 18, rx: 4 }),
      sv("text", { x: 6, y: 3.7 }, node.label)));
  const drafted = pass.tree.tokens.length - 1;
  const label = `Draft of ${count(drafted, "token")}, ${pass.accepted} accepted: ${pass.tokens.map((token) => visible(token.text)).join(" ")}`;
  return drawing(Math.max(width, lefts.at(-1) - GAP + 2), rows * ROW + 4, label, edges, boxes);
}
