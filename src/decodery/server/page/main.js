// What all views share: where one is, the colours, the key.

import { get, setKey } from "./api.js";
import { Compare } from "./compare.js";
import { el } from "./dom.js";
import { Load } from "./load.js";
import { Write } from "./write.js";

const VIEWS = ["write", "compare", "load"];
const byId = (id) => document.getElementById(id);

function route() {
  const wanted = location.hash.slice(1);
  if (wanted === "main" && VIEWS.some((each) => !byId(each).hidden)) return; // the skip link
  const view = VIEWS.includes(wanted) ? wanted : "write";
  for (const each of VIEWS) byId(each).hidden = each !== view;
  for (const link of document.querySelectorAll(".top nav a")) {
    if (link.hash === `#${view}`) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
  document.title = `decodery: ${view}`;
}

// Light, dark, or as the system has it.
const THEMES = ["auto", "light", "dark"];
function theme(name) {
  if (name === "auto") delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = name;
  byId("theme").textContent = { auto: "◐ Auto", light: "○ Light", dark: "● Dark" }[name];
  byId("theme").setAttribute("aria-label", `Colours: ${name}`);
  byId("theme").onclick = () => {
    theme(THEMES[(THEMES.indexOf(name) + 1) % THEMES.length]);
  };
}

function askForKey(wrong) {
  byId("key").hidden = false;
  byId("key-again").hidden = false;
  byId("key-error").hidden = !wrong;
  byId("key-error").textContent = wrong ? "The server does not know this key." : "";
  byId("key-text").focus();
}

// Another model has other methods: the page begins anew with it.
function choice(models, id) {
  const select = el("select", { "aria-label": "Model", onchange: () => { location.search = `?model=${encodeURIComponent(select.value)}`; } },
    models.map((each) => el("option", { value: each.id, selected: each.id === id }, each.id)));
  return select;
}

let views = false;
async function start() {
  try {
    const { data: models } = await get("v1/models");
    const named = new URLSearchParams(location.search).get("model");
    const { id } = models.find((each) => each.id === named) ?? models[0];
    const methods = await get(`decodery/methods?model=${encodeURIComponent(id)}`);
    byId("trouble").hidden = true;
    byId("key").hidden = true;
    if (views) return;
    views = true;
    byId("model").replaceChildren(models.length > 1 ? choice(models, id) : id);
    new Write(byId("write"), id, methods.data);
    new Compare(byId("compare"), id, methods.data);
    new Load(byId("load"), byId("pulse"));
  } catch (error) {
    if (error.status === 401) return;
    byId("trouble").textContent = error.message;
    byId("trouble").hidden = false;
    setTimeout(start, 3000);
  }
}

byId("key").addEventListener("submit", (event) => {
  event.preventDefault();
  setKey(byId("key-text").value.trim());
  byId("key-text").value = "";
  start();
});
byId("key-again").addEventListener("click", () => askForKey(false));
addEventListener("key-wanted", (event) => askForKey(event.detail.wrong));
addEventListener("hashchange", route);
theme("auto");
route();
start();
