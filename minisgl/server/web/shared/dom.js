/** Builds DOM nodes. Text is always set as text, so no answer of a model or server becomes markup here. */

/**
 * An element with properties and children.
 *
 * @param {string} tag name, with classes behind dots: "button.icon"
 * @param {Object<string, *>} properties on... = listener; data-..., aria-..., role = attribute; else property
 * @param {...(Node|string|null|undefined|false)} children nodes and texts; null and false are left out
 * @returns {HTMLElement}
 */
export function h(tag, properties = {}, ...children) {
  const [name, ...classes] = tag.split(".");
  const element = document.createElement(name);
  if (classes.length) element.className = classes.join(" ");
  for (const [key, value] of Object.entries(properties)) {
    if (value === undefined || value === null) continue;
    if (key.startsWith("on")) element.addEventListener(key.slice(2), value);
    else if (key === "role" || key === "for" || key.includes("-")) element.setAttribute(key, value);
    else element[key] = value;
  }
  element.append(...present(children));
  return element;
}

/** Replace what is in an element, by children as those of `h`. */
export function fill(element, ...children) {
  element.replaceChildren(...present(children));
}

function present(children) {
  return children.filter((child) => child !== null && child !== undefined && child !== false);
}

const SVG = "http://www.w3.org/2000/svg";
const ICONS = {
  plus: "M12 5v14M5 12h14",
  send: "M12 19V5M6 11l6-6 6 6",
  stop: "M7 7h10v10H7z",
  copy: "M9 9h10v11H9zM5 15V4h10",
  edit: "M4 20h4L19 9l-4-4L4 16z",
  retry: "M20 11a8 8 0 1 0-2.3 6.3M20 5v6h-6",
  left: "M14 6l-6 6 6 6",
  right: "M10 6l6 6-6 6",
  gear: "M4 7h9M17 7h3M13 7a2 2 0 1 0 4 0 2 2 0 1 0-4 0M4 17h3M11 17h9M7 17a2 2 0 1 0 4 0 2 2 0 1 0-4 0",
  trash: "M5 7h14M10 7V4h4v3M7 7l1 13h8l1-13",
  save: "M12 4v11M7 11l5 5 5-5M5 20h14",
  open: "M12 16V5M7 9l5-5 5 5M5 20h14",
  menu: "M4 6h16M4 12h16M4 18h16",
  sun: "M12 8a4 4 0 1 0 0 8 4 4 0 0 0 0-8M12 2v2M12 20v2M2 12h2M20 12h2M5 5l1.5 1.5M17.5 17.5L19 19M5 19l1.5-1.5M17.5 6.5L19 5",
  moon: "M20 14.5A8.5 8.5 0 1 1 9.5 4a7 7 0 0 0 10.5 10.5z",
  auto: "M12 4a8 8 0 1 0 0 16zM12 4a8 8 0 0 1 0 16M12 8h5M12 12h7.5M12 16h5",
  colours: "M4 18V9M9 18V5M14 18v-7M19 18V8",
  close: "M6 6l12 12M18 6L6 18",
};

/** A drawn sign of 18 pixels that takes its colour from the text around it. */
export function icon(name) {
  const svg = document.createElementNS(SVG, "svg");
  for (const [key, value] of Object.entries({ viewBox: "0 0 24 24", width: 18, height: 18, "aria-hidden": "true" }))
    svg.setAttribute(key, value);
  svg.classList.add("sign");
  const path = document.createElementNS(SVG, "path");
  path.setAttribute("d", ICONS[name]);
  svg.append(path);
  return svg;
}

/** A button that shows a sign only. `label` is its name for screen readers and its tooltip. */
export function iconButton(name, label, onclick, properties = {}) {
  return h("button.icon", { type: "button", title: label, "aria-label": label, onclick, ...properties }, icon(name));
}

/** Offer `text` as a file to be saved. */
export function saveFile(name, text, type = "application/json") {
  const url = URL.createObjectURL(new Blob([text], { type }));
  h("a", { href: url, download: name }).click();
  setTimeout(() => URL.revokeObjectURL(url), 1000);
}

/** Let a screen reader say `text`, once. */
export function announce(text) {
  let place = document.getElementById("announcer");
  if (!place) {
    place = h("div.unseen", { id: "announcer", role: "status", "aria-live": "polite" });
    document.body.append(place);
  }
  place.textContent = text;
}
