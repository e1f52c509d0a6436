/** Starts the page: chooses the view by the address's fragment, the colours, and the state of the connection. */

import { ChatView } from "./chat/chat_view.js";
import { EngineView } from "./engine/engine_view.js";
import { RequestsView } from "./requests/requests_view.js";
import { onConnection, watchConnection } from "./shared/connection.js";
import { icon } from "./shared/dom.js";
import { getJson } from "./shared/server.js";

const VIEWS = { chat: ChatView, engine: EngineView, requests: RequestsView };
const THEMES = { auto: "Colours: as the system has them", light: "Colours: light", dark: "Colours: dark" };
const THEME_ICONS = { auto: "auto", light: "sun", dark: "moon" };
const THEME = "minisgl.theme";
const DARK = matchMedia("(prefers-color-scheme: dark)");
const opened = {};
let shown = null;

/** Show the view that the fragment names: "#requests/ID" is the view requests, told of ID. */
function route() {
  const [name, ...rest] = location.hash.slice(1).split("/");
  // "#main" is the link past the navigation; it moves the focus and changes no view.
  if (name === "main" && shown) return;
  const view = name in VIEWS ? name : "chat";
  for (const link of document.querySelectorAll("[data-view]")) {
    if (link.dataset.view === view) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
  if (shown && shown !== view) opened[shown].hide();
  for (const other of Object.keys(VIEWS)) document.getElementById(other).hidden = other !== view;
  opened[view] ??= new VIEWS[view](document.getElementById(view));
  shown = view;
  document.title = view === "chat" ? "minisgl" : `${view} · minisgl`;
  opened[view].show(decodeURIComponent(rest.join("/")));
}

function setTheme(theme) {
  const button = document.getElementById("theme");
  document.documentElement.dataset.theme = theme === "auto" ? (DARK.matches ? "dark" : "light") : theme;
  button.title = THEMES[theme];
  button.setAttribute("aria-label", THEMES[theme]);
  button.replaceChildren(icon(THEME_ICONS[theme]));
  localStorage.setItem(THEME, theme);
  dispatchEvent(new Event("themechange"));
}

function nextTheme() {
  const names = Object.keys(THEMES);
  setTheme(names[(names.indexOf(localStorage.getItem(THEME)) + 1) % names.length]);
}

async function showModel() {
  const { data } = await getJson("v1/models");
  document.getElementById("model").textContent = data[0].id;
  document.getElementById("model").title = `${data[0].id}, at most ${data[0].max_model_len} tokens`;
}

setTheme(localStorage.getItem(THEME) in THEMES ? localStorage.getItem(THEME) : "auto");
document.getElementById("theme").addEventListener("click", nextTheme);
DARK.addEventListener("change", () => setTheme(localStorage.getItem(THEME)));
addEventListener("hashchange", route);
onConnection(({ kind, text }) => {
  document.getElementById("state").dataset.kind = kind;
  document.getElementById("state-text").textContent = text;
  if (kind === "ready") showModel().catch(() => {});
});
watchConnection();
route();
