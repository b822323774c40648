// What monitors said along a text, one line each over its tokens.

import { el, number, onWidth } from "./dom.js";
import { lines } from "./plots.js";

export function scoresOf(found) {
  return found.map(({ name, limit, scores, flagged, error }) => {
    const points = scores.map((score, at) => [at, score]).filter(([, score]) => score !== null);
    const said = [
      `${name} ${points.length ? +points.at(-1)[1].toPrecision(3) : "–"}`,
      limit === null ? "no limit" : `limit ${+limit.toPrecision(3)}`,
      flagged === null ? "nothing flagged" : `flagged at token ${number(flagged + 1)}`,
    ].join(", ");
    const plot = el("div", { class: "plot" });
    const ends = [scores.length ? "token 1" : "", scores.length > 1 ? `${scores.length}` : ""];
    const to = Math.max(scores.length - 1, 1);
    // Scores of either sign are drawn from the lowest one on.
    const low = Math.min(0, ...points.map(([, score]) => score));
    const raised = (list) => list.map(([at, score]) => [at, score - low]);
    const bound = limit === null ? [] : [{ class: "warn", points: raised([[0, limit], [to, limit]]) }];
    onWidth(plot, (width) => plot.replaceChildren(lines(width, said, [...bound, { class: "chosen", points: raised(points) }], { to, ends, least: 0.001 })));
    return el("figure", { class: "scores" }, el("figcaption", { class: "soft" }, error ? `${said}; turned off: ${error}` : said, low < 0 ? `; drawn from ${+low.toPrecision(3)} up` : ""), points.length > 1 && plot);
  });
}
